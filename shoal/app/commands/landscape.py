"""`shoal landscape`: look at what lies around and between the members of a run."""

from argparse import Namespace
from collections import Counter
from dataclasses import replace

import shoal.analysis.landscape.parts  # noqa: F401  # registers them
from shoal.analysis.landscape.study import Effort, registry, study
from shoal.app.build import check_device
from shoal.app.findings import finding
from shoal.app.judged_data import judged_data
from shoal.app.outcome import Outcome
from shoal.app.threads import set_threads
from shoal.app.ticker import Ticker
from shoal.core.errors import ConfigError
from shoal.training.run import load

__all__ = ["run"]


def run(options: Namespace) -> Outcome:
    """Compute the parts that were asked for, and say what each of them shows."""
    check_device(options.device)
    names = _names(options.parts)
    effort = _effort(options)
    found = load(options.run)
    set_threads(options.threads, found.ensemble.weights, 100 * effort.points)
    if options.device is not None:
        found.ensemble.to(options.device)
    data = judged_data(found, options.run, options.data)
    with Ticker(len(names), show=not options.quiet) as ticker:

        def tell(name: str, kept: bool) -> None:
            ticker.tick(f"{name} (was there already)" if kept else name)

        seen: Counter[str] = Counter()

        def tick(name: str, count: int) -> None:
            seen[name] += count
            ticker.note(f"{name}: {seen[name]:,} networks")

        parts = study(found, data, names, effort=effort, fresh=options.fresh, tell=tell, tick=tick)
    labels = found.likelihood.about.has_classes
    told = {name: finding(name, part, labels) for name, part in parts.items()}
    text = "\n\n".join(f"{name}\n  {sentence}" for name, sentence in told.items())
    where = f"Kept in {options.run}/landscape; for a page type: shoal report {options.run}"
    value = {name: {"sentence": told[name], **part.scores} for name, part in parts.items()}
    return Outcome(f"{text}\n\n{where}", value)


def _names(text: str | None) -> list[str]:
    if text is None:
        return registry.names()
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names:
        raise ConfigError(f"--parts names no part; choose from: {', '.join(registry)}")
    for name in names:
        registry[name]
    return names


def _effort(options: Namespace) -> Effort:
    effort = Effort.quick() if options.quick else Effort()
    for key in ("points", "inputs", "steps"):
        wanted = getattr(options, key)
        if wanted is not None:
            if wanted < 2:
                raise ConfigError(f"--{key} must be 2 or more, not {wanted}")
            effort = replace(effort, **{key: wanted})
    return effort

"""`shoal landscape`: look at what lies around and between the members of a run."""

from argparse import Namespace
from shlex import quote

from shoal.cli.outcome import Outcome, judged_data, opened_for
from shoal.engine.autotune import set_threads
from shoal.evaluation.analyse import landscape
from shoal.experiment.build import check_device
from shoal.page.findings import finding

__all__ = ["run"]


def run(options: Namespace) -> Outcome:
    """Compute the parts that were asked for, and say what each of them shows."""
    check_device(options.device)
    found = opened_for("landscape", options.run)
    set_threads(options.threads, found.ensemble.weights, 100 * (options.points or 41))
    names = None if options.parts is None else options.parts.split(",")
    parts = landscape(
        found,
        judged_data(found, options.run, options.data, "landscape"),
        parts=names and [name.strip() for name in names if name.strip()],
        quick=options.quick,
        points=options.points,
        inputs=options.inputs,
        steps=options.steps,
        fresh=options.fresh,
        device=options.device,
        progress=not options.quiet,
    )
    labels = found.likelihood.about.has_classes
    told = {name: finding(name, part, labels) for name, part in parts.items()}
    text = "\n\n".join(f"{name}\n  {sentence}" for name, sentence in told.items())
    where = f"Kept in {options.run}/landscape; for a page type: shoal report {quote(options.run)}"
    value = {name: {"sentence": told[name], **part.scores} for name, part in parts.items()}
    return Outcome(f"{text}\n\n{where}", value)

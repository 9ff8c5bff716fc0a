"""`shoal landscape`: the loss landscape around and between the members of a run."""

from argparse import Namespace
from shlex import quote

from shoal.cli.outcome import Outcome, evaluation_dataset, opened_for
from shoal.engine.resources.autotune import set_threads
from shoal.evaluation.analyse import landscape
from shoal.experiment.build import check_device
from shoal.page.findings import finding

__all__ = ["run"]


def run(options: Namespace) -> Outcome:
    """Compute the requested analyses, and describe each result."""
    check_device(options.device)
    opened = opened_for("landscape", options.run, options.model)
    set_threads(options.threads, opened.ensemble.weights, 100 * (options.points or 41))
    names = None if options.analyses is None else options.analyses.split(",")
    results = landscape(
        opened,
        evaluation_dataset(opened, options.run, options.data, "landscape"),
        parts=names and [name.strip() for name in names if name.strip()],
        quick=options.quick,
        points=options.points,
        inputs=options.inputs,
        steps=options.steps,
        fresh=options.fresh,
        device=options.device,
        progress=not options.quiet,
    )
    labels = opened.likelihood.about.has_classes
    sentences = {name: finding(name, result, labels) for name, result in results.items()}
    text = "\n\n".join(f"{name}\n  {sentence}" for name, sentence in sentences.items())
    where = f"Kept in {options.run}/landscape; for a report type: shoal report {quote(options.run)}"
    value = {
        name: {"sentence": sentences[name], **result.scores} for name, result in results.items()
    }
    return Outcome(f"{text}\n\n{where}", value)

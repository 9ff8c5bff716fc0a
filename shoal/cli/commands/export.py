"""`shoal export`: a run as one file for onnxruntime or torch."""

from argparse import Namespace

from shoal.cli.outcome import Outcome, opened_for
from shoal.core.display.text import counted, table
from shoal.data.load import load_file
from shoal.engine.resources.autotune import set_threads
from shoal.integrations.export import export

__all__ = ["run"]


def run(options: Namespace) -> Outcome:
    """Write the file, and print its outputs with their difference from `predict`."""
    opened = opened_for("export", options.run, options.model)
    set_threads(options.threads, opened.ensemble.weights, 64)
    done = export(
        opened,
        options.out,
        None if options.inputs is None else load_file(options.inputs).x,
        weights=options.weights,
        members=options.members,
        most=options.most,
        quantiles=options.quantiles or (),
        merge=options.merge,
        precision=options.precision,
        compile=options.compile,
        tolerance=options.tolerance,
    )
    rows = [
        [each["name"], f"{done.differences[each['name']]:.1e}", each["meaning"]]
        for each in done.metadata["outputs"]
    ]
    left = done.metadata["left_out"]
    rest = f"; left out: {', '.join(map(str, left))}" if left else ""
    text = f"{counted(done.metadata['members'], 'member')}, {done.bytes:,} bytes{rest}"
    value = {
        "file": str(done.path),
        "bytes": done.bytes,
        "differences": done.differences,
        "metadata": done.metadata,
    }
    header = ["output", "difference", "meaning"]
    return Outcome(f"{table(rows, header)}\n\nWritten to {done.path}: {text}", value)

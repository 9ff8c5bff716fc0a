"""`shoal predict`: predictions of a run for the inputs in a file."""

import csv
import io
from argparse import Namespace
from pathlib import Path

import numpy as np

from shoal.cli import ranks
from shoal.cli.outcome import Outcome, file_inputs, opened_for
from shoal.core.errors import ConfigError
from shoal.core.storage.disk import replacing
from shoal.core.storage.files import write_text
from shoal.data.load import load_file
from shoal.engine.resources.autotune import set_threads
from shoal.experiment.build import check_device
from shoal.prediction import Predictive
from shoal.prediction.predict import predict_together
from shoal.prediction.predictive import main_columns

__all__ = ["run"]

MEMBERS = ".safetensors"
"""Ending of a file with the outputs of every member."""


def run(options: Namespace) -> Outcome:
    """Print the predictions or write them to a file, one row per input."""
    out = None if options.out is None else Path(options.out)
    if out is not None and out.suffix.lower() not in (".csv", ".npz", MEMBERS):
        raise ConfigError(
            f"predictions are written as .csv, .npz or {MEMBERS}, not as {out.name!r}"
        )
    ranks.together()
    device = ranks.own_device(options.device)
    check_device(device)
    source = opened_for("predict", options.run, options.model)
    set_threads(options.threads, source.ensemble.weights, 1024)
    x = file_inputs(load_file(options.file).x, source, options.file)
    members_out = out if out is not None and out.suffix.lower() == MEMBERS else None
    pred = predict_together(source, x, device=device, out=members_out)
    if pred is None:
        return Outcome("", None)  # the first process has the prediction and writes it
    if members_out is not None:
        sentence = f"predictions of {pred.size} members for {len(pred)} inputs written to {out}"
        return Outcome(sentence, {"file": str(out), "rows": len(pred), "members": pred.size})
    columns = main_columns(pred)
    if out is None:
        return Outcome(_csv(columns).rstrip(), _rows(columns))
    if out.suffix.lower() == ".npz":
        _write_npz(out, columns | _arrays(pred))
    else:
        write_text(out, _csv(columns))
    return Outcome(
        f"{len(pred)} predictions written to {out}", {"file": str(out), "rows": len(pred)}
    )


def _arrays(pred: Predictive) -> dict[str, np.ndarray]:
    """Arrays that do not fit a table: all class probabilities."""
    return {"probs": pred.probs.numpy()} if pred.likelihood.about.has_classes else {}


def _rows(columns: dict[str, np.ndarray]) -> list[dict[str, float]]:
    values = zip(*(column.tolist() for column in columns.values()), strict=True)
    return [dict(zip(columns, row, strict=True)) for row in values]


def _csv(columns: dict[str, np.ndarray]) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows(
        [f"{value:.6g}" if isinstance(value, float) else value for value in row.values()]
        for row in _rows(columns)
    )
    return text.getvalue()


def _write_npz(path: Path, arrays: dict[str, np.ndarray]) -> None:
    size = sum(array.nbytes for array in arrays.values())
    with replacing(path, size) as temporary, open(temporary, "wb") as file:
        np.savez(file, **arrays)  # pyright: ignore[reportArgumentType]

"""The certificate of a run in its folder, or in its `results` without a folder."""

import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

from shoal.analysis.fidelity.certificate import Certificate
from shoal.core.errors import CheckpointCorrupt
from shoal.core.files import read_sealed, sealed, write_json
from shoal.training.own_data import again
from shoal.training.run import run_id

__all__ = ["FILE", "keep_certificate", "kept_certificate", "load_certificate"]

FILE = "certificate.json"
"""File name in the folder of a run; `fidelity.json` belongs to the study of methods."""


def keep_certificate(run: Any, found: Certificate) -> None:
    """Store a certificate with its run."""
    if run.folder is None:
        run.results["fidelity"] = found
        return
    table = {**asdict(found), "run_id": run_id(run.folder)}
    write_json(Path(run.folder) / FILE, sealed(table))


def kept_certificate(run: Any) -> Certificate | None:
    """The stored certificate of a run; None without any."""
    if getattr(run, "folder", None) is not None:
        return load_certificate(run.folder)
    return getattr(run, "results", {}).get("fidelity")


def load_certificate(folder: Path | str) -> Certificate | None:
    """The certificate in the folder of a run; None without any."""
    path = Path(folder) / FILE
    if not path.exists():
        return None
    value = read_sealed(path)
    if value.pop("run_id", None) != run_id(folder):
        raise CheckpointCorrupt(f"{path} belongs to another run; type: {again('fidelity', folder)}")
    try:
        found = Certificate(**value)
        rows = {label: _numbers(row) for label, row in found.distances.items()}
        return Certificate(**{**asdict(found), "distances": rows})
    except (TypeError, ValueError, AttributeError) as error:
        raise CheckpointCorrupt(
            f"{path} is not a valid certificate ({error}); type: {again('fidelity', folder)}"
        ) from None


def _numbers(row: dict[str, Any]) -> dict[str, float]:
    """The row with null (a number that is not finite) as NaN."""
    return {name: math.nan if value is None else float(value) for name, value in row.items()}

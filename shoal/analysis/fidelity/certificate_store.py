"""The certificate of a run in its folder, or in its `results` without a folder."""

import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

from shoal.analysis.fidelity.certificate import Certificate
from shoal.analysis.stored_results import keep_result, stored_table
from shoal.core.errors import CheckpointCorrupt
from shoal.training.folder.own_data import again

__all__ = ["FILE", "keep_certificate", "kept_certificate", "load_certificate"]

FILE = "certificate.json"
"""File name in the folder of a run; `fidelity.json` belongs to the study of methods."""


def keep_certificate(run: Any, found: Certificate) -> None:
    """Store a certificate with its run."""
    keep_result(run, "fidelity", FILE, found)


def kept_certificate(run: Any) -> Certificate | None:
    """The stored certificate of a run; None without any."""
    if getattr(run, "folder", None) is not None:
        return load_certificate(run.folder)
    return getattr(run, "results", {}).get("fidelity")


def load_certificate(folder: Path | str) -> Certificate | None:
    """The certificate in the folder of a run; None without any."""
    value = stored_table(folder, FILE, "fidelity")
    if value is None:
        return None
    try:
        found = Certificate(**value)
        rows = {label: _numbers(row) for label, row in found.distances.items()}
        return Certificate(**{**asdict(found), "distances": rows})
    except (TypeError, ValueError, AttributeError) as error:
        raise CheckpointCorrupt(
            f"{Path(folder) / FILE} is not a valid certificate ({error}); "
            f"type: {again('fidelity', folder)}"
        ) from None


def _numbers(row: dict[str, Any]) -> dict[str, float]:
    """The row with null (a number that is not finite) as NaN."""
    return {name: math.nan if value is None else float(value) for name, value in row.items()}

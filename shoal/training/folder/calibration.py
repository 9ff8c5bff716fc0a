"""The calibrated likelihood of a run, in a file beside the checkpoint that it belongs to."""

from pathlib import Path
from typing import Any

import torch

from shoal.core.errors import CheckpointCorrupt, ConfigError
from shoal.core.storage.checkpoints import steps
from shoal.core.storage.files import read_sealed, sealed, write_json
from shoal.core.values import check_spec
from shoal.inference import likelihoods
from shoal.inference.likelihoods import Likelihood
from shoal.training.folder.run_folder import RunFolder

__all__ = ["CALIBRATION", "calibration_note", "read_calibration", "write_calibration"]

CALIBRATION = "calibration.json"
"""File of the calibrated likelihood, in the folder of a run."""


def write_calibration(folder: Path, likelihood: Likelihood) -> None:
    """Store the likelihood for the last checkpoint of the run in this folder."""
    files = RunFolder(folder)
    table = {
        "run_id": files.provenance().get("run_id"),
        "step": steps(files.checkpoints)[-1],
        "likelihood": likelihoods.registry.spec(likelihood),
        "numbers": {name: tensor.tolist() for name, tensor in likelihood.state.items()},
    }
    write_json(folder / CALIBRATION, sealed(table))


def read_calibration(folder: Path, step: int | None = None) -> Likelihood | None:
    """The calibrated likelihood of a run at a step, by default its last; None if it has none.

    Members that were trained on need another calibration, so that of an earlier step is left out.
    """
    path, files = folder / CALIBRATION, RunFolder(folder)
    if not path.exists():
        return None
    table: dict[str, Any] = read_sealed(path)
    step = steps(files.checkpoints)[-1] if step is None else step
    if (table.get("run_id"), table.get("step")) != (files.provenance().get("run_id"), step):
        return None
    try:
        check_spec("likelihood", table["likelihood"], likelihoods.registry)
        made = likelihoods.registry.make(table["likelihood"])
        numbers = table["numbers"].items()
        return made.restored(
            {name: torch.tensor(values, dtype=torch.float64) for name, values in numbers}
        )
    except (AttributeError, ConfigError, KeyError, TypeError, ValueError) as error:
        raise CheckpointCorrupt(
            f"{path} is not what shoal.calibrate writes ({error}); remove it, and calibrate again"
        ) from None


def calibration_note(likelihood: Likelihood) -> str:
    """One sentence about the numbers of a calibration."""
    return f"Predictions are calibrated on held-out points: {likelihood}."

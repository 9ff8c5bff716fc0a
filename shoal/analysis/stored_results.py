"""The result of an analysis with its run: in the run's folder, or in its `results` without one."""

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from shoal.core.errors import CheckpointCorrupt
from shoal.core.storage.files import read_sealed, sealed, write_json
from shoal.training.folder.own_data import again
from shoal.training.folder.run import run_id

__all__ = ["keep_result", "kept_result", "stored_table", "write_result"]


def write_result(folder: Path | str, file: str, result: Any) -> None:
    """Write a dataclass to the folder of the run, with the run's name and a digest."""
    write_json(Path(folder) / file, sealed({**asdict(result), "run_id": run_id(folder)}))


def keep_result(run: Any, analysis: str, file: str, result: Any) -> None:
    """Store a dataclass in the run's folder, or in its `results` without a folder."""
    if run.folder is None:
        run.results[analysis] = result
    else:
        write_result(run.folder, file, result)


def kept_result(run: Any, analysis: str, load: Callable[[Path], Any]) -> Any:
    """What `load` reads from the run's folder; without a folder, what is in its `results`."""
    if getattr(run, "folder", None) is not None:
        return load(run.folder)
    return getattr(run, "results", {}).get(analysis)


def stored_table(folder: Path | str, file: str, analysis: str) -> dict[str, Any] | None:
    """The fields that `write_result` stored; None without any."""
    path = Path(folder) / file
    if not path.exists():
        return None
    table = read_sealed(path)
    if table.pop("run_id", None) != run_id(folder):
        raise CheckpointCorrupt(f"{path} belongs to another run; type: {again(analysis, folder)}")
    return table

"""All landscape analyses of a run; each is computed once and stored in the run's folder."""

import functools
import warnings
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from shoal.analysis.landscape.scene import AnalysisResult, Effort, Scene, registry
from shoal.analysis.stored_results import kept_result
from shoal.core.errors import ConfigError, DataError, ShoalWarning, StorageError
from shoal.core.storage.files import read_json, read_tensors, write_json, write_tensors
from shoal.data.dataset import Dataset
from shoal.engine.members.precision import full_precision
from shoal.training.folder.own_data import again

__all__ = ["kept_study", "load_part", "load_study", "study"]

FORMAT, FOLDER = 2, "landscape"


@full_precision()
def study(
    run: Any,
    data: Dataset,
    parts: Iterable[str] | None = None,
    *,
    effort: Effort | None = None,
    fresh: bool = False,
    seed: int = 0,
    tell: Callable[[str, bool], None] = lambda name, kept: None,
    tick: Callable[[str, int], None] = lambda name, count: None,
) -> dict[str, AnalysisResult]:
    """Analyse the loss landscape around the members of a run.

    Analyses that the run's folder already holds at this effort are reused. An analysis that this
    run does not support reports the reason and does not stop the others.

    Args:
        run: a run from `fit` or `load`.
        data: training and test data.
        parts: names of analyses; all by default.
        effort: resolution of the analyses.
        fresh: recompute everything.
        seed: fixes all randomness.
        tell: called with the name of each finished analysis, and whether it was reused.
        tick: called with the name of the current analysis and the number of networks evaluated
            since the last call.
    """
    import shoal.analysis.landscape.analyses  # noqa: F401  # registers them

    names: Sequence[str] = registry.names() if parts is None else list(parts)
    builders = {name: registry[name] for name in names}
    scene = Scene(run, data, effort or Effort(), seed)
    scene.run.ensemble.train(False)
    results = {}
    for name, build in builders.items():
        scene.tick = functools.partial(tick, name)
        key = {"format": FORMAT, "epochs": len(run.history), "seed": seed, **vars(scene.effort)}
        kept = None if fresh or run.folder is None else _kept(run.folder, name, key)
        if kept is None:
            results[name] = _attempt(build, scene)
            if run.folder is not None:
                _keep(run.folder, name, results[name], key)
        else:
            results[name] = kept
        tell(name, kept is not None)
    if run.folder is None and hasattr(run, "results"):
        run.results["landscape"] = {**run.results.get("landscape", {}), **results}
    return results


def kept_study(run: Any) -> dict[str, AnalysisResult]:
    """Every analysis that `study` stored in the run's folder, or in its `results`."""
    return kept_result(run, "landscape", load_study) or {}


def _attempt(build: Callable[[Scene], AnalysisResult], scene: Scene) -> AnalysisResult:
    try:
        return build(scene)
    except (ConfigError, DataError) as error:
        return AnalysisResult({"missing": str(error)})


def load_part(folder: Path | str, name: str) -> AnalysisResult | None:
    """One analysis from the folder of a run; None if it is missing."""
    scores, tensors = _files(folder, name)
    if not scores.exists() or not tensors.exists():
        return None
    try:
        stored = read_json(scores)
        return AnalysisResult(stored["scores"], read_tensors(tensors))
    except (StorageError, KeyError, TypeError) as error:
        warnings.warn(
            f"{scores} cannot be read ({error}) and is left out; "
            f"type: {again('landscape', folder)}",
            ShoalWarning,
            stacklevel=2,
        )
        return None


def load_study(folder: Path | str) -> dict[str, AnalysisResult]:
    """Every analysis that `study` stored in the folder of a run."""
    import shoal.analysis.landscape.analyses  # noqa: F401  # registers them

    stored = {name: load_part(folder, name) for name in registry}
    return {name: part for name, part in stored.items() if part is not None}


def _kept(folder: Path, name: str, key: dict[str, Any]) -> AnalysisResult | None:
    scores, _ = _files(folder, name)
    part = load_part(folder, name)
    return part if part is not None and read_json(scores).get("key") == key else None


def _keep(folder: Path, name: str, part: AnalysisResult, key: dict[str, Any]) -> None:
    scores, tensors = _files(folder, name)
    # The scores are written last and complete the analysis.
    write_tensors(tensors, {"format": torch.tensor(FORMAT), **part.tensors})
    write_json(scores, {"key": key, "scores": part.scores})


def _files(folder: Path | str, name: str) -> tuple[Path, Path]:
    where = Path(folder) / FOLDER
    return where / f"{name}.json", where / f"{name}.safetensors"

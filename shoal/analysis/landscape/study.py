"""All landscape analyses of a run; each is computed once and stored in the run's folder.

The input of an analysis is a `Scene`: a run, its data and the effort. Its result has scores and
tensors.
"""

import functools
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shoal.analysis.landscape.points import batch_norms, chosen, finite_members
from shoal.analysis.landscape.subspace import Mode
from shoal.analysis.landscape.survey import Tick, outputs
from shoal.analysis.landscape.trajectories import tracks
from shoal.analysis.stored_results import kept_result
from shoal.core.errors import ConfigError, DataError, ShoalWarning, StorageError
from shoal.core.random import generator
from shoal.core.registry import Registry
from shoal.core.storage.files import read_json, read_tensors, write_json, write_tensors
from shoal.core.structure import Inputs, parted
from shoal.data.dataset import Dataset, Split
from shoal.engine.members.precision import full_precision
from shoal.inference.ensemble import Ensemble
from shoal.inference.posterior import as_points
from shoal.prediction.predictive import Predictive
from shoal.training.folder.own_data import again

__all__ = [
    "AnalysisResult",
    "Effort",
    "Scene",
    "kept_study",
    "load_part",
    "load_study",
    "registry",
    "study",
]


registry = Registry("landscape analysis")


@dataclass(frozen=True)
class Effort:
    """Resolution of the analyses.

    Attributes:
        inputs: number of test inputs, and of training inputs.
        points: points along each side of a plane.
        samples: samples per sampler for diversity against accuracy.
        steps: training steps of a curve.
        products: products with the Hessian, for eigenvalues.
        snapshots: snapshots per member on the maps of trajectories.
        shifts: number of shift sets, evenly chosen from all.
    """

    inputs: int = 2000
    points: int = 41
    samples: int = 50
    steps: int = 300
    products: int = 30
    snapshots: int = 20
    shifts: int = 4

    @classmethod
    def quick(cls) -> "Effort":
        """A coarse resolution for a quick check."""
        return cls(inputs=500, points=11, samples=10, steps=80, products=12, snapshots=8, shifts=2)


@dataclass(frozen=True, eq=False)
class AnalysisResult:
    """Result of one landscape analysis.

    Attributes:
        scores: numbers and text for JSON; "missing" is the reason for an empty result.
        tensors: data of the figures.
    """

    scores: dict[str, Any]
    tensors: dict[str, Tensor] = field(default_factory=dict)


@dataclass(eq=False)
class Scene:
    """A run, its data, and the resolution of the analyses.

    Attributes:
        run: a run from `fit` or `load`.
        data: training and test data.
        effort: resolution of the analyses.
        seed: fixes all randomness.
        tick: called with the number of networks evaluated.
    """

    run: Any
    data: Dataset
    effort: Effort = field(default_factory=Effort)
    seed: int = 0
    tick: Tick = lambda count: None

    @cached_property
    def ensemble(self) -> Ensemble:
        """The finite members."""
        return chosen(self.run.ensemble, finite_members(self.run.ensemble))

    @cached_property
    def test(self) -> Split:
        """Test data, limited by the effort."""
        if self.data.test is None or self.data.test.y is None:
            raise DataError(f"the data set '{self.data.name}' has no labelled test set")
        return self._some(self.data.test)

    @cached_property
    def train(self) -> Split:
        """Training data, limited by the effort."""
        return self._some(self.data.train)

    @property
    def statistics(self) -> Inputs | None:
        """Inputs for the statistics of batch normalisation; None without batch normalisation."""
        return self.train.x if batch_norms(self.ensemble) else None

    @cached_property
    def outputs(self) -> Tensor:
        """Outputs of the members on the test set [M, B, C]; with sites [M, B, ..., C]."""
        return outputs(self.ensemble, self.test.x).cpu()

    def predictive(self, outputs: Tensor) -> Predictive:
        """The prediction of networks with these outputs on the test set; sites become points."""
        points, _ = as_points(self.run.likelihood, outputs, self.test.y)
        return Predictive(points, self.run.likelihood)

    @cached_property
    def modes(self) -> list[Mode]:
        """Every member, with the last snapshots of its training if the run kept snapshots."""
        members = finite_members(self.run.ensemble)
        alone = [chosen(self.run.ensemble, [member]) for member in members]
        try:
            paths = [track.last(10) for track in tracks(self.run, members)]
        except ConfigError:
            return [Mode(solution) for solution in alone]
        return [Mode(*pair) for pair in zip(alone, paths, strict=True)]

    @property
    def shifts(self) -> dict[str, Split]:
        """Shift sets, limited by the effort and evenly chosen from all."""
        names = [name for name, split in self.data.shifts.items() if split.y is not None]
        places = torch.linspace(0, len(names) - 1, min(self.effort.shifts, len(names))).round()
        return {names[int(p)]: self._some(self.data.shifts[names[int(p)]]) for p in places}

    def first(self, count: int) -> Ensemble:
        """The first finite members."""
        if self.ensemble.members < count:
            raise ConfigError(
                f"this analysis needs {count} members, but the run has {self.ensemble.members}"
            )
        return chosen(self.ensemble, range(count))

    def _some(self, split: Split) -> Split:
        some = split.sample(self.effort.inputs, generator(self.seed, "landscape"))
        return Split(some.x, parted(some.y)[0])


FORMAT = 2

FOLDER = "landscape"


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

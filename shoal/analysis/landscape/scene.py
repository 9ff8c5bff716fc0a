"""The input of a landscape analysis (a `Scene`: a run, its data and the effort), and its result."""

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from shoal.analysis.landscape.points import batch_norms, chosen, finite_members
from shoal.analysis.landscape.subspace import Mode
from shoal.analysis.landscape.survey import Tick, outputs
from shoal.analysis.landscape.trajectories import tracks
from shoal.core.errors import ConfigError, DataError
from shoal.core.random import generator
from shoal.core.registry import Registry
from shoal.core.structure import Inputs, parted
from shoal.data.dataset import Dataset, Split
from shoal.inference.ensemble import Ensemble
from shoal.inference.posterior import as_points
from shoal.prediction.predictive import Predictive

__all__ = ["AnalysisResult", "Effort", "Scene", "registry"]

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

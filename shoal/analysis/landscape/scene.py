"""What an analysis of the landscape is given: a run, its data, and how much effort to spend."""

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from shoal.analysis.landscape.points import batch_norms, chosen, living
from shoal.analysis.landscape.subspace import Mode
from shoal.analysis.landscape.survey import Tick, outputs
from shoal.analysis.landscape.trajectories import tracks
from shoal.core.errors import ConfigError, DataError
from shoal.core.random import generator
from shoal.core.registry import Registry
from shoal.data.dataset import Dataset, Split
from shoal.inference.ensemble import Ensemble

__all__ = ["AnalysisResult", "Effort", "Scene", "registry"]

registry = Registry("part of the landscape")


@dataclass(frozen=True)
class Effort:
    """How closely to look.

    Attributes:
        inputs: of the test data and of the training data that are looked at.
        points: along each side of a plane.
        samples: of every sampler on the plane of diversity and accuracy.
        steps: of training a curve.
        products: with the Hessian, for eigenvalues.
        snapshots: of each member on the maps of trajectories.
        shifts: sets of shifted data, spread over those there are.
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
        """Coarse, to see whether it works."""
        return cls(inputs=500, points=11, samples=10, steps=80, products=12, snapshots=8, shifts=2)


@dataclass(frozen=True, eq=False)
class AnalysisResult:
    """One part of the landscape.

    Attributes:
        scores: numbers and words, as JSON has them; "missing" says why there is nothing else.
        tensors: what figures are drawn from.
    """

    scores: dict[str, Any]
    tensors: dict[str, Tensor] = field(default_factory=dict)


@dataclass(eq=False)
class Scene:
    """A run, its data, and how closely to look.

    Attributes:
        run: what `fit` returned or `load` opened.
        data: what it was trained and is judged on.
        effort: how closely to look.
        seed: decides everything random.
        tick: told of progress, in networks looked at.
    """

    run: Any
    data: Dataset
    effort: Effort = field(default_factory=Effort)
    seed: int = 0
    tick: Tick = lambda count: None

    @cached_property
    def ensemble(self) -> Ensemble:
        """The living members."""
        return chosen(self.run.ensemble, living(self.run.ensemble))

    @cached_property
    def test(self) -> Split:
        """Test data, as many as are looked at."""
        if self.data.test is None or self.data.test.y is None:
            raise DataError(f"the data set '{self.data.name}' has no labelled test part")
        return self._some(self.data.test)

    @cached_property
    def train(self) -> Split:
        """Training data, as many as are looked at."""
        return self._some(self.data.train)

    @property
    def statistics(self) -> Tensor | None:
        """Inputs for the statistics of batch normalisation, where there is any."""
        return self.train.x if batch_norms(self.ensemble) else None

    @cached_property
    def outputs(self) -> Tensor:
        """What the members say about the test data [M, B, C]."""
        return outputs(self.ensemble, self.test.x).cpu()

    @cached_property
    def modes(self) -> list[Mode]:
        """Every member, with the last snapshots of its training where they were kept."""
        members = living(self.run.ensemble)
        alone = [chosen(self.run.ensemble, [member]) for member in members]
        try:
            paths = [track.last(10) for track in tracks(self.run, members)]
        except ConfigError:
            return [Mode(solution) for solution in alone]
        return [Mode(*pair) for pair in zip(alone, paths, strict=True)]

    @property
    def shifts(self) -> dict[str, Split]:
        """Shifted test data, as many sets as are looked at, spread over those there are."""
        names = [name for name, split in self.data.shifts.items() if split.y is not None]
        places = torch.linspace(0, len(names) - 1, min(self.effort.shifts, len(names))).round()
        return {names[int(p)]: self._some(self.data.shifts[names[int(p)]]) for p in places}

    def first(self, count: int) -> Ensemble:
        """The first living members."""
        if self.ensemble.members < count:
            raise ConfigError(
                f"this needs {count} members, but the run has {self.ensemble.members}"
            )
        return chosen(self.ensemble, range(count))

    def _some(self, split: Split) -> Split:
        order = torch.randperm(len(split), generator=generator(self.seed, "landscape"))
        index = order[: self.effort.inputs]
        return Split(split.x[index], None if split.y is None else split.y[index])

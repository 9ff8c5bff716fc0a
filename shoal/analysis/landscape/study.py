"""The whole landscape of a run, part by part, each computed once and kept in the run's folder."""

import functools
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shoal.analysis.landscape.points import chosen, living
from shoal.analysis.landscape.statistics import batch_norms
from shoal.analysis.landscape.subspace import Mode
from shoal.analysis.landscape.survey import Tick, outputs
from shoal.analysis.landscape.trajectories import tracks
from shoal.core.errors import ConfigError, DataError, ShoalWarning, StorageError
from shoal.core.files import read_json, read_tensors, write_json, write_tensors
from shoal.core.registry import Registry
from shoal.core.seeds import generator
from shoal.data.dataset import Dataset, Split
from shoal.inference.ensemble import Ensemble
from shoal.training.own_data import again

__all__ = [
    "Effort",
    "Part",
    "Scene",
    "kept_study",
    "load_part",
    "load_study",
    "registry",
    "study",
]

FORMAT = 2
FOLDER = "landscape"

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
class Part:
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
) -> dict[str, Part]:
    """Look at the landscape around the members of a run.

    What the folder of the run already holds, at this effort, is not computed again. A part that
    this run has nothing for says why and does not stop the others.

    Args:
        run: what `fit` returned or `load` opened.
        data: what it was trained and is judged on.
        parts: names from the registry of parts; all by default.
        effort: how closely to look.
        fresh: compute everything again.
        seed: decides everything random.
        tell: called with the name of each part done, and whether it was there already.
        tick: called with the name of the part under way and how many networks were looked at since
            the last call.
    """
    import shoal.analysis.landscape.parts  # noqa: F401  # registers them

    names: Sequence[str] = registry.names() if parts is None else list(parts)
    builders = {name: registry[name] for name in names}
    scene = Scene(run, data, effort or Effort(), seed)
    scene.run.ensemble.train(False)
    found = {}
    for name, build in builders.items():
        scene.tick = functools.partial(tick, name)
        key = {"format": FORMAT, "epochs": len(run.history), "seed": seed, **vars(scene.effort)}
        kept = None if fresh or run.folder is None else _kept(run.folder, name, key)
        if kept is None:
            found[name] = _attempt(build, scene)
            if run.folder is not None:
                _keep(run.folder, name, found[name], key)
        else:
            found[name] = kept
        tell(name, kept is not None)
    if run.folder is None and hasattr(run, "results"):
        run.results["landscape"] = {**run.results.get("landscape", {}), **found}
    return found


def kept_study(run: Any) -> dict[str, Part]:
    """Every part that `study` left in the folder of a run, or in its `results`."""
    if getattr(run, "folder", None) is not None:
        return load_study(run.folder)
    return getattr(run, "results", {}).get("landscape", {})


def _attempt(build: Callable[[Scene], Part], scene: Scene) -> Part:
    try:
        return build(scene)
    except (ConfigError, DataError) as error:
        return Part({"missing": str(error)})


def load_part(folder: Path | str, name: str) -> Part | None:
    """One part, as the folder of a run holds it, or None where it does not."""
    scores, tensors = _files(folder, name)
    if not scores.exists() or not tensors.exists():
        return None
    try:
        found = read_json(scores)
        return Part(found["scores"], read_tensors(tensors))
    except (StorageError, KeyError, TypeError) as error:
        warnings.warn(
            f"{scores} cannot be read ({error}) and is left out; "
            f"type: {again('landscape', folder)}",
            ShoalWarning,
            stacklevel=2,
        )
        return None


def load_study(folder: Path | str) -> dict[str, Part]:
    """Every part that `study` left in the folder of a run."""
    import shoal.analysis.landscape.parts  # noqa: F401  # registers them

    found = {name: load_part(folder, name) for name in registry}
    return {name: part for name, part in found.items() if part is not None}


def _kept(folder: Path, name: str, key: dict[str, Any]) -> Part | None:
    scores, _ = _files(folder, name)
    part = load_part(folder, name)
    return part if part is not None and read_json(scores).get("key") == key else None


def _keep(folder: Path, name: str, part: Part, key: dict[str, Any]) -> None:
    scores, tensors = _files(folder, name)
    # The scores come last and complete the part.
    write_tensors(tensors, {"format": torch.tensor(FORMAT), **part.tensors})
    write_json(scores, {"key": key, "scores": part.scores})


def _files(folder: Path | str, name: str) -> tuple[Path, Path]:
    where = Path(folder) / FOLDER
    return where / f"{name}.json", where / f"{name}.safetensors"

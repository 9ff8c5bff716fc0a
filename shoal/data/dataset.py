"""A data set: inputs and targets of every split, loaded when they are first used."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from shoal.core.notebook import facts_html
from shoal.core.registry import Registry

__all__ = ["Dataset", "LazySplits", "Scaling", "Split", "registry", "sizes", "standardise"]


@dataclass(frozen=True)
class Scaling:
    """Targets standardised as (y - mean) / std.

    >>> Scaling(mean=20.0, std=4.0).original(Tensor([0.5]))
    tensor([22.])

    Attributes:
        mean: of the targets to train on.
        std: their standard deviation.
    """

    mean: float
    std: float

    def original(self, y: Tensor) -> Tensor:
        """Targets or predictions in their own units."""
        return self.mean + self.std * y


def standardise(x: Tensor, like: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Columns of `x` less the mean of `like`, in units of its spread; and the mean and the spread.

    A column that is constant in `like` has nothing to be divided by and is only centred.
    """
    mean, spread = like.mean(0), like.std(0, correction=0)
    # The rounding of a mean leaves a constant column a spread of a few units in the last place.
    constant = spread <= 1e-12 * (1 + mean.abs())
    spread = spread.where(~constant, spread.new_ones(()))
    return (x - mean) / spread, mean, spread


@dataclass(frozen=True, repr=False)
class Split:
    """Inputs [B, ...] and their targets: integers for classes, floats for regression."""

    x: Tensor
    y: Tensor | None = None

    def __len__(self) -> int:
        return len(self.x)

    def __repr__(self) -> str:
        shown = {"x": self.x} if self.y is None else {"x": self.x, "y": self.y}
        parts = [f"{name} {_kind(tensor)}" for name, tensor in shown.items()]
        return f"Split({', '.join(parts)})"


@dataclass(frozen=True, repr=False)
class Dataset:
    """What `fit` trains on and `evaluate` judges by.

    >>> import torch
    >>> Dataset("points", Split(torch.zeros(9, 2), torch.zeros(9, dtype=torch.int64)))
    Dataset('points', classification, 9 train, inputs (2,))

    Attributes:
        name: how it is called in tables and run folders.
        train: the only part that `fit` sees.
        test: data like the training data.
        validation: a part of the training data that was kept back to choose settings by.
        shifts: labelled data that differ from it by something nameable, such as a rotation; many
            of them may be made when they are looked at (`shoal.data.dataset`), so look once.
        ood: data of another kind, which the ensemble should not be sure about.
        classes: names of the classes, in the order of the labels.
        spec: the table that `shoal.data.load` makes it from again, when there is one.
        pixel_range: smallest and largest value of a pixel, where the inputs are images.
        scaling: what the targets were standardised by, where they were.
    """

    name: str
    train: Split
    test: Split | None = None
    shifts: Mapping[str, Split] = field(default_factory=dict)
    ood: dict[str, Split] = field(default_factory=dict)
    classes: tuple[str, ...] | None = None
    spec: dict[str, Any] | None = None
    validation: Split | None = None
    pixel_range: tuple[float, float] | None = None
    scaling: Scaling | None = None

    def __repr__(self) -> str:
        facts = self._facts()
        shape = facts.pop("inputs")
        told = [facts.pop("task"), *(f"{count} {name}" for name, count in facts.items())]
        return f"Dataset({', '.join([repr(self.name), *map(str, told), f'inputs {shape}'])})"

    def _repr_html_(self) -> str:
        return facts_html(f"Dataset {self.name}", self._facts())

    def _facts(self) -> dict[str, object]:
        """What it is in a few words; nothing that is made when it is looked at is made."""
        parts = {"train": self.train, "validation": self.validation, "test": self.test}
        counts: dict[str, object] = {n: len(split) for n, split in parts.items() if split}
        counts |= {n: len(sets) for n, sets in (("shifts", self.shifts), ("ood", self.ood)) if sets}
        return {"task": self.task, **counts, "inputs": self.input_shape}

    @property
    def task(self) -> str:
        """`"classification"` for integer targets, `"regression"` for real ones."""
        return "classification" if self.has_classes else "regression"

    @property
    def has_classes(self) -> bool:
        """The targets are not real numbers, so that they are taken for labels."""
        y = self.train.y
        return y is None or not y.is_floating_point()

    @property
    def outputs(self) -> int:
        """Number of classes, or of target columns."""
        if self.classes is not None:
            return len(self.classes)
        y = self.train.y
        if y is None:
            return 1
        if self.has_classes:
            return int(y.max()) + 1
        return 1 if y.ndim == 1 else y.shape[-1]

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Shape of one input."""
        return tuple(self.train.x.shape[1:])


def _kind(tensor: Tensor) -> str:
    return f"{list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"


class LazySplits(Mapping[str, Split]):
    """Splits by name, each made anew when it is looked at, and not kept.

    Whoever goes through `items()` has one of them in hand at a time; names, their number and the
    counts cost nothing.

    Args:
        makers: a function for each name.
        counts: how many points each will have.
    """

    def __init__(
        self, makers: Mapping[str, Callable[[], Split]], counts: Mapping[str, int]
    ) -> None:
        self._makers, self.counts = dict(makers), dict(counts)

    def __getitem__(self, name: str) -> Split:
        return self._makers[name]()

    def __contains__(self, name: object) -> bool:
        return name in self._makers

    def __iter__(self) -> Iterator[str]:
        return iter(self._makers)

    def __len__(self) -> int:
        return len(self._makers)

    def __repr__(self) -> str:
        return f"LazySplits({', '.join(self._makers)})"


def sizes(parts: Mapping[str, Split]) -> dict[str, int]:
    """Number of points in each part; nothing is made to count it.

    >>> sizes(LazySplits({"fog-1": lambda: 1 / 0}, {"fog-1": 500}))
    {'fog-1': 500}
    """
    if isinstance(parts, LazySplits):
        return dict(parts.counts)
    return {name: len(split) for name, split in parts.items()}


registry = Registry("dataset")

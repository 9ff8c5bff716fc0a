"""A data set: a training part, and the parts on which an ensemble is judged."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from shoal.core.notebook import facts_html
from shoal.data.scaling import Scaling

__all__ = ["Dataset", "Split"]


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
            of them may be made when they are looked at (`shoal.data.lazy`), so look once.
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

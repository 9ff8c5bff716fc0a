"""A data set: a training part, and the parts on which an ensemble is judged."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from shoal.data.scaling import Scaling

__all__ = ["Dataset", "Split"]


@dataclass(frozen=True)
class Split:
    """Inputs [B, ...] and their targets: integers for classes, floats for regression."""

    x: Tensor
    y: Tensor | None = None

    def __len__(self) -> int:
        return len(self.x)


@dataclass(frozen=True)
class Dataset:
    """What `fit` trains on and `evaluate` judges by.

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

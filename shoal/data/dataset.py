"""A data set: inputs and targets of every split, loaded on first use."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Generator, Tensor, randperm

from shoal.core.arguments import check_fields, list_of, text, whole
from shoal.core.display.notebook import facts_html
from shoal.core.errors import DataError
from shoal.core.opaque import Opaque
from shoal.core.random import generator
from shoal.core.registry import Registry
from shoal.core.structure import parted
from shoal.core.values import describe_value

__all__ = [
    "Dataset",
    "LazySplits",
    "Scaling",
    "Split",
    "class_names",
    "held_out",
    "registry",
    "sizes",
    "standardise",
    "training_part",
]


@dataclass(frozen=True)
class Scaling:
    """Targets standardised as (y - mean) / std.

    >>> Scaling(mean=20.0, std=4.0).original(Tensor([0.5]))
    tensor([22.])

    Attributes:
        mean: mean of the training targets.
        std: standard deviation of the training targets.
    """

    mean: float
    std: float

    def original(self, y: Tensor) -> Tensor:
        """Targets or predictions in their original units."""
        return self.mean + self.std * y


def standardise(
    x: Tensor, like: Tensor, weight: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Standardised columns of `x`, with the mean and standard deviation of `like`, and both.

    A column that is constant in `like` is only centred. Rows of `like` may have weights [N].
    """
    if weight is None:
        mean, std = like.mean(0), like.std(0, correction=0)
    else:
        share = (weight / weight.sum()).unsqueeze(-1)
        mean = (share * like).sum(0)
        std = (share * (like - mean).square()).sum(0).sqrt()
    # Rounding of the mean gives a constant column a tiny standard deviation.
    constant = std <= 1e-14 * mean.abs()
    std = std.where(~constant, std.new_ones(()))
    return (x - mean) / std, mean, std


@dataclass(frozen=True, repr=False)
class Split:
    """Inputs [B, ...] and their targets: integers for classes, floats for regression.

    Attributes:
        x: inputs, one tensor or a structure of tensors.
        y: targets; None for inputs alone.
    """

    x: Any
    y: Any = None

    def __len__(self) -> int:
        return len(self.x)

    def batches(self, size: int) -> Iterator[tuple[Any, Any]]:
        """Inputs and targets of `size` data points at a time; batch objects stay whole."""
        start = 0
        for x in self.x.split(whole("size", size)):
            yield x, None if self.y is None else self.y[start : start + len(x)]
            start += len(x)

    def sample(self, count: int, random: Generator) -> "Split":
        """`count` random data points; of batch objects, the first that have so many points."""
        if isinstance(self.x, Opaque):
            x = self.x.head(count)
            return Split(x, None if self.y is None else self.y[: len(x)])
        index = randperm(len(self), generator=random)[:count]
        return Split(self.x[index], None if self.y is None else self.y[index])

    def random_batch(self, size: int, random: Generator) -> "Split":
        """`size` random data points as one batch; of batch objects, one of them."""
        if not isinstance(self.x, Opaque):
            return self.sample(size, random)
        parts = list(self.batches(size))
        return Split(*parts[int(randperm(len(parts), generator=random)[0])])

    def __repr__(self) -> str:
        shown = {"x": self.x} if self.y is None else {"x": self.x, "y": self.y}
        facts = [f"{name} {_kind(tensor)}" for name, tensor in shown.items()]
        return f"Split({', '.join(facts)})"


@dataclass(frozen=True, repr=False)
class Dataset:
    """Training data, test set, shifts and OOD sets.

    >>> import torch
    >>> Dataset("points", Split(torch.zeros(9, 2), torch.zeros(9, dtype=torch.int64)))
    Dataset('points', classification, 9 train, inputs (2,))

    Attributes:
        name: name in tables and run folders.
        train: the training data, the only split that `fit` uses.
        test: the test set, from the distribution of the training data.
        validation: training data held out to choose settings.
        shifts: changed test inputs with targets, such as rotated images. They may be computed on
            access (`LazySplits`), so access each of them once.
        ood: out-of-distribution (OOD) inputs, for which the uncertainty should be high.
        classes: names of the classes in the order of the labels.
        spec: the table from which `shoal.data.load` loads the data set again, if there is one.
        pixel_range: smallest and largest value of a pixel, for images.
        scaling: mean and standard deviation of standardised targets.
        columns: names of the columns of inputs that an estimator has prepared; empty without names.
        notes: sentences about the inputs, which `fit` gives as warnings.
        explain: computes from a run what the report says about the columns of a table, before they
            were prepared; None without.
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
    columns: tuple[str, ...] | None = None
    notes: tuple[str, ...] = ()
    explain: Callable[[Any], Any] | None = None

    def __post_init__(self) -> None:
        for name in ("train", "test", "validation"):
            split = getattr(self, name)
            if not isinstance(split, Split) and (name == "train" or split is not None):
                raise DataError(f"{name} must be a Split(x, y), not {describe_value(split)}")
        for name in ("shifts", "ood"):
            splits = getattr(self, name)
            if isinstance(splits, LazySplits):
                continue
            named = isinstance(splits, Mapping) and all(isinstance(key, str) for key in splits)
            if not named or not all(isinstance(each, Split) for each in splits.values()):
                raise DataError(f"{name} must be a dict of names to Splits; type {{'a': Split(x)}}")
        check_fields(self, classes=lambda name, names: tuple(list_of(text)(name, names)))

    def __repr__(self) -> str:
        facts = self._facts()
        shape = facts.pop("inputs")
        words = [facts.pop("task"), *(f"{count} {name}" for name, count in facts.items())]
        return f"Dataset({', '.join([repr(self.name), *map(str, words), f'inputs {shape}'])})"

    def _repr_html_(self) -> str:
        return facts_html(f"Dataset {self.name}", self._facts())

    def _facts(self) -> dict[str, object]:
        """A short description, which computes no lazy split."""
        splits = {"train": self.train, "validation": self.validation, "test": self.test}
        counts: dict[str, object] = {n: len(split) for n, split in splits.items() if split}
        counts |= {n: len(sets) for n, sets in (("shifts", self.shifts), ("ood", self.ood)) if sets}
        return {"task": self.task, **counts, "inputs": self.input_shape}

    @property
    def task(self) -> str:
        """`"classification"` for integer targets, `"regression"` for real ones."""
        return "classification" if self.has_classes else "regression"

    @property
    def has_classes(self) -> bool:
        """Whether the targets are labels: integers, not floats."""
        y = self.train.y
        y, _ = parted(y)
        return y is None or not (isinstance(y, Tensor) and y.is_floating_point())

    @property
    def outputs(self) -> int:
        """Number of classes, or of target columns."""
        if self.classes is not None:
            return len(self.classes)
        y, _ = parted(self.train.y)
        if not isinstance(y, Tensor):
            return 1
        if self.has_classes:
            return int(y.max()) + 1
        return 1 if y.ndim == 1 else y.shape[-1]

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Shape of one input."""
        return tuple(self.train.x.shape[1:])


def _kind(tensor: Any) -> str:
    if not isinstance(tensor, Tensor):
        return repr(tensor)
    return f"{list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"


def class_names(data: Any) -> tuple[str, ...] | None:
    """Names of the classes in the order of the labels; None where they are not known.

    A `Dataset` has `classes`, and so have many sets of torch (`ImageFolder`), also in a loader.
    """
    for _ in range(4):  # a loader of a subset of a set
        names = getattr(data, "classes", None)
        if names is not None or not hasattr(data, "dataset"):
            break
        data = data.dataset
    else:
        return None
    return tuple(map(str, names)) if isinstance(names, list | tuple) and names else None


class LazySplits(Mapping[str, Split]):
    """Splits by name, each computed on every access and not kept.

    A loop over `items()` holds one split at a time. Names and counts cost nothing.

    Args:
        makers: function that computes each split.
        counts: number of data points of each split.
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


def sizes(splits: Mapping[str, Split]) -> dict[str, int]:
    """Number of data points of each split, without computing lazy splits.

    >>> sizes(LazySplits({"fog-1": lambda: 1 / 0}, {"fog-1": 500}))
    {'fog-1': 500}
    """
    if isinstance(splits, LazySplits):
        return dict(splits.counts)
    return {name: len(split) for name, split in splits.items()}


def held_out(
    points: int, share: float, seed: int, purpose: str = "validation"
) -> tuple[Tensor, Tensor]:
    """Data points that train and that are held out, both in increasing order.

    >>> [len(rows) for rows in held_out(10, 0.25, seed=0)]
    [8, 2]
    """
    count = min(max(round(share * points), 1), points - 1)
    if count < 1:
        raise DataError(f"{points} data point cannot be divided; give validation=(x, y)")
    order = randperm(points, generator=generator(seed, purpose))
    return order[count:].sort().values, order[:count].sort().values


def training_part(data: Dataset, share: float, seed: int) -> Dataset:
    """The data set as a run with this share of validation data has trained on it."""
    trains, held = held_out(len(data.train), share, seed)
    x, y = data.train.x, data.train.y
    return replace(data, train=Split(x[trains], y[trains]), validation=Split(x[held], y[held]))


registry = Registry("dataset")

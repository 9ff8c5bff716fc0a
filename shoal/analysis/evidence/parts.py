"""Which data the evidence is about, which fit the stacking weights, and which judge everything."""

from dataclasses import dataclass
from typing import Any

import torch

from shoal.core.errors import DataError
from shoal.data.dataset import Dataset, Split
from shoal.data.sources import as_split

__all__ = ["Parts", "parts_of"]


@dataclass(frozen=True)
class Parts:
    """A data set, divided by what each part is for.

    Attributes:
        train: what the evidence is the probability of.
        held_out: what stacking weights are fitted on; None when there is nothing.
        judged: what predictions are judged on, never the same points; None when there is nothing.
        held_out_words: what the held-out part is.
        judged_words: what the judged part is.
    """

    train: Split
    held_out: Split | None
    judged: Split | None
    held_out_words: str
    judged_words: str


def parts_of(data: Any) -> Parts:
    """The parts of a `Dataset`, or of a pair (x, y) that is all training data.

    Stacking weights are fitted on the validation part. Where there is none they are fitted on every
    second test point, and the points between judge.
    """
    train = as_split(data)
    if train.y is None:
        raise DataError("the evidence needs the targets of the training data; pass a pair (x, y)")
    validation = _labelled(getattr(data, "validation", None))
    test = _labelled(data.test if isinstance(data, Dataset) else None)
    if validation is not None:
        return Parts(train, validation, test, "the validation data", "the test data")
    if test is None or len(test) < 2:
        return Parts(train, None, test, "", "the test data")
    halves = "every second test point", "the other half of the test data"
    return Parts(train, _every_second(test, 0), _every_second(test, 1), *halves)


def _labelled(split: Split | None) -> Split | None:
    return None if split is None or split.y is None or len(split) == 0 else as_split(split)


def _every_second(split: Split, start: int) -> Split:
    assert split.y is not None
    index = torch.arange(start, len(split), 2)
    return Split(split.x[index], split.y[index])

"""The range of inputs: a check against bytes for a network trained on floats, and the reverse.

Shoal divides bytes (uint8) by 255, but not floats. A network trained on one kind would get inputs
of the other kind 255 times too small or too large.
"""

import warnings
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from shoal.core.errors import DataError, ShoalWarning
from shoal.data.batches.arrays import recalled

__all__ = ["check_range", "value_range"]

_SOME = 16
"""Byte images have values above this limit; inputs in [0, 1] with noise have none."""


@recalled
def value_range(x: Tensor) -> list[float] | None:
    """Smallest and largest value of floating-point inputs; None for integers, possibly tokens.

    >>> value_range(Tensor([[0.5, -1.0]]))
    [-1.0, 0.5]
    """
    if not x.is_floating_point() or x.numel() == 0:
        return None
    return [float(end) for end in x.aminmax()]


def check_range(given: Any, inputs: Tensor, trained: Sequence[float] | None) -> None:
    """Refuse bytes for a network trained on a range other than [0, 1]; warn of the reverse.

    Args:
        given: the user's argument.
        inputs: the inputs as a tensor.
        trained: `value_range` of the training inputs, if it is known.
    """
    if trained is None or not inputs.is_floating_point():
        return
    low, high = trained
    if str(getattr(given, "dtype", "")) in ("uint8", "torch.uint8"):
        if low < -0.5 or high > 2:
            raise DataError(
                f"x holds bytes (uint8), which are divided by 255, but the network was trained on "
                f"numbers from {low:.3g} to {high:.3g}; convert x to floats of that range"
            )
        return
    least, most = (float(end) for end in inputs.aminmax())
    if low >= 0 and high <= 1 and least >= 0 and _SOME < most <= 255:
        warnings.warn(
            f"x has numbers up to {most:.4g}, but the network was trained on numbers from 0 to 1 "
            f"(bytes are divided by 255); divide x by 255, or pass it as uint8",
            ShoalWarning,
            stacklevel=4,
        )

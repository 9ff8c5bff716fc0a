"""Orthonormal axes of the inputs: principal components of the training data, and cosines.

Second moments are gathered batch by batch in double precision. Up to `EXACT` coordinates all
components are found at once; above, the leading `RANK` by subspace iteration, which needs only
products of the covariance with thin matrices. Halko, Martinsson & Tropp (2011), arXiv 0909.4061.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from shoal.core.errors import DataError

__all__ = ["EXACT", "RANK", "Inputs", "cosines", "principal", "variances"]

EXACT, RANK, SPARE, ROUNDS = 4096, 1024, 16, 6


@dataclass(frozen=True)
class Inputs:
    """Training inputs, as often as they are needed.

    Attributes:
        batches: gives the inputs [b, ...], batch by batch, from the beginning at each call.
    """

    batches: Callable[[], Iterator[Tensor]]

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of one input."""
        return tuple(self._first.shape[1:])

    @property
    def size(self) -> int:
        """D, coordinates of one input."""
        return math.prod(self.shape)

    @property
    def real(self) -> bool:
        """They are numbers that can be changed a little, and not tokens."""
        return self._first.is_floating_point()

    @cached_property
    def _first(self) -> Tensor:
        return next(iter(self.batches()))

    def check_real(self, wanted: str) -> None:
        """Tokens have no axes before they are embedded, and their embedding is still learned."""
        if not self.real:
            raise DataError(
                f"'{wanted}' needs real inputs, not whole numbers; "
                f"for tokens type method='forde-identity'"
            )

    def flat(self) -> Iterator[Tensor]:
        """Matrices [b, D] in double precision, where there is one."""
        for x in self.batches():
            wide = torch.float32 if x.device.type == "mps" else torch.float64
            yield x.flatten(1).to(wide)

    def mean(self) -> tuple[Tensor, int]:
        """Mean input [D], and how many there are."""
        totals = [(x.sum(0), len(x)) for x in self.flat()]
        count = sum(size for _, size in totals)
        return torch.stack([total for total, _ in totals]).sum(0) / count, count


def principal(
    inputs: Inputs, centred: bool = True, rank: int | None = None
) -> tuple[Tensor, Tensor]:
    """Axes U [D, R] of greatest variance in falling order, and the variances [R].

    Args:
        inputs: the training data.
        centred: about the mean input, rather than about zero.
        rank: how many; by default all, or `RANK` where there are more than `EXACT` coordinates.
    """
    D = inputs.size
    rank = min(rank or (D if D <= EXACT else RANK), D)
    mean, count = inputs.mean()
    mean = mean if centred else torch.zeros_like(mean)
    whole = rank + SPARE >= D
    Q = torch.eye(D).to(mean) if whole else _thin(D, rank + SPARE, mean)
    for _ in range(0 if whole else ROUNDS):
        Q = torch.linalg.qr(_covariance_times(inputs, mean, count, Q)).Q
    small = Q.mT @ _covariance_times(inputs, mean, count, Q)
    values, vectors = torch.linalg.eigh((small + small.mT) / 2)
    return (Q @ vectors).flip(1)[:, :rank], values.flip(0)[:rank].clamp(min=0)


def variances(inputs: Inputs, basis: Tensor | None, centred: bool = True) -> Tensor:
    """Variance of the inputs along each column of the basis [R]; None is the identity."""
    mean, count = inputs.mean()
    mean = mean if centred else torch.zeros_like(mean)
    total = torch.zeros((), device=mean.device, dtype=mean.dtype)
    for x in inputs.flat():
        away = x - mean
        total = total + (away if basis is None else away @ basis.to(away)).square().sum(0)
    return total / max(count - 1, 1)


def cosines(shape: tuple[int, ...]) -> Tensor:
    """The discrete cosine transform (type II, orthonormal) of inputs of this shape, U [D, D].

    Images (channels, height, width) are transformed along height and width, sequences (length,
    features) along their length, vectors along their only axis.
    """
    along = {1: (0,), 2: (0,)}.get(len(shape), tuple(range(1, len(shape))))
    whole = torch.ones(1, 1, dtype=torch.float64)
    for axis, size in enumerate(shape):
        whole = torch.kron(whole, _cosine(size) if axis in along else torch.eye(size).double())
    return whole


def _cosine(size: int) -> Tensor:
    place, frequency = torch.arange(size).double()[:, None], torch.arange(size).double()
    waves = (math.pi / size * (place + 0.5) * frequency).cos() * math.sqrt(2 / size)
    waves[:, 0] /= math.sqrt(2)
    return waves


def _thin(rows: int, columns: int, like: Tensor) -> Tensor:
    draw = torch.randn(rows, columns, generator=torch.Generator().manual_seed(0))
    return torch.linalg.qr(draw.to(like)).Q


def _covariance_times(inputs: Inputs, mean: Tensor, count: int, Q: Tensor) -> Tensor:
    total = torch.zeros_like(Q)
    for x in inputs.flat():
        away = x - mean
        total += away.mT @ (away @ Q)
    return total / max(count - 1, 1)

"""Axes and units of a space, fitted to the training inputs.

`principal` and `cosines` give orthonormal axes, `variances` the variance along axes. `fitted` puts
axes and units into a space as tensors; `learned` and `with_learned` save and restore the tensors.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from shoal.core.errors import ConfigError, DataError
from shoal.core.types import Tree
from shoal.interaction.spaces import Rotated, Scaled

__all__ = [
    "EXACT",
    "RANK",
    "Inputs",
    "cosines",
    "fitted",
    "learned",
    "needs_data",
    "principal",
    "variances",
    "with_learned",
]

EXACT, RANK, SPARE, ROUNDS = 4096, 1024, 16, 6


@dataclass(frozen=True)
class Inputs:
    """Training inputs that can be read several times.

    Attributes:
        batches: each call returns the inputs [b, ...] batch by batch, from the start.
    """

    batches: Callable[[], Iterator[Tensor]]

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of one input."""
        return tuple(self._first.shape[1:])

    @property
    def size(self) -> int:
        """D, number of coordinates of one input."""
        return math.prod(self.shape)

    @property
    def real(self) -> bool:
        """Whether the inputs are real numbers, not tokens."""
        return self._first.is_floating_point()

    @cached_property
    def _first(self) -> Tensor:
        return next(iter(self.batches()))

    def check_real(self, wanted: str) -> None:
        """Refuse tokens: they have no axes, and their embedding is still trained."""
        if not self.real:
            raise DataError(
                f"'{wanted}' needs real inputs, not integers; "
                f"for tokens type method='forde-identity'"
            )

    def flat(self) -> Iterator[Tensor]:
        """Matrices [b, D], in double precision if the device has it."""
        for x in self.batches():
            wide = torch.float32 if x.device.type == "mps" else torch.float64
            yield x.flatten(1).to(wide)

    def mean(self) -> tuple[Tensor, int]:
        """Mean input [D], and the number of inputs."""
        totals = [(x.sum(0), len(x)) for x in self.flat()]
        count = sum(size for _, size in totals)
        return torch.stack([total for total, _ in totals]).sum(0) / count, count


def principal(inputs: Inputs, centred: bool = True) -> tuple[Tensor, Tensor]:
    """Axes U [D, R] of largest variance in descending order, and the variances [R].

    They are all D axes, or `RANK` of them for more than `EXACT` coordinates.

    Args:
        inputs: the training data.
        centred: variance about the mean input, not about zero.
    """
    D = inputs.size
    rank = D if D <= EXACT else min(RANK, D)
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
    """Variance of the inputs along each column of the basis [R]; None for the identity."""
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


def needs_data(space: Any) -> bool:
    """Whether the space has axes or units to fit, known only by name."""
    if not hasattr(space, "space"):
        return False
    basis, factor = getattr(space, "basis", None), getattr(space, "factor", None)
    named = any(isinstance(v, str) and v != "identity" for v in (basis, factor))
    return named or needs_data(space.space)


def fitted(space: Any, inputs: Inputs) -> Any:
    """The same space with axes and units as tensors."""
    if not hasattr(space, "space"):
        return space
    inner = fitted(space.space, inputs)
    if isinstance(space, Rotated):
        return replace(space, space=inner, basis=_basis(space.basis, inputs))
    if isinstance(space, Scaled) and isinstance(space.factor, str) and space.factor != "identity":
        alpha = space.alpha if space.factor == "tuned" else 1.0
        spread = _spread(space.space, inner, inputs)
        return replace(space, space=inner, factor=weights(spread, alpha).sqrt())
    return replace(space, space=inner)


def weights(spread: Tensor, alpha: float) -> Tensor:
    """λ / (alpha + (1 - alpha) λ).

    >>> weights(torch.tensor([0.5, 1.0, 3.0]), 0.0), weights(torch.tensor([0.5, 3.0]), 1.0)
    (tensor([1., 1., 1.]), tensor([0.5000, 3.0000]))
    """
    below = alpha + (1 - alpha) * spread
    return torch.where(below > 0, spread / below, 1.0)


def learned(space: Any, depth: int = 0) -> Tree:
    """The fitted tensors of a space, named by their position, to store with a run."""
    if not hasattr(space, "space"):
        return {}
    fitted = {name: getattr(space, name, None) for name in ("basis", "factor")}
    named = {f"{depth}.{name}": t for name, t in fitted.items() if isinstance(t, Tensor)}
    return named | learned(space.space, depth + 1)


def with_learned(space: Any, tensors: Tree, depth: int = 0) -> Any:
    """The space with the tensors that `learned` returned, on any device."""
    if not hasattr(space, "space"):
        return space
    fitted = {name: tensors.get(f"{depth}.{name}") for name in ("basis", "factor")}
    known = {name: tensor for name, tensor in fitted.items() if tensor is not None}
    return replace(space, space=with_learned(space.space, tensors, depth + 1), **known)


def _basis(basis: Any, inputs: Inputs) -> Tensor | str:
    if not isinstance(basis, str):
        return _orthonormal(torch.as_tensor(basis), inputs)
    if basis == "identity":
        return basis
    inputs.check_real(basis)
    if basis == "dct":
        return cosines(inputs.shape)
    return principal(inputs, centred=basis == "pca")[0]


def _orthonormal(basis: Tensor, inputs: Inputs) -> Tensor:
    size = inputs.size if inputs.real else len(basis)  # for tokens, the basis is of the embedding
    if basis.ndim != 2 or len(basis) != size or basis.shape[1] > size:
        raise ConfigError(
            f"a basis for inputs of {size} coordinates must be a matrix [{size}, R], "
            f"not of shape {tuple(basis.shape)}"
        )
    product = basis.double().mT @ basis.double()
    if (product - torch.eye(len(product)).to(product)).abs().max() > 1e-4:
        raise ConfigError("the columns of a basis must be orthonormal; use torch.linalg.qr(A).Q")
    return basis


def _spread(named: Any, inner: Any, inputs: Inputs) -> Tensor:
    """Variance of the inputs along the axes of the inner space, divided by the mean variance."""
    inputs.check_real("eigenvalues")
    while not isinstance(named, Rotated) and hasattr(named, "space"):
        named, inner = named.space, inner.space
    basis = getattr(inner, "basis", None)
    raw = isinstance(named, Rotated) and isinstance(named.basis, str) and "uncentred" in named.basis
    along = variances(inputs, basis if isinstance(basis, Tensor) else None, not raw)
    everywhere = variances(inputs, None, not raw).mean()
    return along / everywhere.clamp(min=torch.finfo(along.dtype).tiny)

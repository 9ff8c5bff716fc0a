"""Filling in what the wrappers of a space take from the training data."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from shoal.core.errors import ConfigError
from shoal.core.types import Tree
from shoal.interaction.bases import Inputs, cosines, principal, variances
from shoal.interaction.wrappers import Rotated, Scaled

__all__ = ["fitted", "learned", "needs_data", "with_learned"]


def needs_data(space: Any) -> bool:
    """Something in the space is only a name so far."""
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
    """The tensors in a space, named by where they are in it, to be kept beside a run."""
    if not hasattr(space, "space"):
        return {}
    own = {name: getattr(space, name, None) for name in ("basis", "factor")}
    mine = {f"{depth}.{name}": t for name, t in own.items() if isinstance(t, Tensor)}
    return mine | learned(space.space, depth + 1)


def with_learned(space: Any, tensors: Tree, depth: int = 0) -> Any:
    """The space with tensors that `learned` gave before, or on another device."""
    if not hasattr(space, "space"):
        return space
    own = {name: tensors.get(f"{depth}.{name}") for name in ("basis", "factor")}
    known = {name: tensor for name, tensor in own.items() if tensor is not None}
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
    size = inputs.size if inputs.real else len(basis)  # tokens are embedded first
    if basis.ndim != 2 or len(basis) != size or basis.shape[1] > size:
        raise ConfigError(
            f"a basis for inputs of {size} coordinates is a matrix [{size}, R], "
            f"not of shape {tuple(basis.shape)}"
        )
    product = basis.double().mT @ basis.double()
    if (product - torch.eye(len(product)).to(product)).abs().max() > 1e-4:
        raise ConfigError("the columns of a basis must be orthonormal; take torch.linalg.qr(A).Q")
    return basis


def _spread(named: Any, inner: Any, inputs: Inputs) -> Tensor:
    """Variance of the inputs along the axes of the space inside, in units of their mean."""
    inputs.check_real("eigenvalues")
    while not isinstance(named, Rotated) and hasattr(named, "space"):
        named, inner = named.space, inner.space
    basis = getattr(inner, "basis", None)
    raw = isinstance(named, Rotated) and isinstance(named.basis, str) and "uncentred" in named.basis
    along = variances(inputs, basis if isinstance(basis, Tensor) else None, not raw)
    everywhere = variances(inputs, None, not raw).mean()
    return along / everywhere.clamp(min=torch.finfo(along.dtype).tiny)

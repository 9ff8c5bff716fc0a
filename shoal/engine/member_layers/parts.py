"""Parts of a tensor whose gradients come back as one tensor, without a copy if that can be.

Queries, keys and values are usually parts of one linear layer. Attention writes their gradients
side by side, in the layout of that layer. The backward pass of torch would copy each of them into a
tensor of zeros and add these up.
"""

from typing import Any

import torch
from torch import Tensor

from shoal.engine.functorch import Operation

__all__ = ["divided", "mark_parts", "unbound", "whole_of"]


def unbound(tensor: Tensor, dim: int) -> tuple[Tensor, ...]:
    """The slices of a tensor along an axis, which is removed."""
    return _Unbound.apply(tensor, dim)  # pyright: ignore[reportReturnType]


def divided(tensor: Tensor, size: int, dim: int) -> tuple[Tensor, ...]:
    """Parts of `size` along an axis whose length is a multiple of it."""
    folded = tensor.unflatten(dim, (-1, size))
    return unbound(folded, dim)


def mark_parts(parts: tuple[Tensor, ...], whole: Tensor) -> None:
    """Remember that these are the slices of `whole` [count, ...], which a function may prefer."""
    for index, part in enumerate(parts):
        setattr(part, "_shoal_part", (index, whole, part._version))  # noqa: B010


def whole_of(parts: tuple[Tensor, ...]) -> Tensor | None:
    """The tensor whose slices these are, in order and unchanged; None if there is none."""
    known = [getattr(part, "_shoal_part", None) for part in parts]
    if any(each is None for each in known):
        return None
    whole = known[0][1]  # pyright: ignore[reportOptionalSubscript]
    expected = [(index, id(whole), part._version) for index, part in enumerate(parts)]
    actual = [(index, id(other), version) for index, other, version in known]  # pyright: ignore
    return whole if actual == expected and len(whole) == len(parts) else None


class _Unbound(Operation):
    @staticmethod
    def forward(tensor: Tensor, dim: int) -> tuple[Tensor, ...]:
        # A view of a function's input may not be one of its several outputs.
        return tuple(part.detach() for part in tensor.detach().unbind(dim))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: tuple) -> None:
        ctx.dim = inputs[1]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple:
        return _Bound.apply(ctx.dim, *gradients), None


class _Bound(Operation):
    """Slices as one tensor: on their own memory if they lie side by side there."""

    @staticmethod
    def forward(dim: int, *slices: Tensor) -> Tensor:
        whole = _beside(slices, dim)
        return torch.stack(slices, dim) if whole is None else whole

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
        ctx.dim = inputs[0]

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple:
        return None, *cotangents[0].unbind(ctx.dim)


def _beside(slices: tuple[Tensor, ...], dim: int) -> Tensor | None:
    """The tensor that these are slices of, if they are at equal distances in one memory."""
    first = slices[0]
    places = [each.storage_offset() for each in slices]
    step = places[1] - places[0] if len(places) > 1 else 0
    memory = first.untyped_storage().data_ptr()
    alike = all(
        each.stride() == first.stride()
        and each.untyped_storage().data_ptr() == memory
        and place == places[0] + i * step
        for i, (each, place) in enumerate(zip(slices, places, strict=True))
    )
    if not alike or step <= 0:
        return None
    sizes = [*first.shape[:dim], len(slices), *first.shape[dim:]]
    strides = [*first.stride()[:dim], step, *first.stride()[dim:]]
    return first.detach().as_strided(sizes, strides, places[0])

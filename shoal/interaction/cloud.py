"""The members as points in a space: the two products with coordinates that repulsion needs.

All other matrices of the repulsion are M x M. The two products read the coordinates, which can be
all weights, once each: the Gram matrix of the centred points, and drive + B times the points. On a
GPU with Triton each is one kernel; on a CPU it runs strip by strip through the cache. Otherwise
both are matrix products of centred copies.
"""

import functools
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from shoal.core.tree import member_norms
from shoal.core.types import Leaves
from shoal.engine.kernels import cloud_blocks, fused
from shoal.engine.kernels.fused import kernel_supports

try:
    from shoal.engine.kernels import cloud_kernels
except Exception:  # Triton is missing or does not work
    cloud_kernels = None

__all__ = ["Cloud", "GramAhead", "adds_multiples", "few_coordinates", "of_finite"]


@dataclass(frozen=True)
class Cloud:
    """Coordinates of the finite members, relative to their centre.

    Attributes:
        leaves: [M, S, D]; diverged members have any finite number.
        gram: inner products between members [S, M, M], zero for diverged members.
        alive: members with finite weights and coordinates [M]; one NaN would make all of K NaN.
        fused: module that centres and multiplies in one pass; the leaves are then not centred.
    """

    leaves: Leaves
    gram: Tensor
    alive: Tensor
    fused: ModuleType | None = None
    whole_rows = False
    """Whether `times` wants all rows of B, as a share of the coordinates does."""

    @classmethod
    def of(cls, leaves: Leaves, alive: Tensor, centred: bool = True) -> "Cloud":
        """From raw coordinates; some members may have diverged."""
        leaves = [t.float() if t.dtype in (torch.bfloat16, torch.float16) else t for t in leaves]
        module = _fused(leaves) if centred else None
        if module is not None:
            gram, alive = module.gram(leaves, alive)
            return cls(leaves, gram, alive, module)
        sums = torch.stack([leaf.sum((-2, -1)) for leaf in leaves])
        alive = alive & sums.isfinite().all(0)
        leaves = [of_finite(leaf, alive, centred) for leaf in leaves]
        grams = [torch.einsum("isd,jsd->sij", leaf, leaf) for leaf in leaves]
        gram = torch.stack(grams).sum(0) if len(grams) > 1 else grams[0]
        return cls(leaves, torch.where(alive[:, None] & alive, gram, 0.0), alive)

    @classmethod
    def with_matrices(
        cls, leaves: Leaves, alive: Tensor, choices: dict[str, Any]
    ) -> tuple["Cloud", Any]:
        """The cloud of `few_coordinates`, and the matrices of `interaction_kernels.matrices`."""
        assert cloud_kernels is not None
        gram, alive, matrices = cloud_kernels.gram_and_matrices(leaves, alive, **choices)
        return cls(leaves, gram, alive, cloud_kernels), matrices

    def move(
        self, drives: Sequence[Tensor], B: Tensor, scale: float, multiples: Any, update: Any
    ) -> Tensor:
        """Move the leaves, which are weights, along `added_to`; returns the norms of the drives.

        For leaves and drives of which `adds_multiples` is true. `update` is a step of an optimiser,
        `engine.kernels.update_kernels.Update`.
        """
        assert cloud_kernels is not None
        return cloud_kernels.move(drives, B[0], self.leaves, self.alive, scale, multiples, update)

    def times(self, B: Tensor) -> list[Tensor]:
        """B z, leaves [m, S, D] for B [S, m, M]."""
        leaves = self.leaves
        if self.fused is not None:
            leaves = [of_finite(leaf, self.alive, True) for leaf in leaves]
        return [torch.einsum("sij,jsd->isd", B, leaf) for leaf in leaves]

    def added_to(
        self,
        drives: Sequence[Tensor],
        B: Tensor,
        scale: float,
        multiples: Sequence[float] | None = None,
        measured: bool = True,
    ) -> tuple[list[Tensor], Tensor | None]:
        """drive + scale B z for every leaf, and the norms of the drives; [m, D], at one site.

        The result may reuse the memory of the drives. `multiples` of the coordinates belong to the
        drives, see `adds_multiples`. Norms may be None unless `measured`.
        """
        same = all(drive.dtype == self.gram.dtype for drive in drives)
        if self.fused is not None and same:
            more = () if multiples is None and measured else (multiples, measured)
            more = more if self.fused is cloud_kernels else ()
            return self.fused.plus_product(drives, B[0], self.leaves, self.alive, scale, *more)
        leaves = self.leaves
        if self.fused is not None:
            leaves = [of_finite(leaf, self.alive, True) for leaf in leaves]
        pairs = zip(drives, leaves, strict=True)
        moved = [_plus_product(t, B[0].to(t), leaf[:, 0].to(t), scale) for t, leaf in pairs]
        return moved, member_norms(dict(enumerate(drives)))  # pyright: ignore[reportArgumentType]


class GramAhead:
    """The Gram matrix of the weights, found beside the passes of a step.

    Nothing moves the weights before the step ends. A member that diverges in the passes is left out
    later: distances between the others do not depend on the centre.
    """

    def __init__(self, leaves: Leaves, alive: Tensor) -> None:
        here = torch.cuda.current_stream(alive.device) if alive.is_cuda else None
        self.side = None if here is None else _side(here)
        if self.side is not None and here is not None:
            self.side.wait_stream(here)
        with nullcontext() if self.side is None else torch.cuda.stream(self.side):
            self.gram, self.alive = cloud_kernels.gram(leaves, alive)  # pyright: ignore

    def cloud(self, leaves: Leaves, alive: Tensor, centred: bool = True) -> Cloud:
        """The cloud of these leaves, which are those of before; see `Cloud.of`."""
        if self.side is not None:
            torch.cuda.current_stream(alive.device).wait_stream(self.side)
        return Cloud(leaves, self.gram, self.alive & alive, cloud_kernels)


@functools.lru_cache(maxsize=16)
def _side(here: torch.cuda.Stream) -> torch.cuda.Stream:
    return torch.cuda.Stream(here.device)


def adds_multiples(leaves: Leaves, drives: Sequence[Tensor]) -> bool:
    """Whether `Cloud.added_to` takes multiples of such leaves, in the pass that adds the push."""
    if cloud_kernels is None or not kernel_supports(*leaves, *drives):
        return False
    return _fused(leaves) is cloud_kernels


def few_coordinates(leaves: Leaves) -> bool:
    """Whether one launch finds the Gram matrix and all that follows from it."""
    if cloud_kernels is None or not kernel_supports(*leaves):
        return False
    return _fused(leaves) is cloud_kernels and cloud_kernels.few_coordinates(leaves)


def _fused(leaves: Leaves) -> ModuleType | None:
    """The module that centres and multiplies these leaves in one pass; None without one."""
    first = leaves[0]
    if first.shape[1] > 1 or not all(leaf.is_contiguous() for leaf in leaves):
        return None
    if first.device.type in fused.DEVICES and cloud_kernels is not None:
        single = all(leaf.dtype == torch.float32 for leaf in leaves)
        return cloud_kernels if 1 < len(first) <= 64 and single else None
    plain = not torch.compiler.is_compiling() and not any(leaf.requires_grad for leaf in leaves)
    return cloud_blocks if first.device.type == "cpu" and plain else None


def of_finite(leaf: Tensor, alive: Tensor, centred: bool) -> Tensor:
    """The coordinates with zeros for diverged members, and relative to the centre if asked for."""
    cpu = leaf.device.type == "cpu" and not torch.compiler.is_compiling()
    if not (cpu and bool(alive.all())):  # on a CPU the check is free and saves a pass
        leaf = torch.where(alive[:, None, None], leaf, 0.0)
    if not centred:
        return leaf
    return leaf - leaf.sum(0, keepdim=True) / alive.sum().clamp(min=1)


def _plus_product(matrix: Tensor, left: Tensor, right: Tensor, scale: float) -> Tensor:
    if torch.compiler.is_compiling():
        return matrix + scale * (left @ right)
    return torch.addmm(matrix, left, right, alpha=scale)

r"""Loss and gradient of a categorical likelihood by one Triton kernel, one program per member.

$$ \log p = \frac1B \sum_b \Big( f_{b y_b} - \log \sum_c e^{f_{bc}} \Big), \qquad
   \frac{∂ \log p}{∂ f_{bc}} = \frac{[c = y_b] - p_{bc}}{B}. $$

torch takes about twenty kernels for both, for the factor of the gradient and for its norms.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["LARGEST", "CategoricalResult", "categorical", "takes"]

LARGEST = 2**16
"""Outputs of a member, with classes counted up to a power of two: a program reads them twice."""

TILE = 4096
"""Outputs that a program holds at a time."""


class CategoricalResult(NamedTuple):
    """Result of `categorical`.

    Attributes:
        loss: mean negative log-likelihood [M].
        alive: members that were finite and have a finite loss [M].
        gradient: of the mean log-likelihood [M, B, C], zero for diverged members; laid out like the
            outputs.
        drive: the gradient times the factor.
        lengths: norm of each member's drive [M].
    """

    loss: Tensor
    alive: Tensor
    gradient: Tensor
    drive: Tensor
    lengths: Tensor


@triton.jit
def _tile(
    outputs, labels, start, points, classes, by_point, by_class,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Outputs of some points, their labels one-hot, what is inside, and the places."""
    b = start + tl.arange(0, ROWS)
    c = tl.arange(0, COLUMNS)
    inside = (b[:, None] < points) & (c[None, :] < classes)
    place = b[:, None] * by_point + c[None, :] * by_class
    f = tl.load(outputs + place, mask=inside, other=-float("inf"))
    y = tl.load(labels + b, mask=b < points, other=-1)
    return f, c[None, :] == y[:, None], inside, place


@triton.jit
def _categorical_kernel(
    outputs, labels, alive, loss, alive_out, gradient, drive, lengths, factor,
    points, classes, by_member, by_point, by_class, labels_by_member,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, POINTER: tl.constexpr, APART: tl.constexpr,
):  # fmt: skip
    member = tl.program_id(0)
    first = member.to(tl.int64) * by_member
    labels += member * labels_by_member
    scale = tl.load(factor).to(tl.float32) if POINTER else factor
    total = tl.zeros((ROWS,), tl.float32)
    for start in range(0, points, ROWS):
        f, hot, inside, _ = _tile(
            outputs + first, labels, start, points, classes, by_point, by_class, ROWS, COLUMNS
        )
        here = start + tl.arange(0, ROWS) < points
        most = tl.where(here, tl.max(f, axis=1), 0.0)
        e = tl.exp(tl.where(inside, f - most[:, None], -float("inf")))
        logs = tl.log(tl.where(here, tl.sum(e, axis=1), 1.0))
        chosen = tl.sum(tl.where(hot & inside, f - most[:, None], 0.0), axis=1)
        total += tl.where(here, chosen - logs, 0.0)
    value = tl.sum(total) / points
    sound = (tl.abs(value) < float("inf")) & (tl.load(alive + member) != 0)
    tl.store(loss + member, -value)
    tl.store(alive_out + member, sound)
    squares = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, points, ROWS):
        f, hot, inside, place = _tile(
            outputs + first, labels, start, points, classes, by_point, by_class, ROWS, COLUMNS
        )
        here = start + tl.arange(0, ROWS) < points
        most = tl.where(here, tl.max(f, axis=1), 0.0)
        e = tl.exp(tl.where(inside, f - most[:, None], -float("inf")))
        p = e / tl.where(here, tl.sum(e, axis=1), 1.0)[:, None]
        g = tl.where(inside, (tl.where(hot, 1.0, 0.0) - p) / points, 0.0)
        g = tl.where(sound, g, 0.0)
        tl.store(gradient + first + place, g, mask=inside)
        if APART:
            tl.store(drive + first + place, g * scale, mask=inside)
        squares += g * scale * (g * scale)
    tl.store(lengths + member, tl.sqrt(tl.sum(squares)))


def takes(outputs: Tensor, y: Tensor) -> bool:
    """Whether the kernel takes these outputs [M, B, C], dense, and whole labels [B] or [M, B]."""
    if outputs.ndim != 3 or y.is_floating_point():
        return False
    if y.shape not in (outputs.shape[1:2], outputs.shape[:2]):
        return False
    dense = outputs.is_contiguous() or outputs.mT.is_contiguous()
    size = outputs.shape[1] * triton.next_power_of_2(outputs.shape[2])
    return dense and 0 < size <= LARGEST and outputs.shape[2] <= TILE


def categorical(
    outputs: Tensor, y: Tensor, alive: Tensor, factor: float | Tensor, apart: bool
) -> CategoricalResult:
    """Loss, gradient, and the gradient times `factor` (a number, or a scalar on the device).

    Args:
        outputs: [M, B, C], see `takes`.
        y: labels [B], or [M, B] of members with batches of their own.
        alive: finite members [M].
        factor: of the drive.
        apart: the drive has memory of its own, also for the factor 1.
    """
    members, points, classes = outputs.shape
    gradient = torch.empty_like(outputs)
    apart = apart or isinstance(factor, Tensor) or factor != 1.0
    drive = torch.empty_like(outputs) if apart else gradient
    small = outputs.new_empty(2, members)
    sound = torch.empty(members, dtype=torch.bool, device=outputs.device)
    columns = triton.next_power_of_2(classes)
    rows = min(triton.next_power_of_2(points), max(TILE // columns, 1))
    launch: Any = _categorical_kernel[(members,)]
    launch(
        outputs, y.contiguous(), alive, small[0], sound, gradient, drive, small[1], factor,
        points, classes, *outputs.stride(), 0 if y.ndim == 1 else points,
        ROWS=rows, COLUMNS=columns, POINTER=isinstance(factor, Tensor), APART=apart, num_warps=4,
    )  # fmt: skip
    return CategoricalResult(small[0], sound, gradient, drive, small[1])

r"""Loss and gradient of a categorical likelihood by one Triton kernel, one program per member.

$$ \log p = \frac1B \sum_b \Big( f_{b y_b} - \log \sum_c e^{f_{bc}} \Big), \qquad
   \frac{∂ \log p}{∂ f_{bc}} = \frac{[c = y_b] - p_{bc}}{B}. $$

torch takes about twenty kernels for both, for the factor of the gradient and for its norms. Many
outputs, such as those of all tokens of a text, take two kernels with a program for a few rows: one
reads the outputs, and one reads them again and writes the gradient. torch passes through memory
five times as often. Targets may have weights w, and B is then their sum.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = [
    "LARGEST",
    "CategoricalResult",
    "categorical",
    "many_categorical",
    "takes",
    "takes_many",
]

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


@triton.jit
def _row_tile(
    outputs, labels, row, start, rows, sites, classes, by_batch, by_site, by_class,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Some outputs of some rows, their labels one-hot, what is inside, and the places."""
    r = row * ROWS + tl.arange(0, ROWS)
    c = start + tl.arange(0, COLUMNS)
    inside = (r[:, None] < rows) & (c[None, :] < classes)
    first = (r // sites).to(tl.int64) * by_batch + (r % sites) * by_site
    place = first[:, None] + c[None, :] * by_class
    f = tl.load(outputs + place, mask=inside, other=-float("inf"))
    y = tl.load(labels + r, mask=r < rows, other=-1)
    return f, (c[None, :] == y[:, None]) & inside, inside, place


@triton.jit
def _row_values_kernel(
    outputs, labels, weights, logs, values,
    rows, sites, classes, by_member, by_batch, by_site, by_class, labels_by_member,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, WEIGHTED: tl.constexpr,
):  # fmt: skip
    """log sum exp of every row, and the weighted log probability of its label."""
    row, member = tl.program_id(0), tl.program_id(1).to(tl.int64)
    outputs += member * by_member
    labels += member * labels_by_member
    most = tl.full((ROWS,), -float("inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    chosen = tl.zeros((ROWS,), tl.float32)
    for start in range(0, classes, COLUMNS):
        f, hot, _, _ = _row_tile(
            outputs, labels, row, start, rows, sites, classes, by_batch, by_site, by_class,
            ROWS, COLUMNS,
        )  # fmt: skip
        larger = tl.maximum(most, tl.max(f, axis=1))
        finite = tl.where(larger == -float("inf"), 0.0, larger)
        total = total * tl.exp(most - finite) + tl.sum(tl.exp(f - finite[:, None]), axis=1)
        chosen += tl.sum(tl.where(hot, f, 0.0), axis=1)
        most = larger
    r = row * ROWS + tl.arange(0, ROWS)
    log = most + tl.log(tl.where(r < rows, total, 1.0))
    value = chosen - log
    if WEIGHTED:
        w = tl.load(weights + r, mask=r < rows, other=0.0)
        value = tl.where(w != 0, w * value, 0.0)
    tl.store(logs + member * rows + r, log, mask=r < rows)
    tl.store(values + member * rows + r, value, mask=r < rows)


@triton.jit
def _row_gradients_kernel(
    outputs, labels, weights, logs, sound, gradient, drive, squares, factor, total,
    rows, sites, classes, by_member, by_batch, by_site, by_class, labels_by_member,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, WEIGHTED: tl.constexpr, POINTER: tl.constexpr,
    APART: tl.constexpr,
):  # fmt: skip
    row, member = tl.program_id(0), tl.program_id(1).to(tl.int64)
    outputs += member * by_member
    labels += member * labels_by_member
    r = row * ROWS + tl.arange(0, ROWS)
    log = tl.load(logs + member * rows + r, mask=r < rows, other=0.0)
    share = tl.full((ROWS,), 1.0, tl.float32)
    if WEIGHTED:
        share = tl.load(weights + r, mask=r < rows, other=0.0)
    share = tl.where(tl.load(sound + member) != 0, share / tl.load(total), 0.0)
    scale = tl.load(factor).to(tl.float32) if POINTER else factor
    summed = tl.zeros((ROWS,), tl.float32)
    for start in range(0, classes, COLUMNS):
        f, hot, inside, place = _row_tile(
            outputs, labels, row, start, rows, sites, classes, by_batch, by_site, by_class,
            ROWS, COLUMNS,
        )  # fmt: skip
        counts = inside & (share[:, None] != 0)  # a diverged member has no numbers
        g = tl.where(hot, 1.0, 0.0) - tl.exp(f - log[:, None])
        g = tl.where(counts, g * share[:, None], 0.0)
        tl.store(gradient + member * by_member + place, g, mask=inside)
        if APART:
            tl.store(drive + member * by_member + place, g * scale, mask=inside)
        summed += tl.sum(g * scale * (g * scale), axis=1)
    tl.store(squares + member * tl.num_programs(0) + row, tl.sum(summed))


def takes_many(outputs: Tensor, y: Tensor, weight: Tensor | None) -> bool:
    """Whether the kernels take outputs [M, B, *S, C], whole labels, and weights [B, *S] or None."""
    if outputs.ndim < 3 or outputs.numel() == 0 or y.is_floating_point():
        return False
    if y.shape not in (outputs.shape[1:-1], outputs.shape[:-1]):
        return False
    if weight is not None and weight.shape != outputs.shape[1:-1]:
        return False
    return _dense(outputs) and _sites(outputs) is not None


def _dense(outputs: Tensor) -> bool:
    """Whether outputs fill their memory: whole, or with the classes of an image first."""
    return outputs.is_contiguous() or outputs.movedim(-1, 2).is_contiguous()


def _sites(outputs: Tensor) -> Tensor | None:
    """Outputs as [M, B, S, C] in the same memory."""
    if outputs.ndim == 3:
        return outputs.unsqueeze(2)
    try:
        return outputs.view(*outputs.shape[:2], -1, outputs.shape[-1])
    except RuntimeError:
        return None


def many_categorical(
    outputs: Tensor,
    y: Tensor,
    weight: Tensor | None,
    alive: Tensor,
    factor: float | Tensor,
    apart: bool,
) -> CategoricalResult:
    """`categorical` for any number of outputs [M, B, *S, C], with weights [B, *S] of the targets.

    Args:
        outputs: see `takes_many`.
        y: labels [B, *S], or [M, B, *S] of members with batches of their own.
        weight: how much each target counts; None if all count 1.
        alive: finite members [M].
        factor: of the drive.
        apart: the drive has memory of its own, also for the factor 1.
    """
    seen, members = _sites(outputs), len(outputs)
    assert seen is not None, "takes_many"
    rows, sites, classes = seen.shape[1] * seen.shape[2], seen.shape[2], seen.shape[3]
    columns = min(triton.next_power_of_2(classes), TILE)
    height = min(triton.next_power_of_2(rows), TILE // columns)
    programs = triton.cdiv(rows, height)
    weights = outputs if weight is None else weight.to(outputs).contiguous()
    total = outputs.new_full((), rows) if weight is None else weights.sum()
    total = total.clamp(min=torch.finfo(outputs.dtype).tiny)
    logs, values = outputs.new_empty(2, members, rows)
    labels_by_member = rows if y.ndim == outputs.ndim - 1 else 0
    sizes = rows, sites, classes, *seen.stride(), labels_by_member
    settings = {"ROWS": height, "COLUMNS": columns, "WEIGHTED": weight is not None, "num_warps": 4}
    first: Any = _row_values_kernel[(programs, members)]
    first(outputs, y.contiguous(), weights, logs, values, *sizes, **settings)
    loss = -values.sum(1) / total
    sound = alive & loss.isfinite()
    gradient = torch.empty_like(outputs)
    apart = apart or isinstance(factor, Tensor) or factor != 1.0
    drive = torch.empty_like(outputs) if apart else gradient
    squares = outputs.new_empty(members, programs)
    second: Any = _row_gradients_kernel[(programs, members)]
    second(
        outputs, y.contiguous(), weights, logs, sound, gradient, drive, squares, factor, total,
        *sizes, POINTER=isinstance(factor, Tensor), APART=apart, **settings,
    )  # fmt: skip
    return CategoricalResult(loss, sound, gradient, drive, squares.sum(1).sqrt())

"""Ensembles whose members live on the host and visit the device in blocks.

Weights and buffers of an offloaded ensemble are tensors of the host, or of files. Everything else
is on the device: `alive`, tensors that all members share, and what the networks hold themselves.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from shoal.engine.resources.offload import Offload

if TYPE_CHECKING:
    from shoal.inference.ensemble import Ensemble

__all__ = [
    "copied_to_device",
    "host_blocks",
    "load_to_device",
    "move_to_host",
    "part_of",
    "parts_on_device",
    "store_buffers",
    "tensors_of",
]


def move_to_host(ensemble: "Ensemble", offload: Offload, dtype: torch.dtype) -> None:
    """Give an ensemble's members to the host, in place; one tensor exists twice at a time."""
    for group in ensemble.groups:
        trees = group.weights, group.buffers
        private = [dict(tree) for tree in trees]
        for tree in trees:
            tree.clear()
        group.to(offload.device, dtype)  # what members share, and what the networks hold
        for tree, own in zip(trees, private, strict=True):
            for name in list(own):
                tensor = own.pop(name)
                kind = dtype if tensor.is_floating_point() else None
                copy = offload.stored(tensor, kind)
                tree[name] = copy.requires_grad_(tensor.requires_grad)
    ensemble.alive = ensemble.alive.to(offload.device)
    ensemble.offload = offload


def load_to_device(ensemble: "Ensemble") -> None:
    """Make an offloaded ensemble an ordinary one of the host, in place and without copies."""
    if ensemble.offload is not None:
        ensemble.to("cpu")


def host_blocks(ensemble: "Ensemble") -> list["Ensemble"]:
    """The members in blocks of one architecture each, still on the host."""
    assert ensemble.offload is not None
    blocks, first = [], 0
    for group in ensemble.groups:
        last, size = first + group.members, ensemble.offload.block
        starts = range(first, last, size)
        blocks += [ensemble.slice_members(start, min(start + size, last)) for start in starts]
        first = last
    return blocks


def tensors_of(block: "Ensemble") -> list[Tensor]:
    """The private tensors of a block of one architecture."""
    group = block.groups[0]
    return [*group.weights.values(), *group.buffers.values()]


def part_of(block: "Ensemble", copies: Sequence[Tensor]) -> "Ensemble":
    """The block on the device, with copies of its tensors in the order of `tensors_of`."""
    part, group = block.slice_members(0, block.members), block.groups[0]
    tensors = iter(copies)
    weights = {name: next(tensors).requires_grad_() for name in group.weights}
    buffers = {name: next(tensors) for name in group.buffers}
    part.groups = [replace(group, weights=weights, buffers=buffers)]
    part.alive, part.offload = block.alive, None
    return part


def parts_on_device(ensemble: "Ensemble", skip: int = 0) -> Iterator["Ensemble"]:
    """The members block by block on the device; a part is valid until the next one.

    Args:
        ensemble: the members; if they are on the device already, they are one part.
        skip: number of blocks to leave out, from the first.
    """
    if ensemble.offload is None:
        yield ensemble
        return
    blocks = host_blocks(ensemble)[skip:]
    visits = ensemble.offload.visit([tensors_of(block) for block in blocks])
    for block, copies in zip(blocks, visits, strict=True):
        yield part_of(block, copies)


def store_buffers(ensemble: "Ensemble", part: "Ensemble") -> None:
    """Copy the running statistics of a part to their place on the host."""
    assert ensemble.offload is not None
    first = part.first - ensemble.first
    block = ensemble.slice_members(first, first + part.members)
    for name, tensor in block.groups[0].buffers.items():
        ensemble.offload.store(tensor, part.groups[0].buffers[name])


def copied_to_device(ensemble: "Ensemble") -> "Ensemble":
    """All members on the device, for gradients that flow back to the tensors of the host."""
    assert ensemble.offload is not None
    ensemble.offload.flush()
    device, whole = ensemble.offload.device, ensemble.slice_members(0, ensemble.members)
    whole.groups = [
        replace(
            group,
            weights={name: tensor.to(device) for name, tensor in group.weights.items()},
            buffers={name: tensor.to(device) for name, tensor in group.buffers.items()},
        )
        for group in ensemble.groups
    ]
    whole.alive, whole.offload = ensemble.alive, None
    return whole

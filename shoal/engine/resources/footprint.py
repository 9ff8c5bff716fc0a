"""Footprint: what a training step takes on its device, predicted from steps of one or two members.

A step keeps the activations of the members that run together until their backward pass. Weights,
gradients and optimiser states of all members exist besides.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from shoal.engine.resources.memory import garbage_kept
from shoal.engine.saved_bytes import SavedBytes

__all__ = ["BlockFootprint", "Footprint", "bytes_of", "transient_bytes"]

_UNSHARED = 0.6
"""More that a captured step holds without cast copies, of what an eager step holds for a while."""

_TEMPORARIES = 2
"""Largest activations that exist once more in a backward pass: a gradient, and the next one."""


@dataclass(frozen=True)
class Footprint:
    """Bytes of a training step.

    Attributes:
        members: number of trained members M.
        resident: weights, buffers, optimiser states, and data on the device.
        gradients: velocity of all members.
        update: further copies of the weights while the optimiser updates them.
        common: what a pass keeps for any number of members.
        member: what a pass keeps for each member: activations, and cast copies of its weights.
        delayed: what a captured step keeps of each member to its end: cast copies.
        unused: most freed memory that the process holds for later (see `keep_freed`).
    """

    members: int
    resident: int
    gradients: int
    update: int = 0
    common: int = 0
    member: int = 0
    delayed: int = 0
    unused: int = 0

    def peak(self, chunk: int) -> int:
        """Bytes of a step with `chunk` members at a time."""
        rest = (self.members - chunk) * self.delayed
        step = self.common + chunk * self.member + rest
        step = max(self.update, step + min(step, self.unused))
        return self.resident + self.gradients + step

    @property
    def floor(self) -> int:
        """What any step takes: the activations of one member, and all that is of all members."""
        return self.resident + self.gradients + self.common + self.member

    def captured(self, held: int, chunk: int) -> int:
        """Bytes that a captured step holds where an eager step holds `held`.

        Within a capture, what one stream hands to another is never reused. That is the velocity of
        each member and its cast weights. In full precision, where nothing is cast, the measured
        surplus was half of the activations.
        """
        if self.delayed:
            return held + self.gradients + (self.members - chunk) * self.delayed
        return held + self.gradients + int(_UNSHARED * max(0, held - self.resident))

    def largest_chunk(self, limit: float, most: int) -> int | None:
        """The most members that can run at a time within the limit; None if one is too many."""
        return next((k for k in range(most, 0, -1) if self.peak(k) <= limit), None)


@dataclass(frozen=True)
class BlockFootprint:
    """Bytes on the device of a training step whose members visit it in blocks.

    Attributes:
        always: what stays on the device: data, shared tensors, and coordinates of all members.
        state: weights, buffers and optimiser states of a member.
        weights: weights of a member.
        common: what a pass keeps for any number of members.
        member: what a pass keeps for each member of a block.
        unused: most freed memory that the process holds for later (see `keep_freed`).
    """

    always: int
    state: int
    weights: int
    common: int = 0
    member: int = 0
    unused: int = 0

    def peak(self, block: int, slots: int) -> int:
        """Bytes of a step with blocks of this size, several of which are on the device at a time.

        A block being computed has its velocity and a copy of it, and activations; or, if weights
        are compared, as many columns of weights and drives, their mean-free copies and a product.
        """
        here = max(self.state, 2 * self.weights)
        step = self.common + block * (2 * self.weights + max(self.member, self.weights))
        return self.always + slots * block * here + step + min(step, self.unused)


def transient_bytes(
    step: Callable[[], object], device: torch.device, known: Iterable[Tensor]
) -> int:
    """Peak of what a step takes beyond the tensors that exist before it.

    A GPU's allocator measures it. Elsewhere it is what autograd saves, and two more activations.
    """
    if device.type != "cuda":
        with SavedBytes(known) as saved:
            step()
        return saved.peak + _TEMPORARIES * saved.largest
    with garbage_kept(device):
        torch.cuda.synchronize(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        step()
        torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


def bytes_of(tensors: Iterable[Tensor]) -> int:
    """Bytes of the tensors."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

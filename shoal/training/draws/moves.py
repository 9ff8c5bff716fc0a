"""Chains that move: step by step on a CPU, by captured steps on a GPU."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from shoal.core.types import Tree
from shoal.data.batches.sources import ArrayBatches
from shoal.engine.resources.graph import CapturedCases, OrdersAhead
from shoal.inference.samplers import Clock, Density, Plan
from shoal.training.draws.density import PosteriorDensity

__all__ = ["drawn", "moves"]


def moves(density: Density, plan: Plan, state: Tree) -> Callable[[int], None]:
    """A function that moves all chains by the step of a number; steps come in order."""
    if state["x"].device.type == "cuda":
        return _OnGPU(density, plan, state)
    return lambda step: plan.sampler.step(density, state, plan.clock(step))


def drawn(density: Density, start: Tensor, plan: Plan) -> tuple[Tensor, Tree]:
    """Draws [K, M, D] of chains that begin at particles [M, D], and the last state."""
    state = plan.sampler.begin(density, start.detach().clone(), plan.seed)
    chains, kept, move = [], 0, moves(density, plan, state)
    for step in range(plan.steps):
        move(step)
        kept, is_draw = plan.kept(step, kept)
        if is_draw:
            chains.append(state["x"].clone())
    return torch.stack(chains[: plan.draws]), state


class _OnGPU:
    """Steps whose numbers are all on the device, so that a CUDA graph can replay them.

    Attributes:
        capture: whether steps are replayed; the results are the same.
    """

    capture = True

    def __init__(self, density: Density, plan: Plan, state: Tree) -> None:
        x = state["x"]
        self.density, self.plan, self.state = density, plan, state
        self.now, self.step = torch.zeros((), dtype=torch.int64, device=x.device), 0
        paces = [plan.sampler.pace(clock) for clock in plan.clocks()]
        self.pace = torch.tensor(paces, dtype=x.dtype, device=x.device)
        self.cases = CapturedCases(state | {"the number of the step": self.now}, x.device)
        self.batches: ArrayBatches | None = None
        if isinstance(density, PosteriorDensity) and not density.whole:
            self._select(density)

    def _select(self, density: PosteriorDensity) -> None:
        """Let steps select their mini-batches on the device, if the data are there."""
        if isinstance(density.batches, ArrayBatches):
            self.batches, orders = density.batches, density.batches.orders
            self.orders, self.epoch = OrdersAhead(orders), -1
            shape = self.batches.steps_per_epoch, orders.width
            self.order = torch.zeros(shape, dtype=torch.int64, device=self.now.device)

    def __call__(self, step: int) -> None:
        """Move all chains."""
        if step != self.step:
            self.now.fill_(step)
        self.step = step + 1
        clock, size = self.plan.clock(step), 0
        if self.batches is not None:
            size = self._rows(self.batches, step)
        phase = self.plan.sampler.phase(clock)
        own = isinstance(self.density, PosteriorDensity) and not self.density.whole
        alike = phase is not None and (self.batches is not None or not own) and self.capture
        self.cases((phase, size) if alike else None, lambda: self._move(clock, size))

    def _rows(self, batches: ArrayBatches, step: int) -> int:
        """Load the order of the step's epoch; returns the number of rows of the step."""
        epoch, place = divmod(step, batches.steps_per_epoch)
        if epoch != self.epoch:
            order, self.epoch = self.orders(epoch), epoch
            self.order.view(-1)[: len(order)].copy_(order)
            self.rows = len(order)
        width = self.order.shape[1]
        return min(width, self.rows - place * width)

    def _move(self, clock: Clock, size: int) -> None:
        density: Any = self.density
        if self.batches is not None:
            place = (self.now % len(self.order)).view(1)
            density.rows = self.order.index_select(0, place).view(-1)[:size]
        pace = self.pace.index_select(0, self.now.view(1))[0] if self.pace.numel() else None
        work = dict(self.state)
        self.plan.sampler.step(density, work, replace(clock, now=self.now, given=pace))
        new = [name for name, tensor in work.items() if tensor is not self.state[name]]
        torch._foreach_copy_([self.state[n] for n in new], [work[n] for n in new])  # pyright: ignore[reportPrivateImportUsage]
        self.now += 1

"""Whole training steps as CUDA graphs: one launch per step, and nothing waits for the host.

A step of a small ensemble is a few dozen kernels of some microseconds each, so launching them from
Python takes longer than running them. Here a step is captured once per batch size: selection of the
batch on the device, forward pass, repulsion, backward pass, optimiser and history. Values that
change between steps (data order, learning rate, annealing, step number) are tensors on the device.
"""

import gc
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor

from shoal.core.structure import Structured
from shoal.engine.memory import MemoryLimit, lifted

__all__ = ["CapturedMove", "CapturedSteps", "DataOnDevice"]

Move = Callable[[Any, Any, float | Tensor, Tensor], object]
"""One training step: (x, y, annealing, step)."""


class DataOnDevice(Protocol):
    """Data from which a captured step selects its batch; defines the order of each epoch.

    Attributes:
        x: inputs [N, ...] on the device.
        y: targets [N, ...] on the device.
        batch_size: data points per batch; the last batch of an epoch may have fewer.
    """

    @property
    def x(self) -> Any: ...

    @property
    def y(self) -> Any: ...

    @property
    def batch_size(self) -> int: ...

    @property
    def n(self) -> int:
        """Data points N."""
        ...

    @property
    def steps_per_epoch(self) -> int:
        """Batches in one epoch."""
        ...

    def order(self, epoch: int) -> Tensor:
        """The data points in the order of one epoch [N]."""
        ...


class MemoryRoom(Protocol):
    """What decides whether a captured step may keep its memory.

    Attributes:
        limit: the most that the run takes; None without a limit.
    """

    limit: MemoryLimit | None

    @property
    def captures(self) -> bool:
        """Whether steps may be captured at all."""
        ...

    def fits_captured(self) -> bool:
        """Whether the run stays within its limit after a capture; if not, later steps take less."""
        ...


class CapturedSteps:
    """Replays captured steps over the epochs of data on the device.

    Args:
        move: one training step that uses only operations on the device.
        batches: the data, on the device.
        pace: learning rate and annealing factor of every step of the run.
        rate: the optimiser's learning rate, a scalar on the device.
        annealed: whether the annealing factor can differ from 1.
        room: the memory that the steps may take.
    """

    def __init__(
        self,
        move: Move,
        batches: DataOnDevice,
        pace: list[tuple[float, float]],
        rate: Tensor,
        annealed: bool,
        room: MemoryRoom,
    ) -> None:
        device = batches.x.device
        self.move, self.batches, self.rate, self.annealed = move, batches, rate, annealed
        self.room = room
        self.pace = torch.tensor(pace, device=device, dtype=rate.dtype)
        shape = batches.steps_per_epoch, batches.batch_size
        self.order = torch.zeros(shape, dtype=torch.int64, device=device)
        # Position of the next batch in `order`, and the number of the next step.
        self.places = torch.zeros(2, dtype=torch.int64, device=device)
        self.graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self.warm: dict[int, int] = {}
        self.pool = torch.cuda.graph_pool_handle()
        self.side = torch.cuda.Stream(device)

    def epoch(self, epoch: int, start: int, count: int, step: int) -> Iterator[None]:
        """Take `count` steps of an epoch, from batch number `start`; `step` is the run's."""
        batches = self.batches
        order = batches.order(epoch)[: self.order.numel()]
        self.order.view(-1)[: len(order)].copy_(order)
        self.places.copy_(torch.tensor([start, step]))
        for number in range(start, start + count):
            left = batches.n - number * batches.batch_size
            self._step(min(batches.batch_size, left))
            yield

    def _step(self, size: int) -> None:
        # The first steps run eagerly: libraries choose kernels, the optimiser makes its state.
        ready = self.warm.get(size, 0) >= (1 if self.graphs else 3)
        if size not in self.graphs and ready and self.room.captures:
            self.graphs[size] = self._captured(size)
            if not self.room.fits_captured():
                self._forget()
        if size in self.graphs:
            self.graphs[size].replay()
            return
        self.warm[size] = self.warm.get(size, 0) + 1
        self.side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.side):
            self._body(size)
        torch.cuda.current_stream().wait_stream(self.side)

    def _forget(self) -> None:
        """Delete all graphs and their memory; the next steps run eagerly and are captured anew."""
        self.graphs.clear()
        self.warm.clear()
        self.pool = torch.cuda.graph_pool_handle()
        torch.cuda.empty_cache()

    def _captured(self, size: int) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        gc.collect()
        with lifted(self.room.limit), torch.cuda.graph(graph, pool=self.pool, stream=self.side):
            self._body(size)
        return graph

    def _body(self, size: int) -> None:
        place, step = self.places.split(1)
        rows = self.order.index_select(0, place).view(-1)[:size]
        x, y = self.batches.x.index_select(0, rows), self.batches.y.index_select(0, rows)
        pace = self.pace.index_select(0, step)[0]
        self.rate.copy_(pace[0])
        self.move(x, y, pace[1] if self.annealed else 1.0, step[0])
        self.places += 1


class CapturedMove:
    """Replays one training step on further batches of the same shape.

    Args:
        move: one step: from inputs, targets and the step number to a dataclass of measures.
        x: the first inputs.
        y: the first targets.
        room: the memory that the steps may take.
    """

    WARM = 3

    def __init__(
        self,
        move: Callable[[Any, Any, Tensor], Any],
        x: Any,
        y: Any,
        room: MemoryRoom,
    ) -> None:
        self.room = room
        self.move, self.x, self.y = move, _copied(x), _copied(y)
        self.step = torch.zeros((), dtype=torch.int64, device=x.device)
        self.side = torch.cuda.Stream(x.device)
        self.graph: torch.cuda.CUDAGraph | None = None
        self.steps = 0
        self.info: Any = None

    def __call__(self, x: Any, y: Any, step: int) -> Any:
        """Take one step; the measures are copies, which later steps do not change."""
        _copy_into(self.x, x)
        _copy_into(self.y, y)
        self.step.fill_(step)
        self.steps += 1
        if self.steps > self.WARM and self.graph is None and self.room.captures:
            self._capture()
        if self.graph is None:  # libraries choose kernels, the optimiser makes its state
            here = torch.cuda.current_stream()
            self.side.wait_stream(here)
            with torch.cuda.stream(self.side):
                info = self.move(self.x, self.y, self.step)
            here.wait_stream(self.side)
            return info
        self.graph.replay()
        copies = {n: v.clone() for n, v in vars(self.info).items() if isinstance(v, Tensor)}
        return replace(self.info, **copies)

    def _capture(self) -> None:
        torch.cuda.synchronize()
        gc.collect()
        self.graph = torch.cuda.CUDAGraph()
        with lifted(self.room.limit), torch.cuda.graph(self.graph, stream=self.side):
            self.info = self.move(self.x, self.y, self.step)
        if not self.room.fits_captured():
            self.graph = self.info = None
            self.steps = 1  # this step runs eagerly, as the first of a smaller size
            torch.cuda.empty_cache()


def _copied(value: Any) -> Any:
    return value.map(Tensor.clone) if isinstance(value, Structured) else value.clone()


def _copy_into(kept: Any, value: Any) -> None:
    if isinstance(kept, Structured):
        for name, tensor in kept.tensors.items():
            tensor.copy_(value.tensors[name], non_blocking=True)
    else:
        kept.copy_(value, non_blocking=True)

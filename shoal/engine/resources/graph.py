"""Whole training steps as CUDA graphs: one launch per step, and nothing waits for the host.

A step of a small ensemble is a few dozen kernels of some microseconds each, so launching them from
Python takes longer than running them. Here a step is captured once per batch size: selection of the
batch on the device, forward pass, repulsion, backward pass, optimiser and history. Values that
change between steps (data order, learning rate, annealing, step number) are tensors on the device.

A prediction repeats a forward pass: `CapturedForward` replays it if launching takes longer, and
`captured_forward` keeps it for later calls, such as those of a service or of validation.
"""

import time
import warnings
from collections.abc import Callable, Hashable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Protocol
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from shoal.core.errors import ShoalError
from shoal.core.structure import Structured
from shoal.engine.kernels import fused
from shoal.engine.kernels.fused import kernel_supports
from shoal.engine.members.group import Group
from shoal.engine.resources.memory import MemoryLimit, garbage_kept, lifted

__all__ = [
    "CapturedCases", "CapturedForward", "CapturedMove", "CapturedSteps", "DataOnDevice",
    "OrdersAhead", "captured_forward",
]  # fmt: skip

Move = Callable[[Any, Any, float | Tensor, Tensor], object]
"""One training step: (x, y, annealing, step)."""


class Orders(Protocol):
    """The rows of all steps of an epoch.

    Attributes:
        width: rows that one step takes, of all members.
    """

    @property
    def width(self) -> int: ...

    def __call__(self, epoch: int) -> Tensor:
        """The rows, one step after another."""
        ...


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

    @property
    def orders(self) -> Orders:
        """The orders in which the members see the data points."""
        ...

    def at(self, rows: Tensor) -> tuple[Any, Any]:
        """Inputs and targets of these rows."""
        ...

    def arranged(self, x: Any, y: Any) -> tuple[Any, Any]:
        """Inputs and targets of the rows of a step, member by member if each has its own."""
        ...


class Networks(Protocol):
    """Members whose forward passes are captured.

    Attributes:
        groups: the members, by architecture.
    """

    groups: list[Group]

    @property
    def device(self) -> torch.device: ...

    def __call__(self, x: Any) -> Tensor:
        """Outputs [M, B, ..., C]."""
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


class OrdersAhead:
    """Orders of epochs; that of the next epoch is drawn while the device works."""

    def __init__(self, orders: Orders) -> None:
        self.orders, self.drawing = orders, ThreadPoolExecutor(1)
        self.ahead: tuple[int, Future[Tensor]] = -1, Future()

    def __call__(self, epoch: int) -> Tensor:
        """The rows of all steps of an epoch."""
        known, ahead = self.ahead
        order = ahead.result() if known == epoch else self.orders(epoch)
        self.ahead = epoch + 1, self.drawing.submit(self.orders, epoch + 1)
        return order


class CapturedSteps:
    """Replays captured steps over the epochs of data on the device.

    Args:
        move: one training step that uses only operations on the device.
        batches: the data, on the device.
        pace: learning rate and annealing factor of every step of the run.
        rate: the optimiser's learning rate, a scalar on the device.
        annealed: whether the annealing factor can differ from 1.
        room: the memory that the steps may take.
        kind: what the kernels of a step depend on; steps of one kind may differ in their data.
        changes: whether later steps launch other kernels than the first.

    Attributes:
        note: told in some words what the steps wait for, and "" when they wait no longer.
    """

    _known: ClassVar[set[Hashable]] = set()
    """Kinds of steps that this process has captured before."""

    def __init__(
        self,
        move: Move,
        batches: DataOnDevice,
        pace: list[tuple[float, float]],
        rate: Tensor,
        annealed: bool,
        room: MemoryRoom,
        kind: Hashable,
        changes: bool,
    ) -> None:
        device = batches.x.device
        self.kind, self.changes = kind, changes
        self.move, self.batches, self.rate, self.annealed = move, batches, rate, annealed
        self.room = room
        self.pace = torch.tensor(pace, device=device, dtype=rate.dtype)
        shape = batches.steps_per_epoch, batches.orders.width
        self.order = torch.zeros(shape, dtype=torch.int64, device=device)
        # Position of the next batch in `order`, and the number of the next step.
        self.places = torch.zeros(2, dtype=torch.int64, device=device)
        self.done = torch.zeros((), dtype=torch.int32, device=device)
        self.every = torch.arange(len(batches.x), device=device)
        self.graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self.warm: dict[int, int] = {}
        self.pool = torch.cuda.graph_pool_handle()
        self.side = torch.cuda.Stream(device)
        self.orders = OrdersAhead(batches.orders)
        self.note: Callable[[str], object] = lambda words: None

    def epoch(self, epoch: int, start: int, count: int, step: int) -> Iterator[None]:
        """Take `count` steps of an epoch, from batch number `start`; `step` is the run's."""
        batches = self.batches
        order = self.orders(epoch)[: self.order.numel()]
        self.order.view(-1)[: len(order)].copy_(order)
        self.places.copy_(torch.tensor([start, step]))
        for number in range(start, start + count):
            left = len(order) - number * batches.orders.width
            self._step(min(batches.orders.width, left))
            yield

    def _step(self, size: int) -> None:
        if size not in self.graphs and self._ready(size) and self.room.captures:
            self.note("capturing the step")
            self.graphs[size] = self._captured(size)
            self._known.add(self.kind)
            self.note("")
            if not self.room.fits_captured():
                self._forget()
        if size in self.graphs:
            self.graphs[size].replay()
            return
        if not self.warm:
            self.note("choosing and building kernels")
        self.warm[size] = self.warm.get(size, 0) + 1
        self.side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.side):
            self._body(size)
        torch.cuda.current_stream().wait_stream(self.side)

    def _ready(self, size: int) -> bool:
        """Whether enough steps of this size have run eagerly.

        In the first one, libraries choose kernels and the optimiser makes its states. A second one
        builds the kernels of a step that finds these states, if it has others and the process has
        not built them yet.
        """
        again = self.changes and not self.graphs and not self.known
        return self.warm.get(size, 0) >= 1 + again

    @property
    def known(self) -> bool:
        """Whether this process has captured a step of this kind before."""
        return self.kind in self._known

    def launch_next(self) -> None:
        """Launch the kernel that chooses a batch, where none is launched (`only_building`)."""
        if kernel_supports(self.pace, self.rate):
            self._chosen(self.order.shape[1])

    def close(self) -> None:
        """Let go of all graphs and of the step, whose owner holds this object: no cycle is left."""
        self.graphs.clear()
        del self.move

    def _forget(self) -> None:
        """Delete all graphs and their memory; the next steps run eagerly and are captured anew."""
        self.graphs.clear()
        self.warm.clear()
        self.pool = torch.cuda.graph_pool_handle()
        torch.cuda.empty_cache()

    def _captured(self, size: int) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        captured = torch.cuda.graph(graph, pool=self.pool, stream=self.side)
        with lifted(self.room.limit), garbage_kept(self.order.device), captured:
            self._body(size)
        return graph

    def _body(self, size: int) -> None:
        x, y, annealing, step = self._next(size)
        self.move(x, y, annealing if self.annealed else 1.0, step)

    def _copied(self) -> tuple[Tensor, Tensor] | None:
        """Inputs and targets, if the kernel that chooses the batch can copy it as well."""
        x, y = self.batches.x, self.batches.y
        words = [fused.step_kernels.in_words(each) for each in (x, y)]
        return None if any(each is None for each in words) else (x, y)

    def _chosen(self, size: int) -> tuple[Any, Any, Tensor, Tensor]:
        """The next batch by a kernel, or only its rows if it cannot copy them; see `_next`."""
        state = self.places, self.order, self.pace, self.rate, self.done
        data = self._copied() or (self.every, self.every)
        return fused.step_kernels.next_batch(*state, data, size)

    def _next(self, size: int) -> tuple[Any, Any, Tensor, Tensor]:
        """The next batch, its annealing factor and number; sets the learning rate."""
        batches = self.batches
        if kernel_supports(self.pace, self.rate):
            x, y, factor, step = self._chosen(size)
            x, y = batches.arranged(*((x, y) if self._copied() else batches.at(x)))
            return x, y, factor, step
        place, step = self.places.clone().split(1)
        rows = self.order.index_select(0, place).view(-1)[:size]
        pace = self.pace.index_select(0, step)[0]
        self.rate.copy_(pace[0])
        self.places += 1
        return *batches.arranged(*batches.at(rows)), pace[1], step[0]


class CapturedMove:
    """Replays one training step on further batches of the same shape.

    A replay takes few calls: the batch is copied to where the step reads it, the step counts
    itself, and the measures of one type leave as one copy.

    Attributes:
        graph: the captured step; None before the capture.

    Args:
        move: one step: from inputs, targets and the step number to a dataclass of measures.
        x: the first inputs.
        y: the first targets.
        room: the memory that the steps may take.
    """

    WARM = 2

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
        self.next = -1  # the number that `step` has on the device, as far as the host knows
        self.info: Any = None
        self.measures: list[Tensor] = []

    def __call__(self, x: Any, y: Any, step: int) -> Any:
        """Take one step; the measures are copies, which later steps do not change."""
        if self.graph is not None:
            return self.replayed(x, y, step)
        _copy_into(self.x, x)
        _copy_into(self.y, y)
        self.step.fill_(step)
        self.steps += 1
        if self.steps > self.WARM and self.room.captures:
            self._capture()
        if self.graph is not None:
            self.next = step
            return self._replayed(step)
        # libraries choose kernels, the optimiser makes its state
        here = torch.cuda.current_stream()
        self.side.wait_stream(here)
        with torch.cuda.stream(self.side):
            info = self.move(self.x, self.y, self.step)
        here.wait_stream(self.side)
        return info

    def replayed(self, x: Any, y: Any, step: int) -> Any:
        """Take one captured step; targets may come in another view of the same numbers."""
        _copy_into(self.x, x)
        _copy_into(self.y, y if not isinstance(y, Tensor) else y.view(self.y.shape))
        return self._replayed(step)

    def _replayed(self, step: int) -> Any:
        assert self.graph is not None
        if step != self.next:
            self.step.fill_(step)
        self.next = step + 1
        self.graph.replay()
        return taken_apart(self.info, [joined.clone() for joined in self.measures])

    def _capture(self) -> None:
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        captured = torch.cuda.graph(self.graph, stream=self.side)
        with lifted(self.room.limit), garbage_kept(self.step.device), captured:
            self.info = self.move(self.x, self.y, self.step)
            self.measures = put_together(self.info)
            self.step += 1
        if not self.room.fits_captured():
            self.graph = self.info = None
            self.measures = []
            self.steps = 1  # this step runs eagerly, as the first of a smaller size
            torch.cuda.empty_cache()


def put_together(info: Any) -> list[Tensor]:
    """All tensors of a dataclass, one tensor [n] per type."""
    types: dict[torch.dtype, list[Tensor]] = {}
    for value in vars(info).values():
        if isinstance(value, Tensor):
            types.setdefault(value.dtype, []).append(value.reshape(-1))
    return [torch.cat(each) for each in types.values()]


def taken_apart(info: Any, together: Sequence[Tensor]) -> Any:
    """A dataclass like `info` with the numbers of tensors as `put_together` gives them."""
    names: dict[torch.dtype, list[str]] = {}
    fields = vars(info)
    for name, value in fields.items():
        if isinstance(value, Tensor):
            names.setdefault(value.dtype, []).append(name)
    changed: dict[str, Tensor] = {}
    for tensor, each in zip(together, names.values(), strict=True):
        parts = tensor.split([fields[name].numel() for name in each])
        for name, part in zip(each, parts, strict=True):
            changed[name] = part if fields[name].ndim == 1 else part.view(fields[name].shape)
    return replace(info, **changed)


class CapturedCases:
    """Replays calls that change tensors in place, of several cases that each do the same.

    The first calls of a case run eagerly. A case that reads numbers from the device, or whose
    memory is too large to be kept, stays eager.

    Args:
        state: the tensors that a call changes.
        device: the GPU.
    """

    WARM = 2
    SHARE = 0.5

    def __init__(self, state: dict[str, Tensor], device: torch.device) -> None:
        self.state = state
        self.graphs: dict[Hashable, torch.cuda.CUDAGraph | None] = {}
        self.warm: dict[Hashable, int] = {}
        self.pool = torch.cuda.graph_pool_handle()
        self.side = torch.cuda.Stream(device)

    def __call__(self, case: Hashable, call: Callable[[], None]) -> None:
        """Take a call of this case; None is never captured."""
        graph = self.graphs.get(case)
        if graph is not None:
            graph.replay()
            return
        self.warm[case] = self.warm.get(case, 0) + 1
        if case is None or case in self.graphs or self.warm[case] <= self.WARM:
            self._eagerly(call)
            return
        self.graphs[case] = self._captured(call) if self._can_be(call) else None
        if self.graphs[case] is None:
            self._eagerly(call)
        else:
            self(case, call)

    def _eagerly(self, call: Callable[[], None]) -> None:
        here = torch.cuda.current_stream()
        self.side.wait_stream(here)
        with torch.cuda.stream(self.side):
            call()
        here.wait_stream(self.side)

    def _can_be(self, call: Callable[[], None]) -> bool:
        """Whether a call waits for no number of the device, and its memory can be kept."""
        before = {name: tensor.clone() for name, tensor in self.state.items()}
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_allocated()
        waits = _waits_for_host(lambda _: call(), None)
        torch.cuda.synchronize()
        taken = torch.cuda.max_memory_allocated() - held
        for name, tensor in self.state.items():
            tensor.copy_(before[name])
        return not waits and taken < self.SHARE * torch.cuda.mem_get_info()[0]

    def _captured(self, call: Callable[[], None]) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        captured = torch.cuda.graph(graph, pool=self.pool, stream=self.side)
        with garbage_kept(self.side.device), captured:
            call()
        return graph


@dataclass
class _Passes:
    """The passes of inputs of one kind.

    Attributes:
        seen: number of eager passes.
        launched: seconds that the host needs to launch one; 0 before a pass was timed.
        spent: seconds that the host has launched passes since then.
        captures: whether launching takes most of the time of a pass, and no capture failed.
        graph: the captured pass, with its inputs and outputs; None before the capture.
    """

    seen: int = 0
    launched: float = 0.0
    spent: float = 0.0
    captures: bool = False
    graph: torch.cuda.CUDAGraph | None = None
    x: Any = None
    outputs: Tensor | None = None


class CapturedForward:
    """A forward pass without gradients that is replayed where launching its kernels takes longest.

    The first passes of each kind of batch (shapes and types) run eagerly, and one is timed. If the
    host needs most of the time for launching, the pass is captured as soon as that pays: if the
    batches left need longer than a capture, or if launching has taken as long as a capture already.
    So captures never take longer than launching did, whatever shapes come.

    Attributes:
        taken: bytes that the captured passes hold.

    Args:
        call: from inputs on the GPU to outputs.
        points: number of data points to come; None if unknown.
    """

    WARM = 3
    CAPTURE_SECONDS = 0.2
    CAPTURE_LAUNCHES = 4
    LAUNCH_SHARE = 0.7
    MOST_GRAPHS = 8
    MOST_KINDS = 256

    def __init__(self, call: Callable[[Any], Tensor] | None, points: int | None) -> None:
        self.call, self.left = call, points or 0
        self.passes: dict[Any, _Passes] = {}
        self.pool: Any = None
        self.taken = 0

    def __call__(self, x: Any) -> Tensor:
        """The outputs; a replay gives a copy, which later batches do not change."""
        assert self.call is not None
        self.left -= len(x)
        kind = _kind(x)
        if kind is None:
            return self.call(x)
        passes = self.passes.pop(kind, None) or _Passes()
        self.passes[kind] = passes  # the kinds of the latest batches come last
        if len(self.passes) > self.MOST_KINDS:
            del self.passes[next(iter(self.passes))]
        if passes.graph is None:
            return self._eager(passes, x)
        _copy_into(passes.x, x)
        passes.graph.replay()
        assert passes.outputs is not None
        return passes.outputs.clone()

    def _eager(self, passes: _Passes, x: Any) -> Tensor:
        """A pass that may be timed, and after which the pass may be captured."""
        assert self.call is not None
        passes.seen += 1
        outputs = self._timed(passes, x) if passes.seen == self.WARM else self.call(x)
        if passes.captures:
            passes.spent += passes.launched
            rest = self.left // len(x) * passes.launched
            price = self.CAPTURE_SECONDS + self.CAPTURE_LAUNCHES * passes.launched
            if max(rest, passes.spent) > price:
                self._capture(passes, x)
        return outputs

    def _timed(self, passes: _Passes, x: Any) -> Tensor:
        assert self.call is not None
        torch.cuda.synchronize()
        start = time.perf_counter()
        outputs = self.call(x)
        passes.launched = time.perf_counter() - start
        torch.cuda.synchronize()
        whole = time.perf_counter() - start
        passes.captures = passes.launched > self.LAUNCH_SHARE * whole
        return outputs

    def _capture(self, passes: _Passes, x: Any) -> None:
        assert self.call is not None
        passes.captures = False
        # The allocator frees nothing any more after a capture that failed, so try without one.
        if _waits_for_host(self.call, x):
            return
        torch.cuda.synchronize()
        captured = [kind for kind, each in self.passes.items() if each.graph is not None]
        if len(captured) >= self.MOST_GRAPHS:
            del self.passes[captured[0]]
        passes.x, graph = _copied(x), torch.cuda.CUDAGraph()
        self.pool = self.pool or torch.cuda.graph_pool_handle()
        held = torch.cuda.memory_reserved(x.device)
        side = torch.cuda.Stream(x.device)
        try:
            captures = torch.cuda.graph(graph, pool=self.pool, stream=side)
            with garbage_kept(side.device), captures:
                passes.outputs = self.call(passes.x)
        except (RuntimeError, ShoalError):
            passes.x, passes.outputs = None, None
            torch.cuda.synchronize()
        else:
            passes.graph = graph
            self.taken += torch.cuda.memory_reserved(x.device) - held


_kept_forwards: WeakKeyDictionary[Any, tuple[tuple, CapturedForward, list]] = WeakKeyDictionary()
"""Captured passes of networks, with what they read, and casts of frozen tensors."""

KEPT_MEMORY = 1 / 32
"""Largest share of a GPU's memory that captured passes hold between two calls."""


@contextmanager
def captured_forward(networks: Networks, points: int | None) -> Iterator[CapturedForward]:
    """A block in which passes without gradients may be replayed, also those of earlier blocks.

    Replays read weights where they are, so training in place is seen. If a tensor was replaced, or
    the precision changed, passes are captured anew. Threads do not share captured passes.

    Args:
        networks: the members, in evaluation mode on a GPU.
        points: number of data points to come; None if unknown.
    """
    reads = _reads(networks)
    known, forward, held = _kept_forwards.pop(networks, (None, None, []))
    if forward is None or known != reads:
        forward, held = CapturedForward(None, None), []
    forward.call, forward.left, before = networks, points or 0, forward.taken
    try:
        yield forward
    finally:
        forward.call = None  # the networks can be freed
        if forward.taken > before:  # the members forget their casts; a replay reads them
            held.append([dict(group._lowered) for group in networks.groups])
        memory = torch.cuda.get_device_properties(networks.device).total_memory
        if forward.taken <= KEPT_MEMORY * memory:
            _kept_forwards[networks] = reads, forward, held


def _reads(networks: Networks) -> tuple:
    """What a captured pass depends on: places of tensors, arithmetic, outputs and stream."""
    places, settings = [], []
    for group in networks.groups:
        for tree in (group.weights, group.buffers, group.shared):
            places += [(t.data_ptr(), t.shape, t.stride(), t.dtype) for t in tree.values()]
        # a frozen tensor is cast once, outside of the captured pass
        places += [t._version for t in group.shared.values() if not t.requires_grad]
        output = group.skeleton.__dict__.get("_shoal_output")
        settings.append((group.compute, id(group.derivatives), output))
    matmul: Any = torch.backends.cuda.matmul
    convolution: Any = torch.backends.cudnn
    stream = torch.cuda.current_stream(networks.device).cuda_stream
    return places, settings, matmul.allow_tf32, convolution.allow_tf32, stream


def _waits_for_host(call: Callable[[Any], object], x: Any) -> bool:
    """Whether a call reads numbers from the device, as by `item`, which no graph can contain."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls the mode a prototype
        before = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("error")
        try:
            call(x)
        except (RuntimeError, ShoalError):
            return True
        finally:
            torch.cuda.set_sync_debug_mode(before)
    return False


def _kind(x: Any) -> Any:
    """Names, shapes and types of the inputs; None for objects, which are not captured."""
    if not isinstance(x, (Tensor, Structured)):
        return None
    parts, form = ({"": x}, "") if isinstance(x, Tensor) else (x.tensors, repr(x.form))
    return form, tuple((n, t.shape, t.stride(), t.dtype) for n, t in parts.items())


def _copied(value: Any) -> Any:
    return value.map(Tensor.clone) if isinstance(value, Structured) else value.clone()


def _copy_into(kept: Any, value: Any) -> None:
    if isinstance(kept, Structured):
        for name, tensor in kept.tensors.items():
            tensor.copy_(value.tensors[name], non_blocking=True)
    else:
        kept.copy_(value, non_blocking=True)

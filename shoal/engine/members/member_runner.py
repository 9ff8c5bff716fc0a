"""The member runner: all members at once, in chunks, or one after another, with the same result.

On a GPU, members of a loop run on side streams. Side streams belong to the stream that starts the
work, so two branches never wait for each other. On a CPU streams do nothing.
"""

import functools
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from shoal.core.errors import ConfigError, DataError, ShoalError, ShoalWarning, first_line
from shoal.core.structure import Inputs
from shoal.core.types import Tree
from shoal.engine.derivatives import fast_second_order, fused_layers, second_order
from shoal.engine.derivatives.backend import takes_device
from shoal.engine.member_layers import folded_attention, member_layers
from shoal.engine.member_layers.pending import computed
from shoal.engine.members.network_call import (
    MemberCall,
    MemberInputs,
    Unpacked,
    each_member,
    tensors_of,
    unpacked,
)
from shoal.engine.members.once import Once, Spoiled
from shoal.engine.members.recompute import recomputed_blocks
from shoal.engine.members.recurrent import own_recurrence
from shoal.engine.members.sharded_trunk import ShardedTensor, WholeFirst

__all__ = [
    "STREAMS",
    "MemberInputs",
    "MemberRunner",
    "lanes",
    "parse_runner",
    "run_or_loop",
    "twice_differentiable",
    "without_fallback_warnings",
    "without_vmap",
]


_COMPILED = [SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]

STREAMS = 10
"""Number of members that a loop runs at a time on a GPU."""


@contextmanager
def lanes(count: int, device: torch.device, read: Sequence[Tensor]) -> Iterator[list]:
    """Side streams that start after the queued work; all later work waits for them.

    Args:
        count: number of streams.
        device: device of the work.
        read: tensors of this stream that the side streams read, now or in a backward pass.
    """
    if count == 1 or device.type != "cuda":
        yield [None]
        return
    here = torch.cuda.current_stream(device)
    sides = _sides(here, count)
    for side in sides:
        side.wait_stream(here)
        # Backward passes read these tensors after the host has freed them: without this record,
        # new tensors of this stream would get the same memory.
        for tensor in read:
            tensor.record_stream(side)
    yield sides
    for side in sides:
        here.wait_stream(side)


@functools.lru_cache(maxsize=16)
def _sides(here: torch.cuda.Stream, count: int) -> list[torch.cuda.Stream]:
    return [torch.cuda.Stream(here.device) for _ in range(count)]


@dataclass(frozen=True)
class MemberRunner:
    """A way to run the members of a group.

    Attributes:
        kind: "vmap" runs members together by `torch.func.vmap`, "loop" one after another.
        chunk: number of members per forward and backward pass, to limit activations; None for all.
            A single forward pass by vmap is divided in the same way.
        streams: on a GPU, number of loop members that run at a time; with several streams, layers
            run fused.
        compiled: whether the networks go through `torch.compile`.
        recompute: whether blocks of loop members keep no activations for the backward pass.
        light: whether fused layers compute the outputs of batch normalisation again in the backward
            pass; there is no second derivative then.
    """

    kind: str = "vmap"
    chunk: int | None = None
    streams: int = 1
    compiled: bool = False
    recompute: bool = False
    light: bool = False

    def __call__(
        self,
        module: nn.Module,
        state: Tree,
        x: Inputs,
        own_inputs: bool,
        shared: Tree | None = None,
    ) -> Tensor:
        """Outputs [M, B, ..., C] of `module` with each member's tensors.

        Args:
            module: the skeleton whose parameters and buffers are replaced.
            state: weights and buffers of all members, [M, ...]; buffers are updated in place.
            x: inputs [B, ...] for all members, or [M, B, ...] with `own_inputs`.
            own_inputs: every member has its own inputs.
            shared: tensors [...] of all members.
        """
        shown = MemberInputs(x, own_inputs)
        return self.outputs(module, state, shown, shared=shared or {})[0]

    def outputs(
        self, module: nn.Module, state: Tree, *shown: MemberInputs, shared: Tree
    ) -> tuple[Tensor, ...]:
        """Outputs [M, B, C] for a batch, and for some of its rows beside it (`forward_with_rows`).

        The two outputs do not share memory, so their gradients stay separate. What depends on
        shared tensors and shared inputs alone is computed once: `vmap` batches no operation
        without a batched argument, and a loop remembers results (`shoal.engine.members.once`).
        """
        one, batches = unpacked(module, shown)
        own = tuple(inputs.own for inputs in shown)
        case = own if isinstance(shown[0].x, Tensor) else (*own, repr(shown[0].x))
        if self.kind == "loop":
            run = _compiled(module, self, case, one) if self.compiled else one
            return self._loop(module, run, state, shared, batches)
        in_dims = (0, None, *(0 if mine else None for mine in own))
        fused = not self.compiled and takes_device(_device(batches))
        member = functools.partial(_in_member_layers, one) if fused else one
        run = vmap(member, in_dims=in_dims, randomness="different", chunk_size=self.chunk)
        run = _compiled(module, self, case, run) if self.compiled else run
        # The compiler cannot follow the folding; memory-efficient kernels fail under `vmap`.
        folded = sdpa_kernel(_COMPILED) if self.compiled else folded_attention()
        with without_fallback_warnings(), folded:
            return run(state, shared, *(inputs.x for inputs in batches))

    def _loop(
        self,
        module: nn.Module,
        one: MemberCall,
        state: Tree,
        shared: Tree,
        shown: Sequence[Unpacked],
    ) -> tuple[Tensor, ...]:
        members, device = len(next(iter(state.values()))), _device(shown)
        split = {name: tensor.unbind(0) for name, tensor in state.items()}
        inputs = [each_member(x, members) if own else [x] * members for x, own in shown]

        def member(i: int) -> tuple[Tensor, ...]:
            tensors = {name: parts[i] for name, parts in split.items()}
            with recomputed_blocks(module) if self.recompute else nullcontext():
                return one(tensors, shared, *(each[i] for each in inputs))

        run = functools.partial(self._each_member, member, members, device)
        read = [*(t for x, _ in shown for t in tensors_of(x)), *shared.values(), *state.values()]
        once = self._once(module, members, shared, shown)
        if once is None:
            outputs = run(read, None)
        else:
            before = {name: t.clone() for name, t in state.items() if not t.requires_grad}
            try:
                outputs = run(read, once)
            except Spoiled:
                module.__dict__["_shoal_spoiled"] = True
                for name, tensor in before.items():
                    state[name].copy_(tensor)
                outputs = run(read, None)
        return tuple(torch.stack(each) for each in zip(*outputs, strict=True))

    def _once(
        self, module: nn.Module, members: int, shared: Tree, shown: Sequence[Unpacked]
    ) -> Once | None:
        """What all members compute alike; None if members share nothing that can be followed."""
        if not shared or members == 1 or self.compiled or "_shoal_spoiled" in vars(module):
            return None
        inputs = [t for x, own in shown if not own for t in tensors_of(x)]
        return Once(module, [*shared.values(), *inputs]) if inputs else None

    def _each_member(
        self,
        member: Callable[[int], tuple[Tensor, ...]],
        members: int,
        device: torch.device,
        read: list[Tensor],
        once: Once | None,
    ) -> list[tuple[Tensor, ...]]:
        """Outputs of one member after another, or of several at a time on side streams."""
        outputs, block = [], nullcontext() if once is None else once
        with self._layers(device), block:
            if once is not None:  # side streams wait for the results that all members use
                outputs.append(member(0))
                once.next_member()
                read = [*read, *once.results]
            with lanes(self.streams, device, read) as side:
                for i in range(len(outputs), members):
                    with torch.cuda.stream(side[i % len(side)]):
                        outputs.append(member(i))
                    if once is not None:
                        once.next_member()
        return outputs

    @property
    def can_be_light(self) -> bool:
        """Whether layers run fused, of which some can be light."""
        return self.kind == "loop" and self.streams > 1 and not self.compiled and not self.light

    def _layers(self, device: torch.device) -> AbstractContextManager:
        fused = not self.compiled and device.type == "cuda" and self.streams > 1
        return fused_layers(light=self.light) if fused else nullcontext()


def parse_runner(engine: str) -> MemberRunner:
    """The member runner named by "auto", "vmap", "loop" or "chunk:4".

    >>> parse_runner("chunk:4").chunk
    4
    """
    if engine in ("auto", "vmap"):
        return MemberRunner()
    if engine == "loop":
        return MemberRunner("loop")
    kind, _, size = engine.partition(":")
    if kind == "chunk" and size.isdecimal() and int(size) > 0:
        return MemberRunner(chunk=int(size))
    raise ConfigError(
        f"engine must be 'auto', 'vmap', 'loop' or 'chunk:SIZE' (as in 'chunk:4'), not '{engine}'"
    )


@contextmanager
def twice_differentiable(mapping: MemberRunner, on_gpu: bool) -> Iterator[MemberRunner]:
    """A member runner whose input gradients can be differentiated.

    Fused attention and compiled networks have no second derivative, and one activation has none;
    some layers have a slow one.
    """
    fast = fast_second_order() if on_gpu else second_order()
    recurrent = own_recurrence() if on_gpu else nullcontext()  # cuDNN has no second derivative
    with sdpa_kernel(SDPBackend.MATH), fast, recurrent:
        yield replace(mapping, compiled=False)


def without_vmap(shared: Tree) -> MemberRunner:
    """The runner of networks that `vmap` cannot batch, with these tensors of all members.

    Parts of a sharded trunk are sent and received on one stream.
    """
    sharded = any(isinstance(tensor, ShardedTensor) for tensor in shared.values())
    return MemberRunner("loop", streams=1 if sharded else STREAMS)


def run_or_loop(
    mapping: MemberRunner, module: nn.Module, state: Tree, *shown: MemberInputs, shared: Tree
) -> tuple[tuple[Tensor, ...], MemberRunner]:
    """Outputs, and the member runner that worked: a loop if `vmap` cannot batch the module."""
    before = {name: t.detach().clone() for name, t in state.items() if not t.requires_grad}
    try:
        return mapping.outputs(module, state, *shown, shared=shared), mapping
    except (torch.OutOfMemoryError, ShoalError):
        raise
    except Exception as error:
        with torch.no_grad():
            for name, tensor in before.items():
                state[name].copy_(tensor)
        loop, (x, own) = without_vmap(shared), shown[0]
        try:
            outputs = loop.outputs(module, state, *shown, shared=shared)
        except Exception as cause:
            if isinstance(cause, ShoalError):
                raise
            raise DataError(
                f"the network does not take {_described(x, own)}: {first_line(cause)}"
            ) from cause
        if mapping.kind != "loop":
            warnings.warn(
                f"members run one after another, since vmap cannot batch this network: "
                f"{first_line(error)}",
                ShoalWarning,
                stacklevel=2,
            )
        return outputs, loop


_quiet = 0
"""How many contexts of `without_fallback_warnings` are open."""


@contextmanager
def without_fallback_warnings() -> Iterator[None]:
    """Operations that `vmap` runs member by member are right, and no concern of the user."""
    global _quiet
    functorch: Any = torch._C._functorch  # pyright: ignore
    functorch._set_vmap_fallback_warning_enabled(False)
    _quiet += 1
    try:
        yield
    finally:
        _quiet -= 1
        if _quiet == 0:  # torch does not tell whether warnings were on; they are by default
            functorch._set_vmap_fallback_warning_enabled(True)


def _in_member_layers(one: MemberCall, own: Tree, shared: Tree, *inputs: Any) -> tuple[Tensor, ...]:
    sharded = any(isinstance(tensor, ShardedTensor) for tensor in shared.values())
    with member_layers(), WholeFirst() if sharded else nullcontext():
        return computed(one(own, shared, *inputs))


def _device(shown: Sequence[Unpacked]) -> torch.device:
    tensors = tensors_of(shown[0].x)
    return tensors[0].device if tensors else torch.device("cpu")


def _described(x: Inputs, own: bool) -> str:
    if isinstance(x, Tensor):
        return f"inputs of shape {tuple(x.shape[1 + own :])}"
    return "the inputs " + " ".join(str(x).split())[:200]


class _Kept(dict):
    """Compiled functions of a module; deleted with the module, and not copied with it."""

    def __deepcopy__(self, memo: dict) -> "_Kept":
        return _Kept()


def _compiled(module: nn.Module, mapping: MemberRunner, case: tuple, run: MemberCall) -> MemberCall:
    kept = module.__dict__.setdefault("_shoal_compiled", _Kept())
    if (mapping, case) not in kept:
        kept[mapping, case] = torch.compile(run, dynamic=False)
    return kept[mapping, case]

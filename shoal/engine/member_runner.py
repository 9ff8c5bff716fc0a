"""The member runner: all members at once, in chunks, or one after another, with the same result.

On a GPU, members of a loop run on side streams. Side streams belong to the stream that starts the
work, so two branches never wait for each other. On a CPU streams do nothing.
"""

import functools
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from shoal.core.errors import ConfigError, DataError, ShoalError, ShoalWarning
from shoal.core.structure import Inputs, Structured
from shoal.core.types import Tree
from shoal.engine.derivatives import fast_second_order, forward_with_rows, fused_layers
from shoal.engine.network_call import call_network, selected_output

__all__ = [
    "MemberInputs",
    "MemberRunner",
    "first_line",
    "lanes",
    "parse_runner",
    "run_or_loop",
    "twice_differentiable",
    "without_fallback_warnings",
]


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


class MemberInputs(NamedTuple):
    """Inputs of the members: [B, ...] for all, or [M, B, ...] with `own`, one batch per member."""

    x: Inputs
    own: bool


@dataclass(frozen=True)
class MemberRunner:
    """A way to run the members of a group.

    Attributes:
        kind: "vmap" runs members together by `torch.func.vmap`, "loop" one after another.
        chunk: number of members per forward and backward pass, to limit activations; None for all.
            A single forward pass by vmap is divided in the same way.
        streams: on a GPU, number of loop members that run at a time; with several streams, layers
            of trained networks run fused.
        compiled: whether the networks go through `torch.compile`.
    """

    kind: str = "vmap"
    chunk: int | None = None
    streams: int = 1
    compiled: bool = False

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
        without a batched argument, and a loop remembers results (`shoal.engine.once`).
        """
        one, unpacked = _unpacked(module, shown)
        own = tuple(inputs.own for inputs in shown)
        case = own if isinstance(shown[0].x, Tensor) else (*own, repr(shown[0].x))
        if self.kind == "loop":
            run = _compiled(module, self, case, one) if self.compiled else one
            return self._loop(run, state, shared, unpacked)
        in_dims = (0, None, *(0 if mine else None for mine in own))
        run = vmap(one, in_dims=in_dims, randomness="different", chunk_size=self.chunk)
        run = _compiled(module, self, case, run) if self.compiled else run
        with without_fallback_warnings():
            return run(state, shared, *(inputs.x for inputs in unpacked))

    def _loop(
        self, one: "Run", state: Tree, shared: Tree, shown: "Sequence[_Unpacked]"
    ) -> tuple[Tensor, ...]:
        members, device = len(next(iter(state.values()))), _first(shown).device
        split = {name: tensor.unbind(0) for name, tensor in state.items()}
        inputs = [_each(x, members) if own else [x] * members for x, own in shown]
        outputs = []
        read = [*(t for x, _ in shown for t in _tensors(x)), *state.values(), *shared.values()]
        with lanes(self.streams, device, read) as side, self._layers(device):
            for i in range(members):
                tensors = {name: parts[i] for name, parts in split.items()}
                with torch.cuda.stream(side[i % len(side)]):
                    outputs.append(one(tensors, shared, *(each[i] for each in inputs)))
        return tuple(torch.stack(each) for each in zip(*outputs, strict=True))

    def _layers(self, device: torch.device) -> AbstractContextManager:
        trained = torch.is_grad_enabled() and not self.compiled
        fused = trained and device.type == "cuda" and self.streams > 1
        return fused_layers() if fused else nullcontext()


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

    Fused attention and compiled networks have no second derivative; some layers have a slow one.
    """
    fast = fast_second_order() if on_gpu else nullcontext()
    with sdpa_kernel(SDPBackend.MATH), fast:
        yield replace(mapping, compiled=False)


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
        loop, (x, own) = MemberRunner("loop"), shown[0]
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


class _Unpacked(NamedTuple):
    """Inputs as `vmap` takes them: one tensor, a list of tensors, or None for an object."""

    x: "Tensor | list[Tensor] | None"
    own: bool


def _unpacked(
    module: nn.Module, shown: Sequence[MemberInputs]
) -> "tuple[Run, Sequence[_Unpacked]]":
    """The call of one member, and inputs that are tensors or lists of tensors."""
    first = shown[0].x
    if isinstance(first, Tensor):
        return functools.partial(_one, module), shown  # type: ignore[return-value]
    if not isinstance(first, Structured):
        return functools.partial(_one_object, module, first), [_Unpacked(None, False)]
    names = list(first.tensors)
    one = functools.partial(_one_structure, module, first, names)
    return one, [_Unpacked([each.x.tensors[n] for n in names], each.own) for each in shown]  # pyright: ignore


def _tensors(x: "Tensor | list[Tensor] | None") -> list[Tensor]:
    return [] if x is None else [x] if isinstance(x, Tensor) else x


def _first(shown: "Sequence[_Unpacked]") -> Tensor:
    found = _tensors(shown[0].x)
    return found[0] if found else torch.empty(0)


def _each(x: "Tensor | list[Tensor] | None", members: int) -> Sequence[Any]:
    """The inputs of each member, from tensors [M, B, ...]."""
    if isinstance(x, Tensor):
        return x.unbind(0)
    return [[tensor[i] for tensor in _tensors(x)] for i in range(members)]


def _one(
    module: nn.Module, own: Tree, shared: Tree, x: Tensor, *part: Tensor
) -> tuple[Tensor, ...]:
    """Outputs [B, C] of one member for the batch, and for the rows if they are given."""
    tensors = shared | own
    if not part:
        return (selected_output(module, functional_call(module, tensors, (x,))),)
    outputs = forward_with_rows(module, tensors, x, *part)
    return tuple(selected_output(module, each) for each in outputs)


def _one_structure(
    module: nn.Module,
    like: Structured,
    names: list[str],
    own: Tree,
    shared: Tree,
    leaves: list[Tensor],
) -> tuple[Tensor, ...]:
    given = Structured(dict(zip(names, leaves, strict=True)), like.form)
    return (selected_output(module, call_network(module, shared | own, given)),)


def _one_object(module: nn.Module, x: Any, own: Tree, shared: Tree, _: None) -> tuple[Tensor, ...]:
    return (selected_output(module, call_network(module, shared | own, x)),)


def _described(x: Inputs, own: bool) -> str:
    if isinstance(x, Tensor):
        return f"inputs of shape {tuple(x.shape[1 + own :])}"
    return f"the inputs {x}"


Run = Callable[..., tuple[Tensor, ...]]
"""Outputs from private tensors, shared tensors and inputs."""


class _Kept(dict):
    """Compiled functions of a module; deleted with the module, and not copied with it."""

    def __deepcopy__(self, memo: dict) -> "_Kept":
        return _Kept()


def _compiled(module: nn.Module, mapping: MemberRunner, case: tuple, run: Run) -> Run:
    kept = module.__dict__.setdefault("_shoal_compiled", _Kept())
    if (mapping, case) not in kept:
        kept[mapping, case] = torch.compile(run, dynamic=False)
    return kept[mapping, case]


def first_line(error: BaseException) -> str:
    """The first line of an exception's message, or its name."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__

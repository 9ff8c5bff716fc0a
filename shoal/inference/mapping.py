"""How members run: all at once, in chunks, or one after another, with the same result."""

import functools
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from shoal.core.errors import ConfigError, DataError, ShoalWarning
from shoal.core.types import Tree
from shoal.inference.second_order import fused_layers
from shoal.inference.streams import lanes

__all__ = ["Mapping", "mapped_or_looped", "parse"]


@dataclass(frozen=True)
class Mapping:
    """A way to run the members of a group.

    Attributes:
        kind: "vmap" runs them together by `torch.func.vmap`, "loop" one after another.
        chunk: how many run together, forward and back, so that only their activations exist at a
            time; None for all. A single forward pass by vmap is cut in the same way.
        streams: on a GPU, how many members of a loop are under way at a time; where there are
            several, layers of networks that are trained run fused.
        compiled: the networks go through `torch.compile`.
    """

    kind: str = "vmap"
    chunk: int | None = None
    streams: int = 1
    compiled: bool = False

    def __call__(self, module: nn.Module, state: Tree, x: Tensor, own_inputs: bool) -> Tensor:
        """Outputs [M, B, C] of `module` with each member's tensors.

        Args:
            module: the skeleton whose parameters and buffers are replaced.
            state: weights and buffers of all members, [M, ...]; buffers are updated in place.
            x: inputs [B, ...] for all members, or [M, B, ...] with `own_inputs`.
            own_inputs: every member has inputs of its own.
        """
        one = functools.partial(_one, module)
        if self.kind == "loop":
            run = _compiled(module, self, own_inputs, one) if self.compiled else one
            return self._loop(run, state, x, own_inputs)
        in_dims = (0, 0 if own_inputs else None)
        run = vmap(one, in_dims=in_dims, randomness="different", chunk_size=self.chunk)
        return (_compiled(module, self, own_inputs, run) if self.compiled else run)(state, x)

    def _loop(
        self, one: Callable[[Tree, Tensor], Tensor], state: Tree, x: Tensor, own_inputs: bool
    ) -> Tensor:
        split = {name: tensor.unbind(0) for name, tensor in state.items()}
        inputs = x.unbind(0) if own_inputs else None
        outputs = []
        read = [x, *state.values()]
        with lanes(self.streams, x.device, read) as side, self._layers(x.device):
            for i in range(len(next(iter(state.values())))):
                tensors = {name: parts[i] for name, parts in split.items()}
                with torch.cuda.stream(side[i % len(side)]):
                    outputs.append(one(tensors, x if inputs is None else inputs[i]))
        return torch.stack(outputs)

    def _layers(self, device: torch.device) -> AbstractContextManager:
        trained = torch.is_grad_enabled() and not self.compiled
        fused = trained and device.type == "cuda" and self.streams > 1
        return fused_layers() if fused else nullcontext()


def parse(engine: str) -> Mapping:
    """The mapping named by "auto", "vmap", "loop" or "chunk:4".

    >>> parse("chunk:4").chunk
    4
    """
    if engine in ("auto", "vmap"):
        return Mapping()
    if engine == "loop":
        return Mapping("loop")
    kind, _, size = engine.partition(":")
    if kind == "chunk" and size.isdecimal() and int(size) > 0:
        return Mapping(chunk=int(size))
    raise ConfigError(
        f"engine is 'auto', 'vmap', 'loop' or 'chunk:SIZE' (as in 'chunk:4'), not '{engine}'"
    )


def mapped_or_looped(
    mapping: Mapping, module: nn.Module, state: Tree, x: Tensor, own_inputs: bool
) -> tuple[Tensor, Mapping]:
    """Outputs, and the mapping that made them: a loop where `vmap` cannot batch the module."""
    before = {name: t.detach().clone() for name, t in state.items() if not t.requires_grad}
    try:
        return mapping(module, state, x, own_inputs), mapping
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        with torch.no_grad():
            for name, tensor in before.items():
                state[name].copy_(tensor)
        loop = Mapping("loop")
        try:
            outputs = loop(module, state, x, own_inputs)
        except Exception as cause:
            if isinstance(cause, DataError):
                raise
            raise DataError(
                f"the network does not take inputs of shape {tuple(x.shape[1 + own_inputs :])}: "
                f"{_first_line(cause)}"
            ) from cause
        if mapping.kind != "loop":
            warnings.warn(
                f"members run one after another, since this network cannot be batched by vmap: "
                f"{_first_line(error)}",
                ShoalWarning,
                stacklevel=2,
            )
        return outputs, loop


def _one(module: nn.Module, tensors: Tree, x: Tensor) -> Tensor:
    """Outputs [B, C] of one member."""
    outputs = functional_call(module, tensors, (x,))
    if not isinstance(outputs, Tensor) or outputs.ndim not in (1, 2):
        shape = tuple(outputs.shape) if isinstance(outputs, Tensor) else type(outputs).__name__
        raise DataError(f"a network must return outputs [B, C] for a batch of B, not {shape}")
    return outputs.unsqueeze(-1) if outputs.ndim == 1 else outputs


Run = Callable[[Tree, Tensor], Tensor]


class _Kept(dict):
    """What was compiled for a module; it lives and dies with the module, and copies have none."""

    def __deepcopy__(self, memo: dict) -> "_Kept":
        return _Kept()


def _compiled(module: nn.Module, mapping: Mapping, own_inputs: bool, run: Run) -> Run:
    kept = module.__dict__.setdefault("_shoal_compiled", _Kept())
    if (mapping, own_inputs) not in kept:
        kept[mapping, own_inputs] = torch.compile(run, dynamic=False)
    return kept[mapping, own_inputs]


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__

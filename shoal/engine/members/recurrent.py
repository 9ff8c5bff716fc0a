r"""Recurrent layers of all members at once: one batched product per time step.

`vmap` has no rule for the fused recurrent kernels of cuDNN, which also have no second derivative.
Here every layer is a loop over time. The inputs of all time steps take one product beforehand,

$$ G_t = W_{ih} x_t + b_{ih}, \quad h_t = cell(G_t, W_{hh} h_{t-1} + b_{hh}, h_{t-1}), $$

and the recurrent product is batched over members. On a GPU the arithmetic of a cell is one kernel,
with members folded into its rows. The cells are those of `nn.RNN`, `nn.LSTM` (Hochreiter &
Schmidhuber, 1997) and `nn.GRU` (Cho et al., 2014).
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shoal.engine.functorch import functorch, unwrapped
from shoal.engine.members.layers import KeyedDropout

__all__ = ["MemberGRU", "MemberLSTM", "MemberRNN", "install_recurrent", "own_recurrence"]

States = tuple[Tensor, ...]
"""The hidden state [M, B, H], and for an LSTM the cell state."""

Cell = Callable[[Tensor, Tensor, States], States]
"""The next states from the gates of the input, the gates of the state and the states."""

_own: ContextVar[bool] = ContextVar("own_recurrence", default=False)


@contextmanager
def own_recurrence() -> Iterator[None]:
    """A block in which recurrent layers run by this file, and can be differentiated twice."""
    before = _own.set(True)
    try:
        yield
    finally:
        _own.reset(before)


class _Weights(NamedTuple):
    """Tensors of one layer in one direction; the biases are None in a layer without."""

    at_input: Tensor
    at_state: Tensor
    bias_input: Tensor | None
    bias_state: Tensor | None


class _Recurrent(nn.RNNBase):
    """A recurrent layer that runs all members of `vmap` at once."""

    def forward(self, input: Any, hx: Any = None) -> Any:
        """Outputs and final states, as `nn.RNNBase` returns them."""
        if not self._takes(input):
            return super().forward(input, hx)
        first = input.transpose(0, 1) if self.batch_first else input
        outputs, states = self._layers(first, self._start(first, hx))
        outputs = outputs.transpose(0, 1) if self.batch_first else outputs
        last = tuple(torch.stack(each) for each in zip(*states, strict=True))
        return outputs, last if isinstance(self, nn.LSTM) else last[0]

    def _takes(self, input: Any) -> bool:
        """Whether the layer runs here: batches of sequences of equal length, without projection."""
        if not isinstance(input, Tensor) or input.ndim != 3 or self.proj_size > 0:
            return False
        if torch.compiler.is_compiling():
            return False
        # On a CPU torch's own LSTM is faster, one member after another.
        pays = input.is_cuda or not isinstance(self, nn.LSTM)
        return _own.get() or (pays and functorch.is_batchedtensor(self.weight_hh_l0))

    def _start(self, x: Tensor, hx: Any) -> list[States]:
        """The first states [B, H] of each layer and direction."""
        count = self.num_layers * (2 if self.bidirectional else 1)
        kinds = 2 if isinstance(self, nn.LSTM) else 1
        if hx is None:
            zeros = x.new_zeros(x.shape[1], self.hidden_size)
            return [(zeros,) * kinds] * count
        states = hx if kinds == 2 else (hx,)
        return list(zip(*(tensor.unbind(0) for tensor in states), strict=True))

    def _layers(self, x: Tensor, start: list[States]) -> tuple[Tensor, list[States]]:
        directions, last, cell = (2 if self.bidirectional else 1), [], _cell(self)
        for layer in range(self.num_layers):
            both = []
            for way in range(directions):
                states = start[layer * directions + way]
                outputs, end = _run(cell, x, states, self._weights(layer, way), way == 1)
                both.append(outputs)
                last.append(end)
            x = both[0] if directions == 1 else torch.cat(both, -1)
            if self.dropout > 0 and self.training and layer < self.num_layers - 1:
                x = self._modules["between"](x)  # pyright: ignore[reportOptionalCall]
        return x, last

    def _weights(self, layer: int, way: int) -> _Weights:
        end = f"l{layer}" + ("_reverse" if way else "")
        names = [f"weight_ih_{end}", f"weight_hh_{end}", f"bias_ih_{end}", f"bias_hh_{end}"]
        return _Weights(*(getattr(self, name, None) for name in names))  # pyright: ignore


class MemberRNN(_Recurrent, nn.RNN):
    """Replaces `nn.RNN` inside an ensemble."""


class MemberLSTM(_Recurrent, nn.LSTM):
    """Replaces `nn.LSTM` inside an ensemble."""


class MemberGRU(_Recurrent, nn.GRU):
    """Replaces `nn.GRU` inside an ensemble."""


_MEMBER_KINDS = {nn.RNN: MemberRNN, nn.LSTM: MemberLSTM, nn.GRU: MemberGRU}


def install_recurrent(module: nn.Module) -> None:
    """Replace the recurrent layers of `module` in place; dropout between layers gets keys."""
    layers = [layer for layer in module.modules() if type(layer) in _MEMBER_KINDS]
    for index, layer in enumerate(layers):
        layer.__class__ = _MEMBER_KINDS[type(layer)]
        if isinstance(layer, nn.RNNBase) and layer.dropout > 0 and layer.num_layers > 1:
            # Far from the numbers of other dropout layers, whose masks stay as they are.
            layer.add_module("between", KeyedDropout(layer.dropout, 1 << 16 | index, None))


def _run(
    cell: Cell, x: Tensor, start: States, weights: _Weights, backwards: bool
) -> tuple[Tensor, States]:
    """Outputs [T, B, H] and final states [B, H] of one layer in one direction."""
    level = functorch.maybe_current_level()
    parts = [unwrapped(tensor, level) for tensor in (x, *start)]
    own = [None if tensor is None else unwrapped(tensor, level) for tensor in weights]
    sizes = {t.shape[at] for t, at in [*parts, *filter(None, own)] if at is not None}
    members = next(iter(sizes), 1)
    inputs, *states = (_leading(*part, members) for part in parts)
    gathered: Any = (None if part is None else _leading(*part, members) for part in own)
    outputs, last = _over_time(cell, inputs, tuple(states), _Weights(*gathered), backwards)
    if not sizes:
        return outputs[:, 0], tuple(state[0] for state in last)
    wrap = functorch._add_batch_dim
    return wrap(outputs, 1, level), tuple(wrap(state, 0, level) for state in last)


def _leading(tensor: Tensor, at: int | None, members: int) -> Tensor:
    """The tensor [M, ...]; one that all members share is not copied."""
    return tensor.expand(members, *tensor.shape) if at is None else tensor.movedim(at, 0)


def _over_time(
    cell: Cell, x: Tensor, states: States, weights: _Weights, backwards: bool
) -> tuple[Tensor, States]:
    """Outputs [T, M, B, H] and final states for inputs [M, T, B, I]."""
    times, rows = x.shape[1:3]
    gates = _product(x.flatten(1, 2), weights.at_input, weights.bias_input)
    # Time first: every step then reads and writes one piece of memory.
    each = list(gates.unflatten(1, (times, rows)).transpose(0, 1).contiguous().unbind(0))
    outputs = []
    for gate in reversed(each) if backwards else each:
        states = cell(gate, _product(states[0], weights.at_state, weights.bias_state), states)
        outputs.append(states[0])
    return torch.stack(outputs[::-1] if backwards else outputs), states


def _product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x W^T + b for each member."""
    return x @ weight.mT if bias is None else torch.baddbmm(bias.unsqueeze(1), x, weight.mT)


def _cell(layer: nn.RNNBase) -> Cell:
    if isinstance(layer, nn.GRU):
        return _gru
    if isinstance(layer, nn.LSTM):
        return _lstm
    return _tanh if getattr(layer, "nonlinearity", "tanh") == "tanh" else _relu


def _tanh(x: Tensor, h: Tensor, states: States) -> States:
    return ((x + h).tanh(),)


def _relu(x: Tensor, h: Tensor, states: States) -> States:
    return (F.relu(x + h),)


def _gru(x: Tensor, h: Tensor, states: States) -> States:
    """h' = (1 - z) n + z h with n = tanh(x_n + r h_n) and the gates r, z = σ(x + h)."""
    if _fused(x):
        return _folded(torch.ops.aten._thnn_fused_gru_cell, x, h, states[0])
    (xr, xz, xn), (hr, hz, hn) = x.chunk(3, -1), h.chunk(3, -1)
    z, n = (xz + hz).sigmoid(), (xn + (xr + hr).sigmoid() * hn).tanh()
    return (n + z * (states[0] - n),)


def _lstm(x: Tensor, h: Tensor, states: States) -> States:
    """c' = f c + i g and h' = o tanh(c'), with g = tanh(x + h) and the gates i, f, o = σ(x + h)."""
    if _fused(x):
        return _folded(torch.ops.aten._thnn_fused_lstm_cell, x, h, states[1])
    i, f, g, o = (x + h).chunk(4, -1)
    c = f.sigmoid() * states[1] + i.sigmoid() * g.tanh()
    return o.sigmoid() * c.tanh(), c


def _folded(kernel: Callable[..., States], *tensors: Tensor) -> States:
    """The states that torch's kernel of a whole cell finds, with members folded into its rows."""
    *outputs, _ = kernel(*(tensor.flatten(0, 1) for tensor in tensors))
    return tuple(tensor.unflatten(0, tensors[0].shape[:2]) for tensor in outputs)


def _fused(x: Tensor) -> bool:
    """Whether torch's kernel of a whole cell runs: on a GPU, and not under another `vmap`."""
    return x.is_cuda and not functorch.is_batchedtensor(x)

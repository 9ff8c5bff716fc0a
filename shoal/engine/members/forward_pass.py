"""Forward passes of all members on a CPU, without gradients and in evaluation mode.

Without gradients `vmap` is not needed. Perceptrons are products of stacked weights
(`shoal.engine.members.perceptron`). Other networks run one after another, as ordinary modules whose
tensors lie in the memory of the stacked tensors, so that no call is slower than a loop over
modules. Few points of many members stay with `vmap`: there the calls of single operations take
longest, and `vmap` makes one where a loop makes M.
"""

from typing import Any

import torch
from torch import Tensor, nn

from shoal.core.structure import Inputs, Structured
from shoal.engine.members.group import Group
from shoal.engine.members.network_call import MemberInputs, kind_of, member_call, set_output
from shoal.engine.members.perceptron import Perceptrons
from shoal.engine.members.stack import filled

__all__ = ["forward_outputs"]

FEW_MEMBERS = 8
"""Most members for which a loop over modules is at least as fast as `vmap` for a single point."""

FEW_POINTS = 128
"""Most points for which products of all members' weights are faster than one product per member."""

MANY_NUMBERS = 1 << 14
"""Numbers in the inputs from which a loop over modules is at least as fast as `vmap`.

Measured on one core with 20 members: a loop takes 0.5 to 1.15 of the time of `vmap` for more
numbers, and up to 3.6 times as long for fewer. The activations of all members of a large batch
leave the cache; those of one member stay in it.
"""


def forward_outputs(group: Group, x: Inputs) -> Tensor | None:
    """Outputs [m, B, ..., C] for inputs that all members share; None if another runner is better.

    A pass that fails gives None as well: the usual pass reports the reason.
    """
    special = group.shared or group.compute or group.shards or group.derivatives is not None
    if special or not isinstance(x, (Tensor, Structured)):
        return None
    kept = group.skeleton.__dict__.setdefault("_shoal_forward", _ForwardPass())
    try:
        x = group.taken(x)
        outputs = kept.outputs(group, x)
    except Exception:
        return None
    if outputs is not None:
        group._seen.add(kind_of(MemberInputs(x, False)))
    return outputs


class _ForwardPass:
    """The members of a group as formulas or as modules; made at the first pass, and not copied."""

    def __init__(self) -> None:
        self.sources: list[tuple[Tensor, int]] = []
        self.perceptrons: Perceptrons | None = None
        self.modules: list[nn.Module] = []
        self.output: Any = None
        self.rebinds = False

    def __reduce__(self) -> tuple:
        return _ForwardPass, ()

    def outputs(self, group: Group, x: Tensor | Structured) -> Tensor | None:
        """See `forward_outputs`."""
        if not self._is_of(group):
            self._make(group)
        formulas, few = self.perceptrons, len(x) <= FEW_POINTS
        if few and formulas is not None and isinstance(x, Tensor) and formulas.takes(x):
            return formulas.forward(group.weights, x).outputs.contiguous()
        many = group.members > FEW_MEMBERS and _numbers(x) < MANY_NUMBERS
        if many or self.rebinds or group.must_loop:
            return None
        if not self.modules:
            return self._first_outputs(group, x)
        return torch.stack([member_call(module, x) for module in self.modules])

    def _is_of(self, group: Group) -> bool:
        """Whether the modules hold the tensors of the group, wherever these were changed."""
        tensors = [*group.weights.values(), *group.buffers.values()]
        return (
            len(tensors) == len(self.sources)
            and self.output == group.skeleton.__dict__.get("_shoal_output")
            and all(
                tensor is source and tensor.data_ptr() == place
                for tensor, (source, place) in zip(tensors, self.sources, strict=True)
            )
        )

    def _make(self, group: Group) -> None:
        tensors = [*group.weights.values(), *group.buffers.values()]
        self.sources = [(tensor, tensor.data_ptr()) for tensor in tensors]
        self.output = group.skeleton.__dict__.get("_shoal_output")
        self.perceptrons, self.modules = Perceptrons.of(group), []

    def _first_outputs(self, group: Group, x: Tensor | Structured) -> Tensor | None:
        """Outputs of new modules; None for networks that replace their tensors in a call.

        Such a tensor would outlive the call in a module. In the usual pass it does not.
        """
        modules = [self._module(group, member) for member in range(group.members)]
        before = [_tensors(module) for module in modules]
        outputs = torch.stack([member_call(module, x) for module in modules])
        after = [_tensors(module) for module in modules]
        self.rebinds = before != after
        if self.rebinds:
            return None
        self.modules = modules
        return outputs

    def _module(self, group: Group, member: int) -> nn.Module:
        """One member as an ordinary module on the memory of the group."""
        tensors = group.weights | group.buffers
        views = {name: tensor.detach()[member] for name, tensor in tensors.items()}
        module = filled(group.prototype, views).eval()
        set_output(module, self.output)
        return module


def _tensors(module: nn.Module) -> list[int]:
    return [id(tensor) for tensor in (*module.parameters(), *module.buffers())]


def _numbers(x: Tensor | Structured) -> int:
    return x.numel() if isinstance(x, Tensor) else sum(t.numel() for t in x.tensors.values())

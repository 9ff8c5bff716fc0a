"""The optimiser of members that live on the host: its states live beside them.

The optimiser of a run belongs to the tensors [M, ...] of the host and never moves them. It holds
learning rate, weight decay and states. An optimiser of the same kind moves one block of members at
a time on the device, with the block's rows of the states.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from shoal.core.types import Tree
from shoal.engine.resources.offload import Offload
from shoal.training.options.optim import make_optimizer, set_learning_rate

__all__ = ["BlockOptimizer"]

_torch: Any = torch


class BlockOptimizer:
    """Moves blocks of members, by the settings and states of a run's optimiser.

    A state in the shape of its weight has a row per member and stays on the host. Any other, such
    as a number of steps, is common to all members: every block of a step begins with its old value.
    """

    def __init__(
        self, whole: torch.optim.Optimizer, spec: Mapping[str, Any], lr: float, offload: Offload
    ) -> None:
        """Prepare the optimiser.

        Args:
            whole: the run's optimiser, of tensors on the host.
            spec: its name and settings.
            lr: its learning rate.
            offload: brings the blocks to the device.
        """
        self.whole, self.spec, self.lr, self.offload = whole, spec, lr, offload
        self.states: dict[Tensor, dict[str, Tensor]] = {}
        self.common: dict[Tensor, dict[str, Any]] = {}
        self._own: dict[tuple[str, ...], torch.optim.Optimizer] = {}

    def begin(self) -> None:
        """Begin a step: later blocks see the states from before it."""
        self.states, self.common = {}, {}
        for weight, state in self.whole.state.items():
            like = {n: t for n, t in state.items() if _is_like(t, weight)}
            self.states[weight] = like
            self.common[weight] = {n: _copied(v) for n, v in state.items() if n not in like}

    def tensors(self, weights: Sequence[Tensor], span: slice) -> list[Tensor]:
        """The states of some members on the host, for the block that is to visit the device."""
        return [state[span] for w in weights for state in self.states.get(w, {}).values()]

    def step(
        self, hosts: Sequence[Tensor], span: slice, weights: Tree, states: Sequence[Tensor]
    ) -> None:
        """Move the weights of a block along their `grad`, and store what has changed.

        Args:
            hosts: the tensors of all members, on the host.
            span: the block's rows of them.
            weights: the block on the device.
            states: copies of `tensors` on the device.
        """
        optimizer, copies = self._optimizer(weights), iter(states)
        group = optimizer.param_groups[0]
        group["params"] = list(weights.values())
        state: dict[Any, Any] = defaultdict(dict)
        for host, weight in zip(hosts, weights.values(), strict=True):
            like = {name: next(copies) for name in self.states.get(host, {})}
            common = {name: _copied(v) for name, v in self.common.get(host, {}).items()}
            if like or common:
                state[weight] = self._placed(common, optimizer, weight) | like
        optimizer.state = state
        optimizer.step()
        for host, weight in zip(hosts, weights.values(), strict=True):
            weight.grad = None
            self.offload.store(host[span], weight)
            for name, value in optimizer.state[weight].items():
                self._keep(host, span, name, value, weight)
        optimizer.state = defaultdict(dict)
        group["params"] = []

    def take_over(self) -> None:
        """Give the states that were loaded to the host's storage."""
        for weight, state in self.whole.state.items():
            for name, value in state.items():
                if _is_like(value, weight) and weight.device.type == "cpu":
                    state[name] = self.offload.stored(value)

    def _optimizer(self, weights: Tree) -> torch.optim.Optimizer:
        case = tuple(weights)
        if case not in self._own:
            self._own[case] = make_optimizer(self.spec, weights, self.lr)
        optimizer = self._own[case]
        ours, theirs = optimizer.param_groups[0], self.whole.param_groups[0]
        set_learning_rate(optimizer, float(theirs["lr"]))
        if "weight_decay" in theirs:
            ours["weight_decay"] = theirs["weight_decay"]
        return optimizer

    def _placed(
        self, common: dict[str, Any], optimizer: torch.optim.Optimizer, weight: Tensor
    ) -> dict[str, Any]:
        on_device = optimizer.defaults.get("fused") or optimizer.defaults.get("capturable")
        if not on_device:
            return common
        return {n: v.to(weight.device) if isinstance(v, Tensor) else v for n, v in common.items()}

    def _keep(self, host: Tensor, span: slice, name: str, value: Any, weight: Tensor) -> None:
        kept = self.whole.state[host]
        if not _is_like(value, weight):
            kept[name] = value
            return
        if name not in kept:
            kept[name] = self.offload.empty(host.shape, value.dtype)
        self.offload.store(kept[name][span], value)


def _is_like(value: Any, weight: Tensor) -> bool:
    return isinstance(value, Tensor) and value.shape == weight.shape


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value

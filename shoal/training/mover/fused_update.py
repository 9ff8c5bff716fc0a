"""The step of torch's optimiser by the kernel that adds a push on weights to the drives.

Weight-space repulsion reads every weight and every drive, and so does the optimiser after it. One
kernel (`engine.kernels.update_kernels`) does both in one pass, with the states of torch's
optimiser, which can go on by itself at any time.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from shoal.core.tree import rows
from shoal.core.types import Tree
from shoal.training.options.optim import kind_of
from shoal.training.step.results import StepInfo
from shoal.training.step.stages import measured

try:
    from shoal.engine.kernels import update_kernels as _kernels
except Exception:  # Triton is missing or does not work
    _kernels = None

__all__ = ["FusedUpdate"]

_KINDS = {torch.optim.SGD: "sgd", torch.optim.Adam: "adam", torch.optim.AdamW: "adamw"}
_REFUSED = ("amsgrad", "differentiable")
_torch: Any = torch
update_kernels: Any = _kernels


class FusedUpdate:
    """Moves the weights of all members by one kernel, where it knows the optimiser.

    Args:
        optimizer: the run's optimiser.
        weights: the trained tensors [M, ...], all that the optimiser has.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, weights: Tree) -> None:
        self.optimizer, self.weights = optimizer, list(weights.values())
        self.kind = _kind(optimizer, self.weights)

    @property
    def known(self) -> bool:
        """Whether the kernel knows the optimiser."""
        return self.kind is not None and update_kernels is not None

    @property
    def ready(self) -> bool:
        """Whether the kernel can take the next step: after the first, which makes the states."""
        if self.kind is None or not self.known:
            return False
        names = _states(self.kind)
        state = self.optimizer.state
        return all(
            isinstance(state[weight].get(name), Tensor) and state[weight][name].is_contiguous()
            for weight in self.weights if names
            for name in names
        )  # fmt: skip

    @torch.no_grad()
    def move(self, drive: Tree, info: StepInfo) -> StepInfo:
        """Move the weights along drives and delayed push; the measures of the whole step."""
        assert self.kind is not None
        info = _moved(drive, info, self._update(self.kind))
        torch.autograd.graph.increment_version(self.weights)
        return info

    @torch.no_grad()
    def launch(self, drive: Tree, info: StepInfo) -> StepInfo:
        """Launch the kernels of all steps, where none is launched: no states need exist."""
        assert self.kind is not None
        update = self._update(self.kind, blank=True)
        if _states(self.kind):  # the first step makes them
            _moved(drive, info, update_kernels.Update.none(update.first, update.rate))
        return _moved(drive, info, update)

    def _update(self, kind: str, blank: bool = False) -> Any:
        """The next step; a blank one has weights for states."""
        group, like = self.optimizer.param_groups[0], self.weights[0].detach()
        rate = update_kernels.scalar(group["lr"], like)
        step, states = rate, [[rows(w.detach()) for w in self.weights]] * 2
        numbers = group.get("momentum", 0.0), group.get("dampening", 0.0), 0.0
        for place, name in enumerate(() if blank else _states(kind)):
            states[place] = [rows(self.optimizer.state[w][name]) for w in self.weights]
        if kind.startswith("adam") and not blank:
            steps: Sequence[Tensor] = [self.optimizer.state[w]["step"] for w in self.weights]
            _torch._foreach_add_(steps, 1)
            step = update_kernels.scalar(steps[0], like)
        if kind.startswith("adam"):
            numbers = (*(math.log(float(beta)) for beta in group["betas"]), group["eps"])
        decay = float(group["weight_decay"])
        first, second = states
        numbers = (*map(float, numbers), decay)
        return update_kernels.Update(kind, rate, step, first, second, numbers)


def _moved(drive: Tree, info: StepInfo, update: Any) -> StepInfo:
    """The measures of a step whose push waited for its update."""
    assert info.delayed is not None
    driven = info.delayed.move(drive, update)
    push, scale = info.delayed.push, abs(info.delayed.scale)
    summary = push.interaction.summary
    measures = measured(driven, push.norms, info.alive, summary, scale)
    return replace(info, measures=measures, delayed=None)


def _kind(optimizer: torch.optim.Optimizer, weights: Sequence[Tensor]) -> str | None:
    """The optimiser's name among `update_kernels.KINDS`; None if it has none."""
    kind, groups = _KINDS.get(kind_of(optimizer)), optimizer.param_groups
    if kind is None or len(groups) != 1 or not groups[0].get("maximize"):
        return None
    group = groups[0]
    whole = [id(weight) for weight in group["params"]] == [id(weight) for weight in weights]
    if not whole or any(group.get(name) for name in _REFUSED):
        return None
    if kind == "adam" and group.get("decoupled_weight_decay"):
        kind = "adamw"
    if kind == "sgd" and group["momentum"]:
        return "nesterov" if group["nesterov"] else "momentum"
    return kind


def _states(kind: str) -> tuple[str, ...]:
    if kind == "sgd":
        return ()
    return ("exp_avg", "exp_avg_sq") if kind.startswith("adam") else ("momentum_buffer",)

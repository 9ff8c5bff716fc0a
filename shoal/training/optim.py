"""Optimisers, velocity clipping, learning rate schedules, and the optimiser state to save.

Every elementwise optimiser of torch treats each member alone.
"""

import functools
import inspect
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from shoal.core.errors import ConfigError
from shoal.core.registry import Registry, nearest
from shoal.core.tree import member_norms, per_member
from shoal.core.types import Tree
from shoal.core.values import came
from shoal.training.torch_optimizers import uncompiled

__all__ = [
    "Cosine",
    "Exponential",
    "FlatThenLinear",
    "LinearDecay",
    "Schedule",
    "Stairs",
    "Steps",
    "check_optimizer",
    "clip_members",
    "flat_state",
    "load_flat_state",
    "make_optimizer",
    "optimizer_table",
    "optimizers",
    "schedules",
    "set_learning_rate",
]

# Shampoo-like, factored or line-search optimisers mix entries of a tensor, hence members.
_ACROSS_MEMBERS = ("Adafactor", "LBFGS", "Muon", "Optimizer", "SparseAdam")


def optimizers() -> list[str]:
    """Names of the elementwise optimisers of torch.

    >>> "adam" in optimizers(), "lbfgs" in optimizers()
    (True, False)
    """
    return sorted(
        name.lower()
        for name, entry in vars(torch.optim).items()
        if isinstance(entry, type)
        and issubclass(entry, torch.optim.Optimizer)
        and name not in _ACROSS_MEMBERS
    )


def optimizer_table(spec: Any) -> Any:
    """The table {"name": ..., settings} of a name, a class of torch or a `functools.partial`.

    >>> optimizer_table(torch.optim.AdamW)
    {'name': 'adamw'}
    >>> optimizer_table(functools.partial(torch.optim.SGD, momentum=0.9))
    {'name': 'sgd', 'momentum': 0.9}
    """
    if isinstance(spec, functools.partial) and not spec.args:
        return optimizer_table(spec.func) | spec.keywords
    if isinstance(spec, type) and issubclass(spec, torch.optim.Optimizer):
        if getattr(torch.optim, spec.__name__, None) is not spec:
            raise ConfigError(
                f"the optimizer '{spec.__name__}' is not one of torch.optim; choose from: "
                f"{', '.join(optimizers())}"
            )
        return {"name": spec.__name__.lower()}
    return {"name": spec} if isinstance(spec, str) else spec


def make_optimizer(
    spec: str | Mapping[str, object], weights: Tree, lr: float
) -> torch.optim.Optimizer:
    """The optimiser named by "adam" or by {"name": "sgd", "momentum": 0.9, "nesterov": True}.

    The optimiser ascends: its gradient is the velocity. It uses torch's fused form where there is
    one. On a GPU the learning rate is a tensor, so that a graph can capture the step.
    """
    settings = {"name": spec} if isinstance(spec, str) else dict(spec)
    name = str(settings.pop("name", ""))
    if name.lower() not in optimizers():
        across = [entry.lower() for entry in _ACROSS_MEMBERS]
        why = "it mixes members" if name.lower() in across else "torch has no such optimizer"
        raise ConfigError(
            f"the optimizer '{name}' cannot be used: {why}; {nearest(name, optimizers())}"
        )
    if not lr > 0:
        raise ConfigError(f"the learning rate must be positive, not {lr}")
    for setting, value in settings.items():
        if isinstance(value, int) and abs(value) >= 2**63:
            raise ConfigError(f"optimizer.{setting} is {came(value)}; take a smaller number")
    kind = next(entry for key, entry in vars(torch.optim).items() if key.lower() == name.lower())
    try:
        tensors, fastest = list(weights.values()), _fastest(kind, weights, lr)
        return uncompiled(kind)(tensors, **fastest, **settings)
    except (TypeError, ValueError, OverflowError) as error:
        raise ConfigError(
            f"the optimizer '{name}' does not take these settings: {error}"
        ) from error


def check_optimizer(spec: str | Mapping[str, object], lr: float) -> None:
    """Refuse what `make_optimizer` cannot make, before the members exist.

    Only torch knows the settings of its optimisers, so torch makes one for a single number.
    """
    make_optimizer(spec, {"": torch.zeros(1, requires_grad=True)}, lr)


def _fastest(kind: type, weights: Tree, lr: float) -> dict[str, Any]:
    known = inspect.signature(kind).parameters
    device = next(iter(weights.values())).device
    settings: dict[str, Any] = {"lr": lr, "maximize": True}
    if "fused" in known:
        settings["fused"] = True
    if device.type == "cuda":
        if "capturable" in known:
            settings["capturable"] = True
        if "fused" in known or "capturable" in known:
            settings["lr"] = torch.tensor(lr, device=device)
    return settings


@torch.no_grad()
def clip_members(
    velocity: Tree,
    limit: float | None,
    spans: Sequence[slice] | None = None,
    shared: Collection[str] = (),
    shared_norms: Callable[[Tree], Tensor] = member_norms,
) -> Tree:
    """Shorten each member's velocity to the norm `limit`, each member by itself.

    The tensors that all members train together (`shared`) are shortened as one more member, whose
    norm `shared_norms` gives.
    """
    if limit is None:
        return velocity
    if shared:
        own = {name: t for name, t in velocity.items() if name not in shared}
        common = {name: velocity[name].unsqueeze(0) for name in shared}
        scale = (limit / shared_norms(common)).clamp(max=1.0)
        clipped = {name: (t * per_member(scale, t))[0] for name, t in common.items()}
        return clip_members(own, limit, spans) | clipped
    scale = (limit / member_norms(velocity, spans)).clamp(max=1.0)
    spans = spans or [slice(None)] * len(velocity)
    return {
        name: t * per_member(scale[span], t)
        for (name, t), span in zip(velocity.items(), spans, strict=True)
    }


schedules = Registry("schedule")


class Schedule(Protocol):
    """A factor of the learning rate for each step."""

    def __call__(self, step: int, steps: int) -> float:
        """Factor at `step` of `steps`."""
        ...


@schedules.register("cosine")
@dataclass(frozen=True)
class Cosine:
    """Half a cosine from 1 to `floor`, after a linear warm-up.

    Attributes:
        floor: factor at the end.
        warmup: share of the steps for the warm-up.
    """

    floor: float = 0.0
    warmup: float = 0.0

    def __call__(self, step: int, steps: int) -> float:
        """(1 + cos πt) / 2."""
        t = step / max(steps, 1)
        if t < self.warmup:
            return (step + 1) / (self.warmup * steps + 1)
        t = (t - self.warmup) / max(1 - self.warmup, 1e-12)
        return self.floor + (1 - self.floor) * 0.5 * (1 + math.cos(math.pi * t))


@schedules.register("linear")
@dataclass(frozen=True)
class LinearDecay:
    """Falls linearly from 1 to `floor`.

    Attributes:
        floor: factor at the end.
    """

    floor: float = 0.0

    def __call__(self, step: int, steps: int) -> float:
        """1 - t."""
        return 1 - (1 - self.floor) * step / max(steps, 1)


@schedules.register("steps")
@dataclass(frozen=True)
class Steps:
    """Falls by `factor` at each of the given shares of training.

    Attributes:
        at: shares of training, in (0, 1).
        factor: factor of each fall.
    """

    at: tuple[float, ...] = (0.5, 0.75)
    factor: float = 0.1

    def __call__(self, step: int, steps: int) -> float:
        """factor ** (falls so far)."""
        return self.factor ** sum(step >= share * steps for share in self.at)


@schedules.register("stairs")
@dataclass(frozen=True)
class Stairs:
    """Falls by `factor` at equal intervals, such as every epoch.

    Attributes:
        flights: number of intervals.
        factor: factor of each fall.
    """

    flights: int = 10
    factor: float = 0.8

    def __post_init__(self) -> None:
        if self.flights < 1 or not self.factor > 0:
            raise ConfigError(
                f"stairs need at least 1 flight and a positive factor, not {self.flights} and "
                f"{self.factor}"
            )

    def __call__(self, step: int, steps: int) -> float:
        """factor ** (flight, from 0)."""
        return self.factor ** (self.flights * step // max(steps, 1))


@schedules.register("exponential")
@dataclass(frozen=True)
class Exponential:
    """Falls to `floor` by the same factor at every step.

    Attributes:
        floor: factor at the end.
    """

    floor: float = 0.01

    def __post_init__(self) -> None:
        if not self.floor > 0:
            raise ConfigError(
                f"the floor of an exponential schedule must be positive, not {self.floor}"
            )

    def __call__(self, step: int, steps: int) -> float:
        """floor ** t."""
        return self.floor ** (step / max(steps, 1))


@schedules.register("flat-then-linear")
@dataclass(frozen=True)
class FlatThenLinear:
    """1 until half of training, then linear to `floor` at nine tenths, then constant.

    Attributes:
        floor: factor at the end.
    """

    floor: float = 0.01

    def __call__(self, step: int, steps: int) -> float:
        """Piecewise linear."""
        t = (step / max(steps, 1) - 0.5) / 0.4
        return 1 - (1 - self.floor) * min(max(t, 0.0), 1.0)


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Set one learning rate for all tensors."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(lr)
        else:
            group["lr"] = lr


def flat_state(optimizer: torch.optim.Optimizer) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The optimiser's state: named tensors, and plain numbers."""
    tensors, numbers = {}, {}
    for index, values in optimizer.state_dict()["state"].items():
        for name, value in values.items():
            (tensors if isinstance(value, Tensor) else numbers)[f"{index}.{name}"] = value
    return tensors, numbers


def load_flat_state(
    optimizer: torch.optim.Optimizer, tensors: dict[str, Tensor], numbers: dict[str, Any]
) -> None:
    """Restore the state that `flat_state` returned."""
    state: dict[int, dict[str, Any]] = {}
    for name, value in {**numbers, **tensors}.items():
        index, _, entry = name.partition(".")
        state.setdefault(int(index), {})[entry] = value
    whole = optimizer.state_dict()
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    for name, tensor in tensors.items():
        if tensor.numel() != 1 and tensor.shape != weights[int(name.partition(".")[0])].shape:
            raise ConfigError(f"the saved optimiser has {name} of shape {tuple(tensor.shape)}")
    try:
        optimizer.load_state_dict({"state": state, "param_groups": whole["param_groups"]})
    except (KeyError, ValueError) as error:
        raise ConfigError(f"the checkpoint has the state of another optimiser: {error}") from error
    # torch converts every state to the type of the weights; the saved type must stay.
    for index, values in state.items():
        own = optimizer.state[weights[index]]
        for name, value in values.items():
            if isinstance(value, Tensor):
                own[name] = value.to(own[name].device)

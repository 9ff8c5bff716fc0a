"""Optimisers, velocity clipping, and the optimiser state to save.

Every elementwise optimiser of torch treats each member alone.
"""

import functools
import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from shoal.core.errors import ConfigError
from shoal.core.registry import nearest
from shoal.core.tree import member_norms, per_member
from shoal.core.types import Tree
from shoal.core.values import describe_value

__all__ = [
    "check_optimizer",
    "clip_members",
    "flat_state",
    "kind_of",
    "load_flat_state",
    "make_optimizer",
    "optimizer_table",
    "optimizers",
    "set_learning_rate",
    "uncompiled",
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
            raise ConfigError(
                f"optimizer.{setting} is {describe_value(value)}; take a smaller number"
            )
    kind = next(entry for key, entry in vars(torch.optim).items() if key.lower() == name.lower())
    try:
        tensors, fastest = list(weights.values()), _fastest(kind, weights, lr)
        return uncompiled(kind)(tensors, **fastest, **settings)
    except (TypeError, ValueError, OverflowError) as error:
        raise ConfigError(
            f"the optimizer '{name}' does not take these settings: {error}"
        ) from error


@functools.cache
def uncompiled(kind: type[torch.optim.Optimizer]) -> Callable[..., torch.optim.Optimizer]:
    """The same optimiser; its methods are those beneath the wrappers for torch's compiler.

    The methods of `torch.optim` import `torch._dynamo`, only to be left out of compiled code. The
    import takes seconds, and a small run trains for less. Nothing here compiles an optimiser.

    >>> optimizer = uncompiled(torch.optim.SGD)([torch.ones(1, requires_grad=True)], lr=0.1)
    >>> kind_of(optimizer) is torch.optim.SGD
    True
    """
    wrapped = ("add_param_group", "zero_grad", "state_dict", "load_state_dict")
    methods: dict[str, Any] = {name: inspect.unwrap(getattr(kind, name)) for name in wrapped}
    methods["step"] = torch.no_grad()(inspect.unwrap(kind.step))
    return type(kind.__name__, (kind,), {"__module__": __name__, **methods})


def kind_of(optimizer: torch.optim.Optimizer) -> type:
    """The class of torch that the optimiser is made from."""
    kind = type(optimizer)
    return kind.__bases__[0] if kind.__module__ == __name__ else kind


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
        private = {name: t for name, t in velocity.items() if name not in shared}
        common = {name: velocity[name].unsqueeze(0) for name in shared}
        scale = (limit / shared_norms(common)).clamp(max=1.0)
        clipped = {name: (t * per_member(scale, t))[0] for name, t in common.items()}
        return clip_members(private, limit, spans) | clipped
    scale = (limit / member_norms(velocity, spans)).clamp(max=1.0)
    spans = spans or [slice(None)] * len(velocity)
    return {
        name: t * per_member(scale[span], t)
        for (name, t), span in zip(velocity.items(), spans, strict=True)
    }


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
        restored = optimizer.state[weights[index]]
        for name, value in values.items():
            if isinstance(value, Tensor):
                restored[name] = value.to(restored[name].device)

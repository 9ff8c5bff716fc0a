"""Schedulers of torch as schedules: torch's own class computes the learning rates.

A scheduler takes one step per training step, as if `scheduler.step()` followed every batch. It acts
on an optimiser for one number, so its learning rates are known before training. Only the learning
rate follows a scheduler; momentum stays as it is. `ReduceLROnPlateau` follows the validation NLL.
"""

import copy
import functools
import inspect
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, TypeGuard

import torch
from torch.optim import lr_scheduler
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from shoal.core.errors import ConfigError
from shoal.core.registry import nearest, unstored_field
from shoal.training.options.schedules import Warming, schedules

__all__ = ["OwnScheduler", "Plateau", "TorchScheduler", "as_schedule", "torch_schedulers"]

_OF_OBJECTS = ("ChainedScheduler", "SequentialLR")
_PROBE = 4
"""Steps that are tried at once, so that wrong settings are refused before training."""


def torch_schedulers() -> list[str]:
    """Names of torch's schedulers that depend on the step alone and can be stored by name."""
    bases = (LRScheduler, ReduceLROnPlateau, lr_scheduler._LRScheduler)
    return sorted(
        name
        for name, entry in vars(lr_scheduler).items()
        if isinstance(entry, type)
        and issubclass(entry, LRScheduler)
        and entry not in bases
        and name not in _OF_OBJECTS
    )


class _Computed(Warming):
    """A schedule whose learning rates a scheduler of torch computes."""

    lr: float

    def after_warmup(self, step: int, steps: int) -> float:
        """Learning rate of the scheduler at this step, divided by that of the run."""
        known = self.__dict__.setdefault("_rates", {})
        if steps not in known:
            known.clear()
            known[steps] = self._computed(steps)
        return known[steps][step] / self.lr

    def _computed(self, steps: int) -> list[float]:
        try:
            with warnings.catch_warnings():  # no optimiser takes the steps in between
                warnings.simplefilter("ignore")
                scheduler = self.made(steps)
                rates = [_rate(scheduler)]
                for _ in range(steps - 1):
                    scheduler.step()
                    rates.append(_rate(scheduler))
        except ConfigError:
            raise
        except Exception as error:  # a class of the user's own may raise anything
            why = str(error).partition(". ")[0].rstrip(".")
            raise ConfigError(
                f"the scheduler {self.name} cannot give {steps} learning rates: {why}"
            ) from error
        return rates

    @property
    def name(self) -> str:
        """The name of the scheduler's class."""
        raise NotImplementedError

    def made(self, steps: int) -> LRScheduler:
        """The scheduler of a run of so many steps, on an optimiser for one number."""
        raise NotImplementedError


def _rate(scheduler: LRScheduler) -> float:
    rates = {float(group["lr"]) for group in scheduler.optimizer.param_groups}
    if len(rates) > 1:
        raise ConfigError(
            "the scheduler has several learning rates, and a run has one for all weights; "
            "make its optimiser for one group of weights"
        )
    return rates.pop()


def _optimizer(lr: float) -> torch.optim.Optimizer:
    return torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=lr)


@schedules.register("torch")
@dataclass(frozen=True)
class TorchScheduler(_Computed):
    """A scheduler of torch.optim.lr_scheduler, which takes one step per training step.

    The number of steps is filled in where a scheduler needs it: `T_max` of CosineAnnealingLR,
    `total_steps` of OneCycleLR. Momentum is not cycled.

    Attributes:
        scheduler: name of its class.
        settings: its arguments.
        lr: learning rate of the run.
    """

    scheduler: str = "CosineAnnealingLR"
    settings: Mapping[str, Any] = field(default_factory=dict)
    lr: float = unstored_field(1e-3)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.scheduler in _OF_OBJECTS:
            raise ConfigError(
                f"{self.scheduler} is made of other schedulers; give the object, made on an "
                f"optimiser with the learning rate of the run"
            )
        if self.scheduler not in torch_schedulers():
            raise ConfigError(
                f"torch has no scheduler '{self.scheduler}' that depends on steps alone; "
                f"{nearest(str(self.scheduler), torch_schedulers())}"
            )
        if self.settings.get("cycle_momentum"):
            raise ConfigError(
                "a schedule changes the learning rate alone; leave cycle_momentum out"
            )
        self._computed(_PROBE)

    @property
    def name(self) -> str:
        """The name of the scheduler's class."""
        return self.scheduler

    def made(self, steps: int) -> LRScheduler:
        """The scheduler of a run of so many steps, on an optimiser for one number."""
        kind = getattr(lr_scheduler, self.scheduler)
        known, given = inspect.signature(kind).parameters, dict(self.settings)
        if "cycle_momentum" in known:
            given["cycle_momentum"] = False
        if self.scheduler == "CosineAnnealingLR":
            given.setdefault("T_max", steps)
        if self.scheduler == "OneCycleLR" and "epochs" not in given:
            given.setdefault("total_steps", steps)
        return kind(_optimizer(self.lr), **given)


@dataclass(frozen=True)
class OwnScheduler(_Computed):
    """A scheduler that a folder cannot store: an object, or one with functions as arguments.

    Attributes:
        make: makes the scheduler on an optimiser for one number.
        title: the name of its class.
        lr: learning rate of the run.
    """

    make: Callable[[torch.optim.Optimizer], LRScheduler]
    title: str
    lr: float = 1e-3

    def __post_init__(self) -> None:
        super().__post_init__()
        self.__dict__["__qualname__"] = self.title  # what the config of a run says of it

    @property
    def name(self) -> str:
        """The name of the scheduler's class."""
        return self.title

    def made(self, steps: int) -> LRScheduler:
        """The scheduler, on its own optimiser or on one for one number."""
        return self.make(_optimizer(self.lr))


@schedules.register("plateau")
@dataclass(frozen=True)
class Plateau:
    """Falls by `factor` after `patience` epochs without a lower validation NLL.

    The arguments and the arithmetic are those of torch's ReduceLROnPlateau.

    Attributes:
        factor: factor of each fall.
        patience: epochs without improvement before a fall.
        threshold: least improvement that counts.
        threshold_mode: "rel" for a share of the best NLL, "abs" for nats.
        cooldown: epochs after a fall that do not count.
        min_lr: smallest learning rate.
        eps: smallest change of the learning rate.
        lr: learning rate of the run.
    """

    factor: float = 0.1
    patience: int = 10
    threshold: float = 1e-4
    threshold_mode: str = "rel"
    cooldown: int = 0
    min_lr: float = 0.0
    eps: float = 1e-8
    lr: float = unstored_field(1e-3)

    def __post_init__(self) -> None:
        try:
            self.follow([])
        except (TypeError, ValueError) as error:
            raise ConfigError(f"a plateau schedule cannot be made: {error}") from error

    def __call__(self, step: int, steps: int) -> float:
        """1; `follow` gives the factor after epochs."""
        return 1.0

    def follow(self, losses: Sequence[float]) -> float:
        """The factor after the validation losses of all epochs so far."""
        given = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "lr"}
        scheduler = ReduceLROnPlateau(_optimizer(self.lr), **given)
        for loss in losses:
            scheduler.step(loss)
        return scheduler.optimizer.param_groups[0]["lr"] / self.lr


def as_schedule(spec: Any, lr: float) -> Any:
    """A schedule for a scheduler of torch: its class, a `functools.partial` of it, or an object.

    Everything else is returned unchanged.

    Args:
        spec: what was given as `schedule`.
        lr: learning rate of the run.
    """
    if isinstance(spec, functools.partial) and _is_scheduler(spec.func):
        if spec.args:
            raise ConfigError(
                "give a scheduler its arguments by name, such as partial(StepLR, step_size=9)"
            )
        return _of_class(spec.func, spec.keywords, lr)
    if isinstance(spec, type) and _is_scheduler(spec):
        return _of_class(spec, {}, lr)
    if isinstance(spec, LRScheduler | ReduceLROnPlateau):
        return _of_object(spec, lr)
    return replace(spec, lr=lr) if isinstance(spec, TorchScheduler | Plateau) else spec


def _is_scheduler(kind: Any) -> TypeGuard[type]:
    return isinstance(kind, type) and issubclass(kind, LRScheduler | ReduceLROnPlateau)


def _of_class(kind: type, settings: Mapping[str, Any], lr: float) -> Any:
    if issubclass(kind, ReduceLROnPlateau):
        return _plateau(settings, lr)
    title = kind.__name__
    stored = getattr(lr_scheduler, title, None) is kind and all(map(_is_plain, settings.values()))
    if stored or title in _OF_OBJECTS:
        given = {name: value for name, value in settings.items() if value is not None}
        return TorchScheduler(title, given, lr=lr)
    found = OwnScheduler(lambda optimizer: kind(optimizer, **settings), title, lr)
    found._computed(_PROBE)
    return found


def _of_object(scheduler: Any, lr: float) -> Any:
    own = scheduler.optimizer.defaults.get("lr")
    if own is None or abs(float(own) - lr) > 1e-12 * lr:
        raise ConfigError(
            f"the scheduler's optimiser has lr={own}, and the run has lr={lr}; give both the same"
        )
    if isinstance(scheduler, ReduceLROnPlateau):
        names = ("factor", "patience", "threshold", "threshold_mode", "cooldown", "eps", "mode")
        given = {name: getattr(scheduler, name) for name in names}
        return _plateau(given | {"min_lr": float(scheduler.min_lrs[0])}, lr)
    found = OwnScheduler(lambda _: copy.deepcopy(scheduler), type(scheduler).__name__, lr)
    found._computed(_PROBE)
    return found


def _plateau(settings: Mapping[str, Any], lr: float) -> Plateau:
    given = dict(settings)
    if given.pop("mode", "min") != "min":
        raise ConfigError("ReduceLROnPlateau follows the validation NLL; leave mode='max' out")
    known = {entry.name for entry in fields(Plateau)} - {"lr"}
    for name in given:
        if name not in known:
            raise ConfigError(f"a plateau schedule has no setting '{name}'; {nearest(name, known)}")
    return Plateau(**given, lr=lr)


def _is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, bool | int | float | str)

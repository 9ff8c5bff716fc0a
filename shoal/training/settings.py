"""Settings: everything that decides how a run goes, resolved from what the user typed."""

import dataclasses
import math
import operator
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from numbers import Real
from typing import Any

import numpy as np

from shoal.core.errors import ConfigError
from shoal.core.registry import Registry
from shoal.core.values import LARGEST, came, fits
from shoal.data import augment as augmentations
from shoal.data.augment import Augmentation
from shoal.inference import likelihoods, priors
from shoal.inference.likelihoods import Likelihood
from shoal.inference.priors import FunctionalPrior, FunctionSpace, GaussianProcess, WeightPrior
from shoal.interaction import methods
from shoal.interaction import repulsion as repulsions
from shoal.interaction.bandwidths import Median
from shoal.interaction.estimators import SSGE
from shoal.interaction.methods import Method
from shoal.interaction.repulsion import Repulsion
from shoal.training import annealing as annealings
from shoal.training.adversarial import Adversarial
from shoal.training.annealing import Annealing
from shoal.training.engine import parse
from shoal.training.optim import Schedule, schedules

__all__ = ["MISSING", "Settings"]

MISSING: Mapping[str, Any] = {"legacy": False, "calibrated": False, "frozen": 0}
"""What is meant by the config of a run that was made before these settings existed."""


@dataclass(frozen=True)
class Settings:
    """Every choice of a run but the data and the network; `fit` documents them."""

    method: Method
    likelihood: Likelihood
    prior: WeightPrior | FunctionalPrior
    optimizer: Mapping[str, Any]
    lr: float
    schedule: Schedule | None
    epochs: int | None
    steps: int | None
    batch_size: int
    temperature: float
    annealing: Annealing | None
    adversarial: Adversarial | None
    augment: Augmentation | None
    clip: float | None
    seed: int
    precision: str | None
    engine: str
    keep_every: int | None = None
    frozen: int = 0

    @classmethod
    def resolve(
        cls,
        method: Any,
        legacy: bool,
        strength: float | None,
        prior: Any,
        calibrated: bool = False,
        **rest: Any,
    ) -> "Settings":
        """From names, tables or objects to objects, with a clear sentence for what is wrong."""
        factor = None if strength is None else _number("strength", strength)
        resolved = _method(method, legacy, calibrated).with_strength(factor)
        prior = _fitting("prior", priors.registry.make(prior), "draw", "score_outputs")
        if resolved.functional_prior and not isinstance(prior, FunctionalPrior):
            prior = _functional(prior, resolved)
        optimizer, likelihood = rest.pop("optimizer"), rest.pop("likelihood")
        table = {"name": optimizer} if isinstance(optimizer, str) else optimizer
        settings = cls(
            method=resolved,
            prior=prior,
            optimizer=dict(_fitting("optimizer", table, "items")),
            likelihood=_fitting("likelihood", likelihoods.registry.make(likelihood), "log_prob"),
            schedule=_optional(schedules, rest.pop("schedule")),
            annealing=_optional(annealings.registry, rest.pop("annealing")),
            augment=_optional(augmentations.registry, rest.pop("augment")),
            adversarial=_adversarial(rest.pop("adversarial")),
            **{name: _PLAIN[name](name, value) for name, value in rest.items()},
        )
        settings._check()
        for key in ("likelihood", "prior", "schedule", "annealing", "adversarial"):
            _in_range(key, getattr(settings, key))
        _in_range("method", settings.method.repulsion)
        return settings

    def _check(self) -> None:
        if self.epochs is not None and self.steps is not None:
            raise ConfigError("give epochs or steps, not both")
        if self.clip is not None and not self.clip > 0:
            raise ConfigError(f"clip must be positive, not {self.clip}")
        if augmentations.is_per_member(self.augment):
            self._check_own_inputs()
        parse(self.engine)

    def _check_own_inputs(self) -> None:
        repulsion = self.method.repulsion
        compared = repulsion is not None and repulsion.space.base != "weights"
        if compared or isinstance(self.prior, FunctionalPrior):
            raise ConfigError(
                "members that see crops of their own cannot be compared by what they make of them; "
                "leave per_member out, or take a method in weight space such as 'kde'"
            )
        if self.adversarial is not None:
            raise ConfigError(
                "adversarial training starts from inputs that members share; leave per_member out"
            )

    def total_steps(self, steps_per_epoch: int) -> int:
        """How many steps the run has."""
        if self.steps is not None:
            return self.steps
        return (20 if self.epochs is None else self.epochs) * steps_per_epoch

    def config(self) -> dict[str, Any]:
        """The table that repeats the run, of plain values."""
        method, repulsion = self.method, self.method.repulsion
        table = {
            "method": _named(method)
            if _is_known(method)
            else _spec(repulsions.registry, repulsion),
            "legacy": method.legacy,
            "calibrated": method.calibrated,
            "strength": None if repulsion is None else repulsion.strength,
            "likelihood": _spec(likelihoods.registry, self.likelihood),
            "prior": _spec(priors.registry, self.prior),
            "optimizer": dict(self.optimizer),
            "lr": self.lr,
            "schedule": _spec(schedules, self.schedule),
            "epochs": self.epochs,
            "steps": self.steps,
            "batch_size": self.batch_size,
            "temperature": self.temperature,
            "annealing": _spec(annealings.registry, self.annealing),
            "adversarial": _spec(_ADVERSARIAL, self.adversarial),
            "augment": _spec(augmentations.registry, self.augment),
            "clip": self.clip,
            "seed": self.seed,
            "precision": self.precision,
            "engine": self.engine,
            "keep_every": self.keep_every,
            "frozen": self.frozen,
        }
        return {name: _plain(value) for name, value in table.items()}


_ADVERSARIAL = Registry("adversarial training")
_ADVERSARIAL.register("fgsm", cite=("goodfellow2015explaining",))(Adversarial)


def _method(method: Any, legacy: bool, calibrated: bool) -> Method:
    if isinstance(method, str):
        return methods.get(method, legacy, calibrated)
    if isinstance(method, Method):
        return method
    if isinstance(method, Mapping) and methods.known(method.get("name")):
        changes = {key: value for key, value in method.items() if key != "name"}
        return methods.changed(methods.get(method["name"], legacy, calibrated), changes)
    if isinstance(method, Mapping):
        method = repulsions.registry.make({"name": "repulsion", **method})
    if isinstance(method, Repulsion):
        return Method("custom", "A composition of the user's own.", method, ())
    raise ConfigError(
        f"method must be a name, a Repulsion or a Method, not {type(method).__name__}; "
        f"choose from: {', '.join(methods.METHODS)}"
    )


def _is_known(method: Method) -> bool:
    """Whether the name is enough to make the method again, but for its strength."""
    if method.name not in methods.METHODS:
        return False
    strength = None if method.repulsion is None else method.repulsion.strength
    known = methods.get(method.name, method.legacy, method.calibrated, **dict(method.settings))
    return method == known.with_strength(strength)


def _named(method: Method) -> str | dict[str, Any]:
    """The name, with what was changed in the space."""
    return {"name": method.name, **dict(method.settings)} if method.settings else method.name


def _functional(prior: WeightPrior, method: Method) -> FunctionalPrior:
    """A Gaussian process, or that of released code: M draws, all pairs, a median a kernel."""
    if method.calibrated:
        return GaussianProcess(prior)
    return FunctionSpace(prior, None, SSGE(share=1.0, eta=0.01), Median(legacy=True), legacy=True)


def _adversarial(spec: Any) -> Adversarial | None:
    if isinstance(spec, Real) and not isinstance(spec, bool):
        return Adversarial(_number("adversarial", spec))
    if isinstance(spec, Mapping):
        spec = {"name": "fgsm", **spec}
    made = None if spec is None else _ADVERSARIAL.make(spec)
    return made if made is None else _fitting("adversarial", made, "epsilon")


def _optional(registry: Registry, spec: Any) -> Any:
    return None if spec is None else _fitting(registry.kind, registry.make(spec), "__call__")


def _plain(value: Any) -> Any:
    """Numbers and lists of Python, from those of any library."""
    if isinstance(value, Mapping):
        return {key: _plain(entry) for key, entry in value.items()}
    value = value.tolist() if hasattr(value, "tolist") else value
    return [_plain(entry) for entry in value] if isinstance(value, (list, tuple)) else value


def _fitting(name: str, value: Any, *signs: str) -> Any:
    """The value itself, if it has one of the attributes by which its kind is known."""
    if not any(hasattr(value, sign) for sign in signs):
        raise ConfigError(f"{name} must be a name or a table of settings, not {value!r}")
    return value


def _spec(registry: Registry, value: object) -> dict[str, Any] | None:
    """The table of a registered object; a user's own function is named, but cannot be repeated."""
    if value is None:
        return None
    try:
        return registry.spec(value)
    except ConfigError:
        return {"custom": getattr(value, "__qualname__", type(value).__qualname__)}


_NO_NUMBERS = (str, bytes, bool, np.bool_)
"""What float() would take for a number."""


def _number(name: str, value: Any) -> float:
    """A plain finite number, of whatever library it came from."""
    number = math.nan
    with suppress(TypeError, ValueError, RuntimeError, OverflowError):
        number = math.nan if isinstance(value, _NO_NUMBERS) else float(value)
    if not math.isfinite(number):
        raise ConfigError(f"{name} must be a finite number, not {came(value)}")
    if abs(number) > LARGEST:
        raise ConfigError(f"{name} must be a number up to {LARGEST:g} in size, not {number:g}")
    return number


def _whole(name: str, value: Any) -> int:
    """A plain positive whole number."""
    with suppress(TypeError):
        if not isinstance(value, bool) and 0 < (number := operator.index(value)) < 2**63:
            return number
    raise ConfigError(f"{name} must be a whole number from 1 on, not {came(value)}")


def _seed(name: str, value: Any) -> int:
    with suppress(TypeError):
        if -(2**63) <= (number := operator.index(value)) < 2**63:
            return number
    raise ConfigError(f"{name} must be a whole number that fits in 64 bits, not {came(value)}")


def _in_range(key: str, made: Any) -> Any:
    """The thing itself, if its numbers are none that arithmetic would overflow with."""
    if not dataclasses.is_dataclass(made) or isinstance(made, type):
        return made
    for field in dataclasses.fields(made):
        value, name = getattr(made, field.name), f"{key}.{field.name}"
        if isinstance(value, (int, float)) and not fits(value, type(value)):
            raise ConfigError(
                f"{name} is {came(value)}, but its size must lie between 1e-15 and 1e15"
            )
        _in_range(name, value)
    return made


def _or_none(check: Callable[[str, Any], Any]) -> Callable[[str, Any], Any]:
    return lambda name, value: None if value is None else check(name, value)


_PLAIN: dict[str, Callable[[str, Any], Any]] = {
    "lr": _number,
    "epochs": _or_none(_whole),
    "steps": _or_none(_whole),
    "batch_size": _whole,
    "temperature": _number,
    "clip": _or_none(_number),
    "seed": _seed,
    "precision": lambda _, value: value,
    "engine": lambda _, value: str(value),
    "keep_every": _or_none(_whole),
    "frozen": lambda name, value: 0 if value == 0 else _whole(name, value),
}

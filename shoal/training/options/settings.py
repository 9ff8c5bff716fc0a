"""Settings: the options of a run, and the objects that the options describe."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from numbers import Real
from typing import Any

import torch

from shoal.core.arguments import number
from shoal.core.errors import ConfigError
from shoal.core.registry import Registry
from shoal.core.values import describe_value, fits
from shoal.data.batches import augment as augmentations
from shoal.data.batches.augment import Augmentation
from shoal.engine.kernels.small_matrices import waits_for_host
from shoal.engine.resources.plan import parse_engine
from shoal.inference import likelihoods, priors
from shoal.inference.likelihoods import Likelihood
from shoal.inference.priors import FunctionalPrior, FunctionSpace, GaussianProcess, WeightPrior
from shoal.interaction import methods, points
from shoal.interaction import repulsion as repulsions
from shoal.interaction.bandwidths import Median
from shoal.interaction.estimators import SSGE, needs_eigenpairs
from shoal.interaction.flows import Stein, Wasserstein
from shoal.interaction.methods import Method
from shoal.interaction.repulsion import Repulsion
from shoal.interaction.spaces import InputGradients
from shoal.training.options import annealing as annealings
from shoal.training.options.adversarial import Adversarial
from shoal.training.options.annealing import Annealing, multiplies_push
from shoal.training.options.noise import check_noise
from shoal.training.options.optim import check_optimizer, optimizer_table
from shoal.training.options.options import AUTO, KEPT, Options
from shoal.training.options.schedules import Schedule, schedules
from shoal.training.options.torch_schedules import Plateau, as_schedule

__all__ = ["REGISTRIES", "Settings", "spec_of"]

COMMON_SHARE = 0.25
"""Share of own batches that members have in common, if their outputs are compared there."""


def made_by(registry: Registry, *signs: str, optional: bool = False) -> Any:
    """A field whose object a registry makes from the option of the same name.

    Args:
        registry: makes the objects.
        signs: attributes; a valid object has at least one of them.
        optional: the value may be None.
    """
    return field(metadata={"registry": registry, "signs": signs, "optional": optional})


adversaries = Registry("adversarial training")
adversaries.register("fgsm", cite=("goodfellow2015explaining",))(Adversarial)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """All settings of a run except data and network: options, and the objects they describe.

    Attributes:
        options: the plain values; `Options` explains each.
        method: the method with its strength.
        optimizer: a table with the optimiser's name and settings.
    """

    options: Options
    method: Method
    optimizer: Mapping[str, Any]
    likelihood: Likelihood = made_by(likelihoods.registry, "about")
    prior: WeightPrior | FunctionalPrior = made_by(priors.registry, "draw", "score_outputs")
    schedule: Schedule | None = made_by(schedules, "__call__", optional=True)
    annealing: Annealing | None = made_by(annealings.registry, "__call__", optional=True)
    adversarial: Adversarial | None = made_by(adversaries, "epsilon", optional=True)
    augment: Augmentation | None = made_by(augmentations.registry, "__call__", optional=True)

    @classmethod
    def resolve(cls, options: Options) -> "Settings":
        """Settings from options; raises `ConfigError` for options that do not fit together."""
        strength = options.strength
        auto = isinstance(options.method, str) and options.method == AUTO
        if auto or isinstance(strength, str):
            raise ConfigError(
                "'auto' needs data to choose on, which only fit has; name a method and a strength"
            )
        method = _method(options.method, options.legacy, options.calibrated)
        if method.repulsion is None and strength:
            raise ConfigError(
                f"method '{method.name}' repels nothing, so strength={strength:g} would do "
                f"nothing; name a method that repels, such as 'f-kde', or leave strength out"
            )
        method = method.with_strength(strength)
        specs = {name: getattr(options, name) for name in REGISTRIES}
        specs["schedule"] = as_schedule(specs["schedule"], options.lr)
        made = {name: _made(name, value) for name, value in specs.items()}
        made["schedule"] = as_schedule(made["schedule"], options.lr)
        if method.functional_prior and not isinstance(made["prior"], FunctionalPrior):
            made["prior"] = _functional(made["prior"], method)
        if method.legacy and method.functional_prior and made["adversarial"] is not None:
            made["adversarial"] = replace(made["adversarial"], shared=True, joined=True)
        if method.legacy and hasattr(made["annealing"], "legacy"):
            made["annealing"] = replace(made["annealing"], legacy=True)
        table = optimizer_table(options.optimizer)
        optimizer = dict(_fitting("optimizer", table, "items"))
        settings = cls(options=options, method=method, optimizer=optimizer, **made)
        settings._check()
        for key in ("likelihood", "prior", "schedule", "annealing", "adversarial"):
            _in_range(key, getattr(settings, key))
        _in_range("method", settings.method.repulsion)
        return settings

    def _check(self) -> None:
        parse_engine(self.options.engine)
        check_optimizer(self.optimizer, self.options.lr)
        check_noise(self.options.noise, self.optimizer, self.options.temperature)
        measured = self.options.validation is not None or self.options.folds is not None
        if isinstance(self.schedule, Plateau) and not measured:
            raise ConfigError(
                "a plateau schedule follows the validation NLL; give validation=0.1, which holds "
                "out a tenth of the training data"
            )
        if multiplies_push(self.annealing) and self.method.repulsion is None:
            raise ConfigError(
                f"method '{self.method.name}' repels nothing, so annealing of the push would do "
                f"nothing; name a method that repels, such as 'f-kde', or leave of='push' out"
            )
        if augmentations.is_per_member(self.augment):
            self._check_own_inputs()
        if self.options.batches == "own" and (what := self.needs_common_batches) is not None:
            raise ConfigError(f"{what} needs batches that members share; type batches='common'")
        if self.options.folds is not None and self.common_points:
            raise ConfigError(
                f"'{self.method.name}' compares outputs at points that all members train on, and "
                f"with folds there are none; name points, as "
                f"method={{'name': '{self.method.name}', 'points': 'mixup'}}"
            )
        if self.options.frozen:
            self._check_frozen()

    @property
    def compares_outputs(self) -> bool:
        """Whether repulsion or prior needs the outputs of all members at common inputs."""
        repulsion = self.method.repulsion
        compared = repulsion is not None and repulsion.space.base != "weights"
        return compared or isinstance(self.prior, FunctionalPrior)

    @property
    def compares_at_first(self) -> bool:
        """Whether inputs of the first member decide where members are compared.

        Points are drawn from them, and frozen members, which have no inputs, are seen at them.
        """
        repulsion, options = self.method.repulsion, self.options
        own = augmentations.is_per_member(self.augment) or options.batches == "own"
        if not own or repulsion is None or repulsion.space.base == "weights":
            return False
        frozen = options.frozen > 0 and not self.common_points
        return frozen or not isinstance(repulsion.points, points.Batch)

    @property
    def needs_common_batches(self) -> str | None:
        """What cannot be with own batches, not even at points of the method; None if all can."""
        repulsion = self.method.repulsion
        mixes = repulsion is not None and isinstance(repulsion.flow, Stein)
        reasons = {
            "a prior on functions": isinstance(self.prior, FunctionalPrior),
            "adversarial training": self.adversarial is not None,
            f"'{self.method.name}'": mixes and self.compares_outputs,
            "a Stein flow beside frozen members": mixes and self.options.frozen > 0,
        }
        return next((what for what, needed in reasons.items() if needed), None)

    @property
    def common_points(self) -> int:
        """Points that own batches have in common: where outputs are compared, if not elsewhere."""
        if self.options.batches != "own" or not self.compares_outputs_here:
            return 0
        return math.ceil(COMMON_SHARE * self.options.batch_size)

    @property
    def compares_outputs_here(self) -> bool:
        """Whether outputs repel each other at the batch, and not at points of the method."""
        repulsion = self.method.repulsion
        if repulsion is None or repulsion.space.base != "outputs":
            return False
        return isinstance(repulsion.points, points.Batch)

    def _check_own_inputs(self) -> None:
        if self.compares_outputs:
            raise ConfigError(
                "with per_member crops the outputs of members cannot be compared; "
                "leave per_member out, or choose a weight-space method such as 'kde'"
            )
        if self.adversarial is not None:
            raise ConfigError(
                "adversarial training needs inputs that members share; leave per_member out"
            )

    def _check_frozen(self) -> None:
        repulsion = self.method.repulsion
        if repulsion is None or not isinstance(repulsion.flow, Stein):
            return
        if self.adversarial is not None:
            raise ConfigError(
                "adversarial training has no driving forces of frozen members, which a Stein flow "
                "needs; grow with a Wasserstein flow such as 'f-kde'"
            )
        if augmentations.is_per_member(self.augment):
            raise ConfigError(
                "frozen members have no per_member crops, but a Stein flow needs their driving "
                "forces; leave per_member out, or grow with a Wasserstein flow"
            )

    def total_steps(self, steps_per_epoch: int) -> int:
        """Number of steps of the run."""
        if self.options.steps is not None:
            return self.options.steps
        return (self.options.epochs or 20) * steps_per_epoch

    def waits_for_host(self, members: int, device: torch.device, dtype: torch.dtype) -> bool:
        """Whether a step waits for the host; such a step cannot be captured in a graph."""
        repulsion, prior = self.method.repulsion, self.prior
        sizes: list[int] = []
        if isinstance(prior, FunctionSpace) and needs_eigenpairs(prior.estimator):
            sizes.append(prior.draws or members)
        flow = None if repulsion is None else repulsion.flow
        if isinstance(flow, Wasserstein) and needs_eigenpairs(flow.estimator):
            sizes.append(members)
        return any(waits_for_host(device, dtype, size) for size in sizes)

    def config(self) -> dict[str, Any]:
        """Plain values that repeat the run."""
        made: dict[str, Any] = {
            name: spec_of(entry, getattr(self, name)) for name, entry in REGISTRIES.items()
        }
        made |= {"optimizer": dict(self.optimizer), **_told(self.method)}
        made["validation"] = _told_data(self.options.validation)
        options = self.options
        return {n: _plain(made[n] if n in made else getattr(options, n)) for n in KEPT}


_MADE = {entry.name: entry.metadata for entry in fields(Settings) if entry.metadata}

REGISTRIES: Mapping[str, Registry] = {name: how["registry"] for name, how in _MADE.items()}
"""The registry of each option that names an object."""


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


def _told(method: Method) -> dict[str, Any]:
    """The options that reproduce the method."""
    repulsion = method.repulsion
    return {
        "method": _named(method) if _is_known(method) else spec_of(repulsions.registry, repulsion),
        "legacy": method.legacy,
        "calibrated": method.calibrated,
        "strength": None if repulsion is None else repulsion.strength,
    }


def _told_data(validation: Any) -> float | dict[str, str] | None:
    """The share of validation data; of own data, only the name."""
    if validation is None or isinstance(validation, float):
        return validation
    return {"custom": getattr(validation, "name", None) or "own data"}


def _is_known(method: Method) -> bool:
    """Whether name and strength reproduce the method."""
    if method.name not in methods.METHODS:
        return False
    strength = None if method.repulsion is None else method.repulsion.strength
    known = methods.get(method.name, method.legacy, method.calibrated, **dict(method.settings))
    return method == known.with_strength(strength)


def _named(method: Method) -> str | dict[str, Any]:
    """The name, with the changed settings of the space."""
    settings = dict(method.settings)
    if "fraction" in settings and not settings.get("own_statistics"):
        settings.setdefault("coupled", InputGradients.coupled)  # see `stored_method`
    if "points" in settings:
        settings["points"] = spec_of(points.registry, settings["points"])
    return {"name": method.name, **settings} if settings else method.name


def _functional(prior: WeightPrior, method: Method) -> FunctionalPrior:
    """A Gaussian process; legacy: the released code's M draws, all pairs, one median per kernel."""
    if method.calibrated:
        return GaussianProcess(prior)
    return FunctionSpace(prior, None, SSGE(share=1.0, eta=0.01), Median(legacy=True), legacy=True)


def _made(name: str, spec: Any) -> Any:
    """The object that an option describes; None for an optional option that is not given."""
    if spec is None and _MADE[name]["optional"]:
        return None
    if name == "adversarial" and isinstance(spec, Real) and not isinstance(spec, bool):
        return Adversarial(number(name, spec))
    if name == "adversarial" and isinstance(spec, Mapping):
        spec = {"name": "fgsm", **spec}
    try:
        made = REGISTRIES[name].make(spec)
    except ConfigError as error:
        if isinstance(spec, Mapping) and str(error).partition(" ")[0] in spec:
            raise ConfigError(f"{name}.{error}") from None  # a setting is named with its table
        raise
    return _fitting(name, made, *_MADE[name]["signs"])


def _plain(value: Any) -> Any:
    """Python numbers and lists, from those of any library."""
    if isinstance(value, Mapping):
        return {key: _plain(entry) for key, entry in value.items()}
    value = value.tolist() if hasattr(value, "tolist") else value
    return [_plain(entry) for entry in value] if isinstance(value, (list, tuple)) else value


def _fitting(name: str, value: Any, *signs: str) -> Any:
    """The value itself, if it has one of the required attributes."""
    if not any(hasattr(value, sign) for sign in signs):
        came = describe_value(value)
        raise ConfigError(f"{name} must be a name or a table of settings, not {came}")
    return value


def spec_of(registry: Registry, value: object) -> dict[str, Any] | None:
    """The table of a registered object; for a user's own function, only its name."""
    if value is None:
        return None
    try:
        return registry.spec(value)
    except ConfigError:
        return {"custom": getattr(value, "__qualname__", type(value).__qualname__)}


def _in_range(key: str, made: Any) -> Any:
    """The object itself, if its numbers cannot overflow."""
    if not is_dataclass(made) or isinstance(made, type):
        return made
    for entry in fields(made):
        value, name = getattr(made, entry.name), f"{key}.{entry.name}"
        if isinstance(value, (int, float)) and not fits(value, type(value)):
            raise ConfigError(
                f"{name} is {describe_value(value)}, but its size must lie between 1e-15 and 1e15"
            )
        _in_range(name, value)
    return made

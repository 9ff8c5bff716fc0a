"""Options: all that `fit` can be told of a run, in one list.

An option is one field here (name, type, default, sentence, check), one argument of `fit`, and the
code that uses it. Config files, changes typed as key=value, `shoal fit --help`, the config that a
run remembers and what a resumed run is compared with are made from this list. Nothing here loads
torch, so that help and mistakes are answered at once.
"""

import dataclasses
import math
import operator
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from shoal.core.errors import ConfigError
from shoal.core.values import LARGEST, came

__all__ = ["DEFAULTS", "EXCLUDES", "KEPT", "NAMES", "Options", "Spec", "number", "option"]

Spec = str | dict[str, Any]
"""What a file can say of an object: its name, or a table with its name and settings."""

Check = Callable[[str, Any], Any]
"""The value as it is used, from the option's name and what was given; raises `ConfigError`."""


def option(
    default: Any,
    doc: str,
    check: Check | None = None,
    *,
    kept: bool = True,
    excludes: str | None = None,
) -> Any:
    """A field that people can set.

    Args:
        default: its value where nobody sets it; None, if it is the default, is never checked.
        doc: what `fit` and `--help` say of it.
        check: refuses values that no run could use.
        kept: it decides what comes out, so that a run remembers it.
        excludes: the option that cannot be given with it.
    """
    told = {"doc": doc, "check": check, "kept": kept, "excludes": excludes}
    return dataclasses.field(default=default, metadata=told)


def flag(name: str, value: Any) -> bool:
    """True or false, of whatever library it came from."""
    if _is_truth(value):
        return bool(value)
    raise ConfigError(f"{name} must be True or False, not {came(value)}")


def number(name: str, value: Any) -> float:
    """A plain finite number, of whatever library it came from."""
    found = math.nan
    with suppress(TypeError, ValueError, RuntimeError, OverflowError):
        found = math.nan if _is_truth(value) or isinstance(value, str | bytes) else float(value)
    if not math.isfinite(found):
        raise ConfigError(f"{name} must be a finite number, not {came(value)}")
    if abs(found) > LARGEST:
        raise ConfigError(f"{name} must be a number up to {LARGEST:g} in size, not {found:g}")
    return found


def positive(name: str, value: Any) -> float:
    """A number above zero."""
    if (found := number(name, value)) > 0:
        return found
    raise ConfigError(f"{name} must be positive, not {came(value)}")


def not_negative(name: str, value: Any) -> float:
    """A number from zero on."""
    if (found := number(name, value)) >= 0:
        return found
    raise ConfigError(f"{name} must be zero or positive, not {came(value)}")


def seconds(name: str, value: Any) -> float:
    """A time from zero on, which may be infinite."""
    with suppress(TypeError, ValueError, RuntimeError, OverflowError):
        if not (_is_truth(value) or isinstance(value, str | bytes)) and float(value) >= 0:
            return float(value)
    raise ConfigError(f"{name} must be a number of seconds from 0 on, not {came(value)}")


def whole(name: str, value: Any) -> int:
    """A plain positive whole number."""
    return _index(name, value, 1, "from 1 on")


def whole_or_zero(name: str, value: Any) -> int:
    """A plain whole number from zero on."""
    return _index(name, value, 0, "from 0 on")


def whole_64_bits(name: str, value: Any) -> int:
    """A whole number that a generator can start from."""
    return _index(name, value, -(2**63), "that fits in 64 bits")


def text(name: str, value: Any) -> str:
    """The value as text."""
    return str(value)


def _is_truth(value: Any) -> bool:
    return type(value).__name__ in ("bool", "bool_")  # Python's, or that of numpy


def _index(name: str, value: Any, least: int, words: str) -> int:
    with suppress(TypeError):
        if not _is_truth(value) and least <= (found := operator.index(value)) < 2**63:
            return found
    raise ConfigError(f"{name} must be a whole number {words}, not {came(value)}")


@dataclass(frozen=True, kw_only=True)
class Options:
    """What `fit` can be told but the members, the data and where the run is kept.

    The types are those of a config file. From Python a field may also hold the object that a name
    or a table stands for, and a number may be of any library.

    >>> Options(lr=1).lr, Options(steps=5).epochs
    (1.0, None)
    """

    method: Spec = option(
        "f-kde", "a name from `shoal list methods`, or a `Repulsion` of your own."
    )
    legacy: bool = option(False, "the method as published, with its known faults.", flag)
    calibrated: bool = option(
        False, "the method with a push of the size that the posterior asks for.", flag
    )
    strength: float | None = option(None, "factor of the repulsion.", number)
    likelihood: Spec | None = option(
        None,
        "by default Categorical for whole-number targets; for real ones a Gaussian that "
        "standardises the targets and learns its noise, one for each column, or one for each "
        "input when the network has two outputs for each target.",
    )
    prior: Spec = option("gaussian", "on the weights, or on the outputs.")
    optimizer: Spec = option(
        "adam",
        'any elementwise optimiser of torch: its name, its class, or {"name": ..., settings}.',
    )
    lr: float = option(1e-3, "learning rate.", positive)
    schedule: Spec | None = option(None, 'of the learning rate, as "cosine".')
    epochs: int | None = option(
        None, "how often to go through the data (20), or `steps` instead.", whole, excludes="steps"
    )
    steps: int | None = option(None, "number of batches to train on.", whole, excludes="epochs")
    batch_size: int = option(128, "points in a batch; the same batch for every member.", whole)
    temperature: float = option(1.0, "T; 0 is the plain ensemble, 1 the posterior.", not_negative)
    annealing: Spec | None = option(None, 'of the drive, as "linear".')
    adversarial: float | dict[str, Any] | None = option(
        None, "size of adversarial perturbations, or an `Adversarial`."
    )
    augment: Spec | None = option(None, '"crop-flip", or a function of (x, key).')
    clip: float | None = option(None, "longest velocity of a member.", positive)
    seed: int = option(0, "decides everything that is random.", whole_64_bits)
    device: str | None = option(
        None, "where to train; by default where the ensemble is.", kept=False
    )
    precision: str | None = option(
        None,
        '"float32", "float64", or "tf32", or "bfloat16" for the networks with weights, distances '
        "and states in float32; by default the ensemble's.",
    )
    engine: str = option(
        "auto",
        '"auto", "vmap", "chunk:SIZE" or "loop": how members run, never what they do.',
        text,
    )
    save_every: float = option(
        30.0, "seconds between checkpoints; 0 saves after every step.", seconds, kept=False
    )
    keep_every: int | None = option(
        None,
        "epochs between snapshots of the members along training, which `shoal landscape` looks "
        "at; they stay in `out`, thinned to at most 60. None keeps none.",
        whole,
    )
    frozen: int = option(
        0,
        "how many of the first members are already trained: they repel the others and stay where "
        "they are; see `shoal.grow`.",
        whole_or_zero,
    )

    def __post_init__(self) -> None:
        for entry in dataclasses.fields(self):
            value, check = getattr(self, entry.name), entry.metadata.get("check")
            if check is not None and not (value is None and entry.default is None):
                object.__setattr__(self, entry.name, check(entry.name, value))
        for name, other in EXCLUDES.items():
            if getattr(self, name) is not None and getattr(self, other) is not None:
                raise ConfigError(f"give {name} or {other}, not both")

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> "Options":
        """Those that are among the given names; the others have their defaults."""
        return cls(**{name: given[name] for name in NAMES if name in given})


_FIELDS = dataclasses.fields(Options)

NAMES = tuple(entry.name for entry in _FIELDS)
"""Every option."""

KEPT = tuple(entry.name for entry in _FIELDS if entry.metadata["kept"])
"""The options that a run remembers, in the order of its config."""

DEFAULTS: Mapping[str, Any] = {e.name: e.default for e in _FIELDS if e.name in KEPT}
"""What is meant by the config of a run that was made before an option existed, or left it open."""

EXCLUDES: Mapping[str, str] = {
    entry.name: entry.metadata["excludes"] for entry in _FIELDS if entry.metadata["excludes"]
}
"""Options that cannot be given together."""

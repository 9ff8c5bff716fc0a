"""Options: one list of all options of a training run.

An option is one row of `Options`: name, type of a config file, default, sentence and check. The
row defines config files, changes typed as key=value, `shoal fit --help` and `help(shoal.fit)`. It
also defines the config that a run stores, which a resumed run must match. `FitOptions` and the
tables beside it repeat names with the types of Python, since editors read types only from a class.
This file does not load torch, so help and error messages appear at once.
"""

import dataclasses
import inspect
import re
import textwrap
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypedDict

from shoal.core.arguments import (
    Check,
    factor_or_none,
    flag,
    not_negative,
    number,
    one_of,
    positive,
    seconds,
    text,
    whole,
    whole_64_bits,
    whole_from,
    whole_or_zero,
)
from shoal.core.errors import ConfigError, ShoalWarning
from shoal.core.registry import nearest
from shoal.core.values import describe_value

if TYPE_CHECKING:
    import torch

    from shoal.inference.likelihoods import Likelihood
    from shoal.inference.priors import FunctionalPrior, WeightPrior
    from shoal.interaction.methods import Method
    from shoal.interaction.repulsion import Repulsion
    from shoal.training.options.adversarial import Adversarial

__all__ = [
    "AUTO",
    "DEFAULTS",
    "DEFAULT_METHOD",
    "EXCLUDES",
    "KEPT",
    "NAMES",
    "RETIRED",
    "FitOptions",
    "Options",
    "RunOptions",
    "Spec",
    "StepOptions",
    "accepted",
    "described",
    "option",
    "stored_method",
    "warn_retired",
]

AUTO = "auto"
"""The value of an option that a search chooses."""

DEFAULT_METHOD = "ensemble"
"""The method of `fit` if none is given."""

Spec = str | dict[str, Any]
"""How a file describes an object: its name, or a table with its name and settings."""


# Checks of options that no other function has.


def strength_or_auto(name: str, value: Any) -> float | str:
    """A number from zero on, or "auto"."""
    if isinstance(value, str):
        if value == AUTO:
            return value
        raise ConfigError(f"{name} must be a finite number or 'auto', not {describe_value(value)}")
    return not_negative(name, value)


def process_grid(name: str, value: Any) -> str:
    """Processes along members x along data, such as "2x2"."""
    if isinstance(value, str) and re.fullmatch(r"[1-9]\d{0,6}x[1-9]\d{0,6}", value):
        return value
    raise ConfigError(f'{name} must be members x data, such as "2x2", not {describe_value(value)}')


_UNITS = {
    **{f"{letter}b": 1000**power for power, letter in enumerate("kmgt", 1)},
    **{f"{letter}ib": 1024**power for power, letter in enumerate("kmgt", 1)},
}
_SIZE = re.compile(r"(\d+(?:\.\d+)?|\.\d+)\s*([kmgt]i?b)", re.IGNORECASE)


def memory_size(name: str, value: Any) -> int | float | str:
    """Bytes, from a size such as "8GiB" or a whole number; a share of the device up to 1.0; "auto".

    >>> memory_size("memory", "8GiB"), memory_size("memory", "800 MB"), memory_size("memory", 0.5)
    (8589934592, 800000000, 0.5)
    """
    if isinstance(value, str) and value.strip() == "auto":
        return "auto"
    typed = _SIZE.fullmatch(value.strip()) if isinstance(value, str) else None
    if typed is not None:
        amount = float(typed[1]) * _UNITS[typed[2].lower()]
        if 1 <= amount < 2**63:
            return int(amount)
    elif not isinstance(value, str):
        with suppress(ConfigError):
            return whole(name, value)
        with suppress(ConfigError):
            if 0 < (amount := number(name, value)) <= 1:
                return amount
            if amount > 1 and amount.is_integer():
                return int(amount)
    raise ConfigError(
        f'{name} must be a size such as "8GiB" or "800MB", a number of bytes, a share of the '
        f'device such as 0.5, or "auto", not {describe_value(value)}'
    )


def output_name(name: str, value: Any) -> str | int:
    """The name or the position of an output."""
    return value if isinstance(value, str) else whole_or_zero(name, value)


def share_or_data(name: str, value: Any) -> Any:
    """A share of the training data between 0 and 1, or data."""
    if _is_data(value):
        return value
    with suppress(ConfigError):
        if 0 < (share := number(name, value)) < 1:
            return share
    raise ConfigError(
        f"{name} must be a share of the data such as 0.1, a pair (x, y), a Dataset or a loader, "
        f"not {describe_value(value)}"
    )


def _is_data(value: Any) -> bool:
    """Whether a value may be data; `fit` finds out whether it is."""
    if isinstance(value, Mapping):
        return bool(value) and "custom" not in value
    if isinstance(value, str | bytes) or getattr(value, "ndim", 1) == 0:
        return False
    if isinstance(value, list | tuple):
        return not all(isinstance(each, int | float) for each in value)
    return any(hasattr(value, sign) for sign in ("__iter__", "__getitem__", "__len__", "train"))


# The list.


def option(
    default: Any,
    doc: str,
    check: Check | None = None,
    *,
    kept: bool = True,
    excludes: str | None = None,
) -> Any:
    """A field that users can set.

    Args:
        default: value of an option that is not given; a default of None is not checked.
        doc: the sentence in `--help`.
        check: refuses invalid values.
        kept: the option changes the result, so a run stores it.
        excludes: an option that cannot be combined with this option.
    """
    row = {"doc": doc, "check": check, "kept": kept, "excludes": excludes}
    return dataclasses.field(default=default, metadata=row)


@dataclass(frozen=True, kw_only=True)
class Options:
    """Everything that a run is asked to do, except the ensemble, the data and the folder.

    The types are those of a config file. In Python a field may also hold the object that a name or
    a table describes, and a number may come from any library.

    >>> Options(lr=1).lr, Options(steps=5).epochs
    (1.0, None)
    """

    method: Spec = option(
        DEFAULT_METHOD,
        "a name from `shoal list methods`, or a `Repulsion` of your own; "
        '"auto" chooses method and strength on held-out data.',
    )
    legacy: bool = option(False, "the method as published, with its known faults.", flag)
    calibrated: bool = option(
        False, "rescale the repulsive force to the size that the posterior requires.", flag
    )
    strength: float | str | None = option(
        None,
        'factor of the repulsive force; "auto" chooses it on held-out data.',
        strength_or_auto,
    )
    likelihood: Spec | None = option(
        None,
        "by default Categorical for integer targets. For real targets, a Gaussian that "
        "standardises the targets and learns its noise: one noise per target column, or one per "
        "input when the network has two outputs per target.",
    )
    prior: Spec = option("gaussian", "prior on the weights, or on the outputs.")
    optimizer: Spec = option(
        "adam",
        'any elementwise optimiser of torch: its name, its class, or {"name": ..., settings}.',
    )
    lr: float = option(1e-3, "learning rate.", positive)
    schedule: Spec | None = option(None, 'learning rate schedule, such as "cosine".')
    epochs: int | None = option(
        None, "number of passes over the data (20); `steps` replaces it.", whole, excludes="steps"
    )
    steps: int | None = option(None, "number of batches to train on.", whole, excludes="epochs")
    batch_size: int = option(128, "data points per batch.", whole)
    batches: str = option(
        "common",
        '"common": all members see the same batches; "own": every member has its own order of the '
        "data points and its own augmentation, as in an ensemble of networks trained alone.",
        one_of("common", "own"),
    )
    folds: int | None = option(
        None,
        "number K of parts of the training data: member i never trains on part i mod K, is "
        "measured there after every epoch, and keeps the weights of its own best epoch. Every "
        'member then has batches of its own, as with `batches="own"`; see `shoal.out_of_fold`.',
        whole_from(2),
        excludes="validation",
    )
    validation: float | None = option(
        None,
        "share of the training data to hold out, such as 0.1, drawn by the seed; in Python also a "
        "pair (x, y), a `Dataset` with a validation split, or a loader. The ensemble is measured "
        "on these data after every epoch; they never train.",
        share_or_data,
        excludes="folds",
    )
    patience: int | None = option(
        None,
        "epochs without a lower validation NLL after which the run ends; with `folds`, epochs in "
        "which no member has improved.",
        whole,
    )
    keep: str | None = option(
        None,
        '"best" for the members of the epoch with the lowest validation NLL, or "last"; by default '
        '"best" with `patience` or `folds`; with `folds` every member has a best epoch of its own, '
        'and "crps" takes that of its lowest CRPS.',
        one_of("best", "crps", "last"),
    )
    outputs: str | int | None = option(
        None,
        "name or position of the output to train, for a network that returns several; by default "
        "the logits, or the first.",
        output_name,
    )
    temperature: float = option(
        1.0, "T; 0 gives the plain ensemble, 1 the posterior.", not_negative
    )
    noise: float | None = option(
        None,
        "factor of the variance of Langevin noise, for the optimizer sgd; 1 samples the posterior, "
        "0 or None adds no noise.",
        factor_or_none,
    )
    annealing: Spec | None = option(
        None,
        'schedule of the driving force, such as "linear"; {"name": "linear", "of": "push"} lets '
        "the repulsion grow instead.",
    )
    adversarial: float | dict[str, Any] | None = option(
        None, "size of adversarial perturbations, or an `Adversarial`."
    )
    augment: Spec | None = option(None, '"crop-flip", or a function of (x, key).')
    clip: float | None = option(None, "largest norm of a member's velocity.", positive)
    seed: int = option(0, "fixes all randomness.", whole_64_bits)
    device: str | None = option(None, "device to train on; by default the ensemble's.", kept=False)
    precision: str | None = option(
        None,
        '"float32", "float64", "tf32" or "bfloat16"; by default the ensemble\'s. The last two '
        "apply to the networks; weights, distances and states stay in float32.",
    )
    engine: str = option(
        "auto",
        '"auto", "vmap", "chunk:SIZE" or "loop": how members run; results stay the same.',
        text,
    )
    memory: str | int | float | None = option(
        None,
        'most that the run takes on its device: "8GiB", "800MB", a number of bytes, or a share of '
        "the device such as 0.5. Fewer members then run at a time, if need be. "
        '"auto" saves memory that costs little time.',
        memory_size,
        kept=False,
    )
    resident: int | None = option(
        None,
        "members on the device at a time, for members that do not fit: all others stay where "
        "`offload` says. None keeps all members on the device.",
        whole,
        kept=False,
    )
    offload: str = option(
        "host",
        'where members stay that are not on the device: "host" for the memory of the host, "disk" '
        "for files.",
        one_of("host", "disk"),
        kept=False,
    )
    cache: bool = option(
        False,
        "compute what all members share, such as a frozen trunk, once for all epochs. A loader "
        "is then read once.",
        flag,
        kept=False,
    )
    mesh: str | None = option(
        None,
        'processes along members x along data, such as "2x2", when `torchrun` started several; by '
        "default members are divided first.",
        process_grid,
        kept=False,
    )
    trunk: str = option(
        "replicated",
        'where tensors live that members share: "replicated" on every process, or "sharded" over '
        "the processes along data, each of which gathers a layer when it is used.",
        one_of("replicated", "sharded"),
        kept=False,
    )
    save_every: float = option(
        30.0, "seconds between checkpoints; 0 saves after every step.", seconds, kept=False
    )
    keep_every: int | None = option(
        None,
        "epochs between snapshots of the members for `shoal landscape`; `out` keeps at most 60. "
        "None keeps no snapshots.",
        whole,
    )
    frozen: int = option(
        0,
        "number of frozen members, counted from the first; frozen members repel the others and do "
        "not move; see `shoal.grow`.",
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
        if self.folds is not None:
            object.__setattr__(self, "batches", "own")

    @classmethod
    def of(cls, arguments: Mapping[str, Any]) -> "Options":
        """The options among the arguments of a call; missing options have their defaults."""
        return cls(**{name: arguments[name] for name in NAMES if name in arguments})


_FIELDS = dataclasses.fields(Options)

NAMES = tuple(entry.name for entry in _FIELDS)
"""Every option."""

KEPT = tuple(entry.name for entry in _FIELDS if entry.metadata["kept"])
"""The options that a run stores, in the order of its config."""

DEFAULTS: Mapping[str, Any] = {e.name: e.default for e in _FIELDS if e.name in KEPT}
"""Values of options that a run's config does not contain, such as options added later."""

EXCLUDES: Mapping[str, str] = {
    entry.name: entry.metadata["excludes"] for entry in _FIELDS if entry.metadata["excludes"]
}
"""Options that cannot be given together."""


def stored_method(method: Any) -> Any:
    """The method of a stored config; a fraction without `coupled` is older than this setting."""
    if not isinstance(method, Mapping):
        return method
    table = {key: stored_method(value) for key, value in method.items()}
    old = table.get("fraction", 1.0) != 1 and "coupled" not in table
    return {**table, "coupled": False} if old else table


RETIRED: Mapping[str, str] = {
    "peer_timeout": "a silent process counts as lost after 120 seconds",
    "stall_after": "a data loader stalls when no batch comes for 120 seconds",
}
"""Former options that are constants now, and what is true instead; old files may hold them."""


# The types of the options in Python, for editors and type checkers. `fit` names the others.


class StepOptions(TypedDict, total=False):
    """Options of one training step: what `shoal.Stepper` takes besides its named arguments."""

    legacy: bool
    calibrated: bool
    temperature: float
    noise: float | None
    clip: float | None
    outputs: str | int | None
    precision: str | None
    engine: str
    memory: str | int | float | None


class _LoopOptions(StepOptions, total=False):
    """Options of a training loop that every call takes."""

    batches: str
    folds: int | None
    keep: str | None
    annealing: Any
    adversarial: "Adversarial | float | Mapping[str, Any] | None"
    augment: Any
    resident: int | None
    offload: str
    cache: bool
    mesh: str | None
    trunk: str
    save_every: float
    keep_every: int | None


class FitOptions(_LoopOptions, total=False):
    """What `shoal.fit` takes besides its named arguments."""

    frozen: int
    sample_weight: Any
    loggers: Sequence[Any]


class RunOptions(_LoopOptions, total=False):
    """The options that `shoal.grow` and `shoal.compare` take for their runs."""

    method: "str | Method | Repulsion | Mapping[str, Any]"
    strength: float | str | None
    likelihood: "Likelihood | str | Mapping[str, Any] | None"
    prior: "WeightPrior | FunctionalPrior | str | Mapping[str, Any]"
    optimizer: "str | type[torch.optim.Optimizer] | Mapping[str, Any]"
    lr: float
    schedule: Any
    epochs: int | None
    steps: int | None
    batch_size: int
    validation: Any
    patience: int | None
    seed: int
    device: "torch.device | str | None"


def accepted(
    function: Callable[..., Any], table: type, arguments: Mapping[str, Any]
) -> dict[str, Any]:
    """The further arguments of a call, if the table has their names; retired ones are left out."""
    for name in arguments:
        if name in RETIRED:
            warn_retired(name)
        elif name not in table.__annotations__:
            raise TypeError(
                f"{function.__name__}() got an unexpected keyword argument {name!r}; "
                f"{nearest(name, [*_named(function), *table.__annotations__])}"
            )
    return {name: value for name, value in arguments.items() if name not in RETIRED}


def warn_retired(name: str) -> None:
    """Say that an option is no longer one."""
    text = f"{name} is no longer an option and has no effect: {RETIRED[name]}"
    warnings.warn(text, ShoalWarning, stacklevel=4)


_ENTRY = re.compile(r"^    (\w+): .*(?:\n {8}.*)*", re.MULTILINE)


def described(function: Callable[..., Any], table: type) -> str:
    """The docstring of a function, with a sentence from the list for every option that it takes.

    The docstring itself has a section "Main arguments" for what the signature names, and a section
    "Other arguments" for what the table names. They describe the arguments that are no options.
    """
    text = inspect.cleandoc(function.__doc__ or "")
    start, end = text.index("Main arguments:"), text.index("Returns:")
    entries = {entry[1]: entry[0] for entry in _ENTRY.finditer(text, start, end)}
    main = [entries.get(name) or _entry(name) for name in _named(function)]
    other = [entries.get(name) or _entry(name, default=True) for name in table.__annotations__]
    sections = ["Main arguments:", *main, "", "Other arguments:", *other, "", text[end:]]
    return text[:start] + "\n".join(sections)


def _named(function: Callable[..., Any]) -> list[str]:
    """The arguments that a signature names."""
    parameters = inspect.signature(function).parameters.values()
    return [each.name for each in parameters if each.kind is not each.VAR_KEYWORD]


def _entry(name: str, default: bool = False) -> str:
    """An option with its sentence, as a docstring has it; with a default that says something."""
    row = next(row for row in _FIELDS if row.name == name)
    text = f"{name}: {row.metadata['doc']}"
    if default and row.default not in (None, False):
        text += f" Default: {row.default!r}."
    return textwrap.fill(text, 96, initial_indent=" " * 4, subsequent_indent=" " * 8)

"""Options: one list of all options of `fit`.

An option is one field here (name, type, default, sentence, check), one argument of `fit`, and the
code that uses the option. This list defines config files, changes typed as key=value and `shoal fit
--help`. It also defines the config that a run stores, which a resumed run must match. This file
does not load torch, so help and error messages appear at once.
"""

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from shoal.core.errors import ConfigError
from shoal.training.options.option_checks import (
    AUTO,
    factor_or_none,
    flag,
    memory_size,
    not_negative,
    number_or_auto,
    output_name,
    place,
    placing,
    positive,
    process_grid,
    seconds,
    share_or_data,
    text,
    which_kept,
    whole,
    whole_64_bits,
    whole_or_zero,
)

__all__ = [
    "AUTO",
    "DEFAULTS",
    "DEFAULT_METHOD",
    "EXCLUDES",
    "KEPT",
    "NAMES",
    "Options",
    "Spec",
    "option",
    "stored_method",
]

DEFAULT_METHOD = "f-kde"
"""The method of `fit` if none is given."""

Spec = str | dict[str, Any]
"""How a file describes an object: its name, or a table with its name and settings."""

Check = Callable[[str, Any], Any]
"""Takes an option's name and the given value, returns the valid value or raises `ConfigError`."""


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
    told = {"doc": doc, "check": check, "kept": kept, "excludes": excludes}
    return dataclasses.field(default=default, metadata=told)


@dataclass(frozen=True, kw_only=True)
class Options:
    """All arguments of `fit` except the ensemble, the data and the folder.

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
        number_or_auto,
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
    batch_size: int = option(128, "data points per batch; all members share a batch.", whole)
    validation: float | None = option(
        None,
        "share of the training data to hold out, such as 0.1, drawn by the seed; in Python also a "
        "pair (x, y), a `Dataset` with a validation split, or a loader. The ensemble is measured "
        "on these data after every epoch; they never train.",
        share_or_data,
    )
    patience: int | None = option(
        None,
        "epochs without a lower validation NLL after which the run ends.",
        whole,
    )
    keep: str | None = option(
        None,
        '"best" for the members of the epoch with the lowest validation NLL, or "last"; by default '
        '"best" with `patience`.',
        which_kept,
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
    annealing: Spec | None = option(None, 'schedule of the driving force, such as "linear".')
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
        "the device such as 0.5. Fewer members then run at a time, if need be.",
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
        place,
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
        placing,
        kept=False,
    )
    peer_timeout: float = option(
        120.0, "seconds after which a silent process counts as lost.", positive, kept=False
    )
    save_every: float = option(
        30.0, "seconds between checkpoints; 0 saves after every step.", seconds, kept=False
    )
    stall_after: float = option(
        120.0,
        "seconds without a batch after which a run reports that its data loader stalls.",
        seconds,
        kept=False,
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

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> "Options":
        """Options from a mapping; missing options have their defaults."""
        return cls(**{name: given[name] for name in NAMES if name in given})


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
    found = {key: stored_method(value) for key, value in method.items()}
    old = found.get("fraction", 1.0) != 1 and "coupled" not in found
    return {**found, "coupled": False} if old else found

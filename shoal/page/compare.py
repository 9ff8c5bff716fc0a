"""`shoal.compare`: a grid of methods, ensemble sizes and seeds, trained, evaluated and compared."""

import functools
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from shoal.core.errors import ConfigError
from shoal.core.registry import Registry
from shoal.core.types import UNSET
from shoal.data.batches import augment as augmentations
from shoal.data.dataset import Dataset
from shoal.evaluation.given_data import Inputs, Labelled, Shifts, splits_of
from shoal.experiment.build import make_data
from shoal.experiment.config import Config, load_config, make_config
from shoal.experiment.grid import Grid
from shoal.experiment.variants import parse_strengths, parse_variants, swept, variant_of
from shoal.inference import likelihoods, priors
from shoal.inference.initialise import Build
from shoal.inference.likelihoods import Likelihood
from shoal.inference.priors import FunctionalPrior, WeightPrior
from shoal.interaction import repulsion as repulsions
from shoal.interaction.repulsion import Repulsion
from shoal.page.compare_grid import Comparison, compare_grid
from shoal.training.folder.own_data import OWN_DATA
from shoal.training.folder.provenance import inputs_digest
from shoal.training.options import annealing as annealings
from shoal.training.options.adversarial import Adversarial
from shoal.training.options.optim import optimizer_table
from shoal.training.options.options import DEFAULTS
from shoal.training.options.torch_schedules import as_schedule, schedules

__all__ = ["Comparison", "compare"]

_NAMED: dict[str, Registry] = {
    "likelihood": likelihoods.registry,
    "prior": priors.registry,
    "schedule": schedules,
    "annealing": annealings.registry,
    "augment": augmentations.registry,
    "method": repulsions.registry,
}
_ELSEWHERE = {"source", "data", "test", "ood", "shifts", "methods", "strengths", "sizes", "seeds"}
_ELSEWHERE |= {"out", "report", "jobs", "threads", "retries", "progress"}


def compare(
    source: str | os.PathLike[str] | Config | Mapping[str, Any] | Build,
    data: Dataset | Labelled | None = None,
    *,
    methods: str | Sequence[str] | None = None,
    strengths: Sequence[float] | None = None,
    sizes: int | Sequence[int] | None = None,
    seeds: int = 3,
    test: Labelled | None = None,
    ood: Mapping[str, Inputs] | None = None,
    shifts: Shifts | None = None,
    out: str | os.PathLike[str] | None = None,
    report: str | os.PathLike[str] | None = None,
    jobs: int = 1,
    threads: int | None = None,
    retries: int = 1,
    progress: bool = True,
    method: Repulsion | str | Mapping[str, Any] = UNSET,
    legacy: bool = UNSET,
    calibrated: bool = UNSET,
    likelihood: Likelihood | str | Mapping[str, Any] | None = UNSET,
    prior: WeightPrior | FunctionalPrior | str | Mapping[str, Any] = UNSET,
    optimizer: str | type[torch.optim.Optimizer] | Mapping[str, Any] = UNSET,
    lr: float = UNSET,
    schedule: Any = UNSET,
    epochs: int | None = UNSET,
    steps: int | None = UNSET,
    batch_size: int = UNSET,
    validation: Any = UNSET,
    patience: int | None = UNSET,
    keep: str | None = UNSET,
    outputs: str | int | None = UNSET,
    temperature: float = UNSET,
    strength: float | str | None = UNSET,
    noise: float | None = UNSET,
    annealing: Any = UNSET,
    adversarial: Adversarial | float | Mapping[str, Any] | None = UNSET,
    augment: Any = UNSET,
    clip: float | None = UNSET,
    seed: int = UNSET,
    device: torch.device | str | None = UNSET,
    precision: str | None = UNSET,
    engine: str = UNSET,
    memory: str | int | float | None = UNSET,
    resident: int | None = UNSET,
    offload: str = UNSET,
    cache: bool = UNSET,
    mesh: str | None = UNSET,
    trunk: str = UNSET,
    peer_timeout: float = UNSET,
    save_every: float = UNSET,
    stall_after: float = UNSET,
    keep_every: int | None = UNSET,
) -> Comparison:
    """Train methods, ensemble sizes and seeds, and compare them with error bars.

        found = shoal.compare(build, (x, y), test=(x_test, y_test), methods=["ensemble", "f-kde"])
        found = shoal.compare("digits", methods=["ensemble", "kde:300"], sizes=[5, 10], seeds=5)
        print(found)

    Every run has its own folder. The same call can be repeated: it skips completed runs and
    resumes interrupted ones. `shoal compare CONFIG` does the same.

    Main arguments:
        source: a function that makes your network; or a config: a TOML file, an experiment's name
            or a table.
        data: training data for a function: a `Dataset`, a pair (x, y) or a loader.
        methods: names, optionally with a strength, as "kde:300"; or "all". By default the plain
            ensemble and the method of the config, or "f-kde".
        strengths: train each repulsive method at each of these strengths.
        sizes: ensemble sizes; by default the config's, or 5.
        seeds: number of seeds per method and ensemble size.
        test: test data, where `data` has none.
        ood: out-of-distribution inputs by name, as `shoal.evaluate` takes them.
        shifts: changed test data by name, or names of corruptions, as `shoal.evaluate` takes them.
        out: folder of all runs; by default runs/NAME.
        report: path of a report to write.
        jobs: processes that share the runs; more than 1 needs a config.
        threads: CPU threads of each process.
        retries: further attempts at a failed run; an error of data or settings is final.
        progress: report progress on standard error.
        method: your own repulsion, called "custom" in `methods`.

    Every other argument is a setting of `shoal.fit` for all runs. Its default is the config's, or
    `shoal.fit`'s.
    """
    given = {k: v for k, v in locals().items() if k not in _ELSEWHERE and v is not UNSET}
    settings = {key: _plain(key, value) for key, value in given.items()}
    if callable(source):
        if data is None:
            raise ConfigError(
                "your own network needs data; type: shoal.compare(build, (x, y), ...)"
            )
        known = splits_of(data, test, ood, shifts)
        config, build = _own_config(source, known, settings), source
    else:
        if data is not None or test is not None:
            raise ConfigError("a config names its data; change them in the config")
        config, build = _config(source, settings), None
        known = splits_of(make_data(config), None, ood, shifts) if ood or shifts else None
    variants = parse_variants(_listed(methods) or f"ensemble,{variant_of(config.method).label}")
    if strengths is not None:
        variants = swept(variants, parse_strengths(_listed(strengths)))
    grid = Grid(config, _folder(out, config), variants, _sizes(sizes, config), seeds, build)
    if (build is not None or known is not None) and jobs > 1:
        raise ConfigError("several jobs need a config that names network and data; type jobs=1")
    how = {"jobs": jobs, "threads": threads, "retries": retries, "progress": progress}
    return compare_grid(grid, known, page=report, **how)


def _config(source: Any, settings: Mapping[str, Any]) -> Config:
    """The config of a file, a name or a table, with the given settings replaced."""
    if isinstance(source, Config):
        config = source
    elif isinstance(source, Mapping):
        config = make_config(source, "compare")
    else:
        config = load_config(Path(source))
    length = {"epochs", "steps"}  # one of them takes the place of the other
    replaced = settings.keys() | (length if length & settings.keys() else set())
    changed = {key: value for key, value in config.table.items() if key not in replaced}
    changed |= {key: value for key, value in settings.items() if value is not None}
    return make_config(changed, config.name)


def _own_config(build: Build, data: Dataset, settings: Mapping[str, Any]) -> Config:
    """A config that identifies the user's network and data, but cannot rebuild them."""
    name = getattr(build, "__qualname__", type(build).__qualname__)
    digest = "-".join(inputs_digest(t)[:16] for t in (data.train.x, data.train.y) if t is not None)
    known = {key: value for key, value in settings.items() if value is not None}
    own = {"data": {"custom": data.name, "sha256": digest}, "model": {"custom": name}}
    return make_config(own | known, "compare" if data.name == OWN_DATA else data.name)


def _plain(key: str, value: Any) -> Any:
    """A setting as a config stores it: objects by their names and settings."""
    if key == "optimizer":
        return optimizer_table(value)
    if key == "schedule" and isinstance(value, type | functools.partial):
        value = as_schedule(value, DEFAULTS["lr"])
    if isinstance(value, Adversarial):
        return asdict(value)
    if isinstance(value, torch.device):
        return str(value)
    if key in _NAMED and value is not None and not isinstance(value, str | Mapping):
        return _NAMED[key].spec(value)
    return dict(value) if isinstance(value, Mapping) else value


def _listed(words: str | Sequence[Any] | None) -> str:
    return words if isinstance(words, str) else ",".join(map(str, words or ()))


def _folder(out: str | os.PathLike[str] | None, config: Config) -> Path:
    return Path(out or config.out or Path("runs") / config.name)


def _sizes(sizes: int | Sequence[int] | None, config: Config) -> tuple[int, ...]:
    if sizes is None:
        return (config.members,)
    return tuple(dict.fromkeys([sizes] if isinstance(sizes, int) else sizes))

"""Data set, ensemble and run of a config."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch

from shoal.core.devices import usable_device
from shoal.core.errors import ConfigError
from shoal.core.storage.disk import machine_memory
from shoal.core.values import check_spec, check_value
from shoal.data import load
from shoal.data.dataset import Dataset
from shoal.experiment.config import Config
from shoal.inference import likelihoods
from shoal.inference.ensemble import Ensemble
from shoal.inference.members import Build
from shoal.interaction import methods
from shoal.interaction import repulsion as repulsions
from shoal.interaction.repulsion import Repulsion
from shoal.models import Blueprint
from shoal.models import registry as models
from shoal.training.fit import fit
from shoal.training.folder.run import Run, RunFolder
from shoal.training.loop.callbacks import Callback
from shoal.training.options.options import AUTO, NAMES
from shoal.training.options.settings import REGISTRIES

__all__ = ["check_device", "check_names", "default_folder", "make_data", "make_ensemble", "train"]


def train(
    config: Config,
    data: Dataset,
    out: Path | str | None,
    *,
    resume: bool = False,
    progress: bool = True,
    loggers: Sequence[str] = (),
    prepare: Callable[[Ensemble], None] = lambda ensemble: None,
    build: Build | None = None,
    callbacks: Sequence[Callback] = (),
) -> Run:
    """Train the run that a config describes.

    Args:
        config: the settings.
        data: the result of `make_data(config)`.
        out: folder of the run.
        resume: continue the run in the folder, if there is one.
        progress: show progress.
        loggers: names of loggers, as in `fit`.
        prepare: called with the ensemble before training.
        build: builds one network, for a custom network that a config cannot name.
        callbacks: as in `fit`.
    """
    check_names(config)
    check_device(config.device)
    if config.frozen and not (resume and out is not None and RunFolder(Path(out)).holds_run):
        raise ConfigError(
            f"a config cannot repeat this run: its first {config.frozen} members come from another "
            f"run; type: shoal grow RUN, with that run"
        )
    ensemble = make_ensemble(config, data, build)
    prepare(ensemble)
    options: dict[str, Any] = {name: getattr(config, name) for name in NAMES}
    options["method"] = _method(config)
    how = {"resume": resume, "loggers": loggers, "progress": progress, "callbacks": callbacks}
    return fit(ensemble, data, **options, out=out, **how)


def make_data(config: Config) -> Dataset:
    """The data set of the config."""
    for table in config.model if isinstance(config.model, list) else [config.model]:
        _refuse_custom("model", table)
    _refuse_custom("data", config.data)
    if config.data in ("tuple", "list", "DataLoader", "TensorDataset"):
        _refuse_custom("data", {"custom": config.data})  # the form in older runs
    return load(config.data)


def make_ensemble(config: Config, data: Dataset, build: Build | None = None) -> Ensemble:
    """New members, with input and output sizes from the data and the likelihood."""
    seed = config.seed if config.init_seed is None else config.init_seed
    divided = False if config.frozen else config.mesh or True
    if build is not None:
        return Ensemble.init(build, config.members, seed=seed, divided=divided)
    y = torch.zeros(0, dtype=torch.int64) if data.train.y is None else data.train.y
    likelihood = likelihoods.registry.make(config.likelihood or likelihoods.default_for(y))
    outputs = likelihood.width_for(y, data.outputs)
    pairs = [(_blueprint(table, data, outputs), count) for table, count in _networks(config)]
    _check_memory(pairs)
    return Ensemble.init(pairs, seed=seed, divided=divided)


def _check_memory(pairs: list[tuple[Blueprint, int]]) -> None:
    """Refuse networks whose weights, gradients and two moments exceed the memory."""
    total = sum(build.numbers() * count for build, count in pairs)
    memory = machine_memory()
    if memory is not None and 16 * total > memory:
        raise ConfigError(
            f"{total:.2g} weights need more than {16 * total / 2**30:.0f} GiB to train, but this "
            f"machine has {memory / 2**30:.0f}; use fewer members or smaller networks"
        )


def check_names(config: Config) -> None:
    """Refuse unknown names and settings of the wrong type, before any work."""
    for key, registry in REGISTRIES.items():
        spec = getattr(config, key)
        _refuse_custom(key, spec)
        if key == "adversarial" and isinstance(spec, Mapping):
            spec = {"name": "fgsm", **spec}
        if spec is not None and not isinstance(spec, float | int):
            check_spec(key, spec, registry)
    method = _method(config)
    if isinstance(method, Mapping) and not methods.known(method.get("name")):
        check_spec("method", {"name": "repulsion", **method}, repulsions.registry)
    elif isinstance(method, str) and method != AUTO:
        methods.get(method, config.legacy, config.calibrated)
    if isinstance(config.optimizer, Mapping):
        check_value("optimizer.name", config.optimizer.get("name", "adam"), str)


def check_device(device: str | None) -> None:
    """Refuse a device that this machine, or this build of torch, does not have."""
    if device is not None:
        usable_device(device)


def default_folder(config: Config) -> Path:
    """The default folder of a run."""
    method = config.method if isinstance(config.method, str) else config.method.get("name")
    method = method if methods.known(method) or method == AUTO else "custom"
    return Path("runs") / f"{config.name}-{method}-m{config.members}-s{config.seed}"


def _method(config: Config) -> str | dict[str, Any]:
    """The method by name, or its repulsion with the fields that the config changes."""
    if isinstance(config.method, str):
        return config.method
    _refuse_custom("method", config.method)
    name = config.method.get("name", "repulsion")
    if name == "repulsion" or not isinstance(name, str):
        return config.method
    names = {field.name for field in fields(Repulsion)} - {"points", "placebo"}
    changed = {key: value for key, value in config.method.items() if key in names}
    changes = {key: v for key, v in config.method.items() if key not in names | {"name"}}
    known = methods.get(name, config.legacy, config.calibrated)
    repulsion = methods.changed(known, changes).repulsion
    if not changed:
        return config.method
    if repulsion is None:
        raise ConfigError(
            f"method '{name}' has no repulsion that could be changed; choose another method"
        )
    return repulsions.registry.spec(repulsion) | {**changed, "name": "repulsion"}


def _networks(config: Config) -> list[tuple[dict[str, Any], int]]:
    """A table for each architecture, with its number of members."""
    if isinstance(config.model, str):
        return [({"name": config.model}, config.members)]
    if isinstance(config.model, dict):
        return [(config.model, config.members)]
    tables = [{k: v for k, v in table.items() if k != "members"} for table in config.model]
    if len(tables) == 1:
        return [(tables[0], config.members)]
    return [(table, old["members"]) for table, old in zip(tables, config.model, strict=True)]


def _blueprint(table: dict[str, Any], data: Dataset, outputs: int) -> Blueprint:
    _refuse_custom("model", table)
    settings = dict(table)
    shape = settings.pop("input_shape", data.input_shape)
    check_value("model.input_shape", shape, tuple[int, ...])
    if tuple(shape) != data.input_shape:
        raise ConfigError(
            f"the model takes inputs of shape {tuple(shape)}, but inputs of the data set "
            f"'{data.name}' have shape {data.input_shape}; leave out model.input_shape"
        )
    outputs = settings.pop("outputs", outputs)
    check_value("model.outputs", outputs, int)
    check_spec("model", settings, models)
    return Blueprint(models.make(settings), data.input_shape, outputs)


def _refuse_custom(key: str, spec: object) -> None:
    if isinstance(spec, Mapping) and "custom" in spec:
        raise ConfigError(
            f"the {key} of this run was your own '{spec['custom']}', which a file cannot name; "
            f"type in Python: shoal.fit(shoal.Ensemble.init(build, members=5), (x, y))"
        )

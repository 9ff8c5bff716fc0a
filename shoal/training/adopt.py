"""`adopt` makes a run of networks that were trained elsewhere."""

import copy
import os
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shoal.core.arguments import items
from shoal.core.errors import ConfigError, DataError, ShoalWarning
from shoal.core.storage.checkpoints import save_checkpoint, steps
from shoal.core.storage.disk import checked_path, sweep
from shoal.core.storage.files import layout, sha256
from shoal.core.storage.lock import FolderLock
from shoal.core.storage.weight_files import difference, read_weights, renamed, weight_files
from shoal.core.structure import parted
from shoal.core.values import check_spec, describe_value
from shoal.data.batches.sources import ArrayBatches, LoaderBatches, batches_of
from shoal.data.dataset import Dataset, class_names
from shoal.data.load import load as load_data
from shoal.engine.members.member_runner import MemberRunner
from shoal.engine.members.precision import full_precision
from shoal.inference import likelihoods
from shoal.inference.ensemble import Ensemble
from shoal.inference.likelihoods import Likelihood
from shoal.inference.likelihoods.real_targets import RealTargets
from shoal.inference.members import (
    Build,
    build_members,
    by_architecture,
    checked_networks,
    unwrapped,
)
from shoal.training.folder.own_data import OWN_DATA
from shoal.training.folder.provenance import about_data, environment
from shoal.training.folder.run import (
    ADOPTED,
    GivenData,
    Run,
    RunFolder,
    is_adopted,
    model_config,
)
from shoal.training.mover.prepare import SHARED, keep
from shoal.training.options.settings import spec_of
from shoal.training.options.target_checks import check_targets, default_likelihood

__all__ = ["adopt"]

_PATH = str | os.PathLike
_POINTS = 1024


@full_precision()
def adopt(
    networks: Iterable[nn.Module] | Iterable[str | os.PathLike[str]] | str | os.PathLike[str],
    *,
    build: Build | Sequence[Build] | None = None,
    likelihood: Likelihood | str | Mapping[str, Any] | None = None,
    data: Any = None,
    outputs: str | int | None = None,
    out: str | Path | None = None,
) -> Run:
    """Make a run of networks that were trained elsewhere, without training them.

        run = shoal.adopt([net1, net2, net3])
        run = shoal.adopt("nets/", build=build, out="runs/mine")

    The run holds copies of the networks. It has no history, and its method is "adopted". Functions
    such as `shoal.predict`, `shoal.evaluate`, `shoal.report` and `shoal.grow` take the run.

    Args:
        networks: trained networks; or files with their weights (.safetensors, or what `torch.save`
            wrote of a state dict), or folders of such files in natural order, one network a file.
            Names may have a prefix such as "module." or "model.".
        build: makes one network. Files need it, and so does `shoal.grow`. For several architectures
            a list; each network belongs to the first of them that it fits.
        likelihood: what the outputs mean. By default Categorical; with data, the likelihood that
            suits the targets.
        data: the training data, if they are known: a `Dataset`, its name, or a pair (x, y). A
            learned noise of real targets is fitted to these data.
        outputs: name or position of the output, for a network that returns several.
        out: the folder that stores the run.
    """
    if out is not None:
        _check_free(RunFolder(checked_path(out, "out")))
    builds = _builds(build)
    with warnings.catch_warnings(record=True) as raised:
        warnings.simplefilter("always", ShoalWarning)
        modules, files = _modules(networks, builds)
        places = by_architecture(modules)
        order = [index for group in places for index in group]
        ensemble = Ensemble.of(modules)
    notes = _repeated(raised)
    if builds:
        for index, group in enumerate(places):
            ensemble.builds[index] = _fitting(modules[group[0]], builds)
    ensemble.use_output(outputs)
    known = load_data(data) if _is_description(data) else data
    batches = None if known is None else _batches(known, ensemble)
    meaning = _likelihood(likelihood, ensemble, batches, notes)
    ensemble.derivatives = meaning.derivatives_by
    config = _config(ensemble, known, meaning, outputs)
    facts = environment(ensemble.device) | ({} if batches is None else about_data(batches))
    if isinstance(known, Dataset) and known.pixel_range is not None:
        facts["pixel_range"] = list(known.pixel_range)
    if (names := class_names(known)) is not None:
        facts["classes"] = list(names)
    if files:
        facts["sources"] = {str(files[i]): sha256(files[i]) for i in order}
    place = None if out is None else Path(out)
    given = None if known is None or isinstance(known, Iterator) else GivenData(known)
    run = Run(ensemble, meaning, config, [], notes, facts, place, given=given)
    if run.folder is not None:
        _keep(run, RunFolder(run.folder))
    return run


def _repeated(raised: Iterable[warnings.WarningMessage]) -> list[str]:
    """Give each warning once, as its own; those of Shoal are also notes of the run."""
    unique: dict[str, warnings.WarningMessage] = {str(each.message): each for each in raised}
    for each in unique.values():
        warnings.warn_explicit(each.message, each.category, each.filename, each.lineno)
    notes = [text for text, each in unique.items() if each.category is ShoalWarning]
    return [f"{note[:1].upper()}{note[1:]}." for note in notes]


def _builds(build: Build | Sequence[Build] | None) -> list[Build]:
    if build is None:
        return []
    builds: list[Any] = [build] if callable(build) else items("build", build)
    for each in builds:
        if not callable(each) or isinstance(each, nn.Module):
            raise ConfigError(
                f"build must be a function that makes one network, or a list of functions, "
                f"not a {type(each).__name__}"
            )
    return builds


def _modules(networks: Any, builds: Sequence[Build]) -> tuple[list[nn.Module], list[Path]]:
    """The networks, and the files that they come from; no files for networks in memory."""
    sources = [networks] if isinstance(networks, _PATH) else networks
    if isinstance(sources, Iterable) and not _is_network(sources):
        sources = items("networks", sources)
    if not isinstance(sources, list) or not any(isinstance(each, _PATH) for each in sources):
        return checked_networks(sources), []
    if not all(isinstance(each, _PATH) for each in sources):
        raise ConfigError("adopt takes networks or files, not both; adopt them one after another")
    if not builds:
        raise ConfigError(
            "files hold weights without their network; "
            "pass build, a function that makes one network"
        )
    files = weight_files(sources)
    templates = [_made(build) for build in builds]
    return [_loaded(file, templates) for file in files], files


def _is_network(value: Any) -> bool:
    return isinstance(value, nn.Module) and not isinstance(value, nn.ModuleList)


def _made(build: Build) -> nn.Module:
    return unwrapped(build_members(build, range(1), 0)[0])


def _state_of(module: nn.Module) -> dict[str, Tensor]:
    return {name: t for name, t in module.state_dict().items() if isinstance(t, Tensor)}


def _loaded(file: Path, templates: Sequence[nn.Module]) -> nn.Module:
    """A copy of the first network that the weights in a file fit, with these weights."""
    weights, troubles = read_weights(file), []
    for template in templates:
        wanted = _state_of(template)
        named = _completed(renamed(weights, wanted), wanted)
        trouble = difference(named, layout(wanted))
        if trouble is None:
            module = copy.deepcopy(template)
            if any(tensor.dtype == torch.float64 for tensor in named.values()):
                module = module.double()
            module.load_state_dict(named, strict=False)
            return module
        troubles.append(trouble)
    which = "the network" if len(troubles) == 1 else f"any of the {len(troubles)} networks"
    raise DataError(f"the weights in {file} do not fit {which} of build: {troubles[0]}")


def _completed(weights: dict[str, Tensor], wanted: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weights with names that files leave out: of tied weights, and of old batch norms."""
    places = {wanted[name].data_ptr(): name for name in wanted if name in weights}
    for name, tensor in wanted.items():
        if name in weights:
            continue
        if tensor.numel() and tensor.data_ptr() in places:
            weights[name] = weights[places[tensor.data_ptr()]]
        elif name.endswith("num_batches_tracked"):
            weights[name] = tensor
    return weights


def _fitting(module: nn.Module, builds: Sequence[Build]) -> Build:
    """The function that makes this architecture."""
    troubles = []
    for build in builds:
        trouble = difference(_state_of(module), layout(_state_of(_made(build))))
        if trouble is None:
            return build
        troubles.append(trouble)
    raise ConfigError(f"build makes another network than those to adopt: {troubles[0]}")


def _is_description(data: Any) -> bool:
    return isinstance(data, str) or (isinstance(data, Mapping) and "name" in data)


def _batches(data: Any, ensemble: Ensemble) -> ArrayBatches | LoaderBatches:
    where = ensemble.device, ensemble.dtype
    return batches_of(data, _POINTS, 0, *where, whole=ensemble.takes_whole)


def _likelihood(
    likelihood: Any,
    ensemble: Ensemble,
    batches: ArrayBatches | LoaderBatches | None,
    notes: list[str],
) -> Likelihood:
    """The likelihood that is named, or suits the targets; a learned noise is fitted."""
    if isinstance(likelihood, str | Mapping):
        check_spec("likelihood", likelihood, likelihoods.registry)
        spec = dict(likelihood) if isinstance(likelihood, Mapping) else likelihood
        likelihood = likelihoods.registry.make(spec)
    if likelihood is not None and not hasattr(likelihood, "about"):
        raise ConfigError(
            f"likelihood must be a name or a table of settings, not {describe_value(likelihood)}"
        )
    if likelihood is None and batches is not None:
        likelihood = default_likelihood(ensemble, batches)
    elif likelihood is None:
        notes.append("No likelihood was named: the outputs are taken for logits of classes.")
        likelihood = likelihoods.Categorical()
    if isinstance(likelihood, RealTargets) and likelihood.learns_noise and not likelihood.state:
        likelihood = _with_noise(likelihood, ensemble, batches, notes)
    if batches is not None:
        check_targets(ensemble, likelihood, batches, to_train=False)
    return likelihood


def _with_noise(
    likelihood: RealTargets,
    ensemble: Ensemble,
    batches: ArrayBatches | LoaderBatches | None,
    notes: list[str],
) -> Likelihood:
    """The likelihood of targets in their own unit, with the mean square residual as its noise."""
    if batches is None:
        raise ConfigError(
            "this likelihood learns its noise from data; pass the data, or name the noise, "
            "such as {name = 'gaussian', noise_std = 0.1}"
        )
    y, _ = parted(batches.first()[1])
    columns = 1 if y.ndim == 1 else y.shape[-1]
    unit = {"location": torch.zeros(columns), "scale": torch.ones(columns)}
    unit = {name: tensor.double() for name, tensor in unit.items()}
    unit_noise = likelihood.restored({**unit, "variance": torch.ones(columns).double()})
    total, points = torch.zeros(columns).double(), 0
    with torch.no_grad():
        for x, targets in islice(batches.batches(0, 0), batches.steps_per_epoch):
            y, weight = parted(targets)
            square = unit_noise.statistics(ensemble(x), y, ensemble.alive, weight)
            assert square is not None, "a likelihood that learns has statistics"
            total, points = total + len(x) * square.double().cpu(), points + len(x)
    variance = (total / points).clamp(min=1e-12)
    sizes = ", ".join(f"{float(value):.3g}" for value in variance.sqrt())
    notes.append(f"The noise of the targets, {sizes}, is the members' error on the given data.")
    return likelihood.restored({**unit, "variance": variance})


def _config(
    ensemble: Ensemble, data: Any, likelihood: Likelihood, outputs: str | int | None
) -> dict[str, Any]:
    """What is known of the run; settings of a training that is not known are left out."""
    name = data.name if isinstance(data, Dataset) else OWN_DATA
    source = data.spec if isinstance(data, Dataset) else None
    config = {
        "data": None if data is None else source or {"custom": name},
        **model_config(ensemble),
        "method": ADOPTED,
        "likelihood": spec_of(likelihoods.registry, likelihood),
        "outputs": outputs,
    }
    return {key: value for key, value in config.items() if value is not None}


def _check_free(folder: RunFolder) -> None:
    """Refuse a folder with a run; an adoption that was killed may be repeated."""
    if folder.holds_run and (steps(folder.checkpoints) or not is_adopted(folder.config())):
        raise ConfigError(f"{folder.path} already holds a run; choose another folder")


def _keep(run: Run, folder: RunFolder) -> None:
    with ExitStack() as stack:
        stack.callback(folder.leave, made=not os.path.exists(folder.path))
        stack.enter_context(FolderLock(folder.path))
        sweep(folder.path)
        folder.refuse_links()
        _check_free(folder)
        (folder.path / SHARED).unlink(missing_ok=True)  # of an adoption that was killed
        keep(folder.path, {}, run.ensemble.frozen_state)
        folder.begin(run.config, {**run.provenance, "notes": run.notes})
        changing = run.ensemble.changing_state.items()
        parts = {"ensemble": {name: tensor.detach() for name, tensor in changing}}
        learned = run.likelihood.state
        state = {
            "step": 0,
            "history": folder.history.keep([]),
            "optimizer": {},
            "mapping": asdict(MemberRunner()),
        }
        parts |= {"likelihood": learned} if learned else {}
        save_checkpoint(folder.checkpoints, 0, parts, state, run=folder.belongings)

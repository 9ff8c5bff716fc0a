"""`fit` trains an ensemble: it checks the arguments, makes the batches and runs the session."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, Unpack

import torch

from shoal.core.arguments import flag
from shoal.core.errors import ConfigError, DataError
from shoal.core.storage.disk import checked_path
from shoal.data.batches.batch import rounded
from shoal.data.batches.sources import ArrayBatches, LoaderBatches, batches_of
from shoal.engine.kernels.builds import beginning_triton
from shoal.engine.members.precision import full_precision
from shoal.engine.processes.groups import TIMEOUT, restarted
from shoal.engine.processes.mesh import Mesh
from shoal.inference.ensemble import Ensemble, load_to_device
from shoal.inference.likelihoods import Likelihood
from shoal.inference.priors import FunctionalPrior, WeightPrior
from shoal.interaction.methods import Method
from shoal.interaction.repulsion import Repulsion
from shoal.training.folder.run import GivenData, Run
from shoal.training.folder.run_folder import RunFolder
from shoal.training.loop.callbacks import (
    Callback,
    EpochEnd,
    Listeners,
    checked_callbacks,
    checked_loggers,
)
from shoal.training.loop.session import RunData, Session
from shoal.training.loop.validation import keeps_best, validation_batches
from shoal.training.members.shards import check_trunk
from shoal.training.mover.prepare import check_count, destination
from shoal.training.options.look import look, warn
from shoal.training.options.options import (
    DEFAULT_METHOD,
    FitOptions,
    Options,
    accepted,
    described,
)
from shoal.training.options.points import resolved
from shoal.training.options.settings import Settings
from shoal.training.options.target_checks import check_targets, default_likelihood
from shoal.training.search.search import Search, decide, is_open, without_auto

__all__ = ["fit", "in_type"]


def fit(
    ensemble: Ensemble,
    data: Any,
    *,
    method: str | Method | Repulsion | Mapping[str, Any] = DEFAULT_METHOD,
    strength: float | str | None = None,
    likelihood: Likelihood | str | Mapping[str, Any] | None = None,
    prior: WeightPrior | FunctionalPrior | str | Mapping[str, Any] = "gaussian",
    optimizer: str | type[torch.optim.Optimizer] | Mapping[str, Any] = "adam",
    lr: float = 1e-3,
    schedule: Any = None,
    epochs: int | None = None,
    steps: int | None = None,
    batch_size: int = 128,
    validation: Any = None,
    patience: int | None = None,
    seed: int = 0,
    device: torch.device | str | None = None,
    out: str | Path | None = None,
    resume: bool = False,
    callbacks: Sequence[Callback | Callable[[EpochEnd], Any]] = (),
    progress: bool = True,
    **more: Unpack[FitOptions],
) -> Run:
    """Train the members of an ensemble together.

    Main arguments:
        ensemble: the members, changed in place.
        data: a `Dataset`, a pair (x, y) of arrays or tensors, a torch `Dataset` or `DataLoader`, or
            any iterable of batches (x, y). With `steps` the iterable may be endless. Inputs may be
            dicts, tuples or batch objects, as the network takes them; a batch may be a dict with
            its targets under "labels", or (x, y, weight). Byte inputs (uint8) are divided by 255.
            Integer inputs stay integers only for an embedding. With batches="own" also a list of
            loaders, one per member.
        out: the folder that stores the run.
        resume: continue the run in `out`, if there is one.
        callbacks: functions called with an `EpochEnd` after every epoch, or `Callback` objects,
            which also see steps; both may stop the run.
        progress: show a progress bar, or one line per epoch.

    Other arguments:
        sample_weight: weight of each data point [N]; a whole number equals repetition.
        loggers: "tensorboard", "wandb", "mlflow", "csv", or objects with log(dict, step).

    `help(shoal.fit)` also describes the options, by the sentences of `training.options.Options`.

    Returns:
        The run, with the trained ensemble and its history.
    """
    resume = flag("resume", resume)
    other = accepted(fit, FitOptions, more)
    options = Options.of(locals() | other)
    with full_precision(), ExitStack() as checks:
        where, dtype = destination(ensemble, options.device, options.precision)
        checks.enter_context(beginning_triton(where))
        if out is not None:
            checked_path(out, "out")
        loggers = checked_loggers(other.get("loggers", ()))
        listeners = Listeners(checked_callbacks(callbacks), loggers)
        keeps_best(options)  # refuses options that need validation data
        load_to_device(ensemble)
        weight = other.get("sample_weight")
        batches, held = _divided(data, options, ensemble, where, dtype, weight)
        options, told = _with_batches(options, batches, ensemble)
        ensemble.use_output(options.outputs)
        if options.likelihood is None:
            options = replace(options, likelihood=default_likelihood(ensemble, batches))
        settings = _resolved(without_auto(options), ensemble, batches, data)
        batches, held = (in_type(b, settings.likelihood, dtype) for b in (batches, held))
        check_count(options.frozen, ensemble.members)
        _check_ranked(options, settings.likelihood)
        sites = check_targets(ensemble, settings.likelihood, batches)
        if held is not None:
            check_targets(ensemble, settings.likelihood, held, to_train=False)
        own = None if isinstance(options.validation, float) else options.validation
        run_data = RunData.of(GivenData(data, own, weight), batches, held, sites)
        processes = Mesh.current(ensemble.members - options.frozen, options.mesh, TIMEOUT, where)
        check_trunk(processes, ensemble, options)
        resume, choice = resume or restarted(), None
        chosen, samples = likelihood is not None, options.noise is not None
        seen = [*told, *look(ensemble, settings.likelihood, batches, data, chosen, samples)]
        if processes is None or processes.first:
            warn(seen, RunFolder(Path(out)).told() if out is not None and resume else ())
        checks.close()
        if is_open(options):
            search = Search(
                ensemble=ensemble,
                options=options,
                settings=settings,
                data=run_data,
                device=where,
                dtype=dtype,
                show=progress,
                mesh=processes,
            )
            choice = decide(search, out, resume)
            settings = _resolved(choice.applied(options), ensemble, batches, data)
        session = Session(ensemble, settings, run_data, out, listeners, processes, choice, seen)
        return session.run(where, dtype, resume, progress)


fit.__doc__ = described(fit, FitOptions)


def _divided(
    data: Any,
    options: Options,
    ensemble: Ensemble,
    device: torch.device,
    dtype: torch.dtype,
    weight: Any,
) -> tuple[ArrayBatches | LoaderBatches, ArrayBatches | LoaderBatches | None]:
    """The training data, and the validation data if there are any."""
    batches = batches_of(
        data,
        options.batch_size,
        options.seed,
        device,
        dtype,
        steps=options.steps,
        whole=ensemble.takes_whole,
        weight=weight,
        own=options.batches == "own",
    )
    return validation_batches(options, batches, ensemble, device, dtype)


def in_type(batches: Any, likelihood: Likelihood, dtype: torch.dtype) -> Any:
    """The batches; targets stay double only for a likelihood that standardises them."""
    if batches is None or likelihood.standardises:
        return batches
    if isinstance(batches, ArrayBatches):
        return replace(batches, y=rounded(batches.y, dtype))
    batches.rounds = True
    return batches


def _with_batches(
    options: Options, batches: ArrayBatches | LoaderBatches, ensemble: Ensemble
) -> tuple[Options, tuple[str, ...]]:
    """The options with common batches where the data have no others, and what to say then."""
    if options.folds is not None:
        _check_folds(options, batches, ensemble)
    if options.batches == "common" or isinstance(batches, ArrayBatches):
        return options, ()
    if batches.loaders is not None:
        trained = range(options.frozen, ensemble.members)
        if len(batches.loaders) != len(trained):
            raise DataError(
                f"{len(batches.loaders)} loaders came for {len(trained)} members; "
                f"give one loader to each"
            )
        batches.loaders = dict(zip(trained, batches.loaders.values(), strict=True))
    if batches.gives_own:
        return options, ()
    sentence = (
        "A loader gives its batches to all members, so they train on common batches; for batches "
        "of their own give arrays, a torch Dataset, or a list with one loader per member."
    )
    return replace(options, batches="common"), (sentence,)


def _check_ranked(options: Options, likelihood: Likelihood) -> None:
    """Refuse to choose epochs by the CRPS of a likelihood that has none."""
    if options.keep == "crps" and not {"ranked", "gaussian"} & {*likelihood.about.kinds}:
        raise ConfigError(f'{likelihood.task} has no CRPS; type keep="best" for the lowest NLL')


def _check_folds(
    options: Options, batches: ArrayBatches | LoaderBatches, ensemble: Ensemble
) -> None:
    """Refuse folds where a member could not be kept from the points of its fold."""
    loads = isinstance(batches, LoaderBatches)
    if loads and (not batches.gives_own or batches.loaders is not None):
        raise DataError(
            f"folds={options.folds} divides arrays or a torch Dataset, and a loader came; give the "
            f"loader's dataset, or one loader per member without folds"
        )
    if loads and options.cache:
        raise ConfigError("features of a torch Dataset have no folds; leave cache out")
    if is_open(options):
        raise ConfigError("'auto' holds out data of its own; name method and strength, or no folds")
    if ensemble.trained_shared:
        raise ConfigError(
            "members share trained tensors, which learn from the folds of all; give every member "
            "tensors of its own, freeze the shared ones, or leave folds out"
        )
    batches.in_folds(options.folds or 0)


def _resolved(
    options: Options, ensemble: Ensemble, batches: ArrayBatches | LoaderBatches, data: Any
) -> Settings:
    """The settings, with inputs for the points of the method."""
    settings = Settings.resolve(options)
    if (
        settings.common_points
        and isinstance(batches, LoaderBatches)
        and batches.loaders is not None
    ):
        raise ConfigError(
            f"'{settings.method.name}' compares outputs at inputs that members share, and their "
            f"loaders share none; name points, as method={{'name': 'f-kde', 'points': 'mixup'}}"
        )
    method = resolved(settings.method, ensemble, lambda: batches.first()[0], data)
    return replace(settings, method=method)

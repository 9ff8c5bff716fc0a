"""`fit` trains an ensemble: it checks the arguments, makes the batches and runs the session."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from shoal.core.storage.disk import checked_path
from shoal.data.batches.sources import ArrayBatches, LoaderBatches, batches_of
from shoal.engine.members.precision import full_precision
from shoal.engine.processes.launch import restarted
from shoal.engine.processes.mesh import Mesh
from shoal.inference.ensemble import Ensemble, load_to_device
from shoal.inference.likelihoods import Likelihood
from shoal.inference.priors import FunctionalPrior, WeightPrior
from shoal.inference.priors import Gaussian as GaussianPrior
from shoal.interaction.methods import Method
from shoal.interaction.repulsion import Repulsion
from shoal.training.folder.run import Run
from shoal.training.loop.callbacks import (
    Callback,
    EpochEnd,
    Listeners,
    checked_callbacks,
    checked_loggers,
)
from shoal.training.loop.session import Session
from shoal.training.loop.validation import keeps_best, validation_batches
from shoal.training.members.sharded_state import check_trunk
from shoal.training.mover.prepare import check_count, destination
from shoal.training.options.adversarial import Adversarial
from shoal.training.options.options import DEFAULT_METHOD, Options
from shoal.training.options.points import resolved
from shoal.training.options.settings import Settings
from shoal.training.options.target_checks import check_targets, default_likelihood
from shoal.training.search.plan import is_open, without_auto
from shoal.training.search.search import Search, decide

__all__ = ["fit"]


def fit(
    ensemble: Ensemble,
    data: Any,
    *,
    method: str | Method | Repulsion | Mapping[str, Any] = DEFAULT_METHOD,
    legacy: bool = False,
    calibrated: bool = False,
    likelihood: Likelihood | str | Mapping[str, Any] | None = None,
    prior: WeightPrior | FunctionalPrior | str | Mapping[str, Any] = GaussianPrior(1.0),  # noqa: B008
    optimizer: str | type[torch.optim.Optimizer] | Mapping[str, Any] = "adam",
    lr: float = 1e-3,
    schedule: Any = None,
    epochs: int | None = None,
    steps: int | None = None,
    batch_size: int = 128,
    validation: Any = None,
    patience: int | None = None,
    keep: str | None = None,
    sample_weight: Any = None,
    outputs: str | int | None = None,
    temperature: float = 1.0,
    strength: float | str | None = None,
    noise: float | None = None,
    annealing: Any = None,
    adversarial: Adversarial | float | Mapping[str, Any] | None = None,
    augment: Any = None,
    clip: float | None = None,
    seed: int = 0,
    device: torch.device | str | None = None,
    precision: str | None = None,
    engine: str = "auto",
    memory: str | int | float | None = None,
    resident: int | None = None,
    offload: str = "host",
    cache: bool = False,
    frozen: int = 0,
    mesh: str | None = None,
    trunk: str = "replicated",
    peer_timeout: float = 120.0,
    resume: bool = False,
    out: str | Path | None = None,
    save_every: float = 30.0,
    stall_after: float = 120.0,
    keep_every: int | None = None,
    loggers: Sequence[Any] = (),
    callbacks: Sequence[Callback | Callable[[EpochEnd], Any]] = (),
    progress: bool = True,
) -> Run:
    """Train the members of an ensemble together.

    Main arguments:
        ensemble: the members, changed in place.
        data: a `Dataset`, a pair (x, y) of arrays or tensors, a torch `Dataset` or `DataLoader`, or
            any iterable of batches (x, y). With `steps` the iterable may be endless. Inputs may be
            dicts, tuples or batch objects, as the network takes them; a batch may be a dict with
            its targets under "labels", or (x, y, weight). Byte inputs (uint8) are divided by 255.
            Integer inputs stay integers only for an embedding.
        method: a name from `shoal list methods`, or a `Repulsion` of your own; "auto" chooses
            method and strength on held-out data.
        epochs: number of passes over the data (20); `steps` replaces it.
        out: the folder that stores the run.

    Other arguments:
        legacy: the method as published, with its known faults.
        calibrated: rescale the repulsive force to the size that the posterior requires.
        likelihood: by default Categorical for integer targets. For real targets, a Gaussian that
            standardises the targets and learns its noise: one noise per target column, or one per
            input when the network has two outputs per target.
        prior: prior on the weights, or on the outputs.
        optimizer: any elementwise optimiser of torch: its name, its class, or {"name": ...,
            settings}.
        lr: learning rate.
        schedule: learning rate schedule, such as "cosine".
        steps: number of batches to train on.
        batch_size: data points per batch; all members share a batch.
        validation: share of the training data to hold out, such as 0.1, drawn by the seed; in
            Python also a pair (x, y), a `Dataset` with a validation split, or a loader. The
            ensemble is measured on these data after every epoch; they never train.
        patience: epochs without a lower validation NLL after which the run ends.
        keep: "best" for the members of the epoch with the lowest validation NLL, or "last"; by
            default "best" with `patience`.
        sample_weight: weight of each data point [N]; a whole number equals repetition.
        outputs: name or position of the output to train, for a network that returns several; by
            default the logits, or the first.
        temperature: T; 0 gives the plain ensemble, 1 the posterior.
        strength: factor of the repulsive force; "auto" chooses it on held-out data.
        noise: factor of the variance of Langevin noise, for the optimizer sgd; 1 samples the
            posterior, 0 or None adds no noise.
        annealing: schedule of the driving force, such as "linear".
        adversarial: size of adversarial perturbations, or an `Adversarial`.
        augment: "crop-flip", or a function of (x, key).
        clip: largest norm of a member's velocity.
        seed: fixes all randomness.
        device: device to train on; by default the ensemble's.
        precision: "float32", "float64", "tf32" or "bfloat16"; by default the ensemble's. The last
            two apply to the networks; weights, distances and states stay in float32.
        engine: "auto", "vmap", "chunk:SIZE" or "loop": how members run; results
            stay the same.
        memory: most that the run takes on its device: "8GiB", "800MB", a number of bytes, or a
            share of the device such as 0.5. Fewer members then run at a time, if need be.
        resident: members on the device at a time, for members that do not fit: all others stay
            where `offload` says. None keeps all members on the device.
        offload: where members stay that are not on the device: "host" for the memory of the host,
            "disk" for files.
        cache: compute what all members share, such as a frozen trunk, once for all epochs. A loader
            is then read once.
        frozen: number of frozen members, counted from the first; frozen members repel the others
            and do not move; see `shoal.grow`.
        mesh: processes along members x along data, such as "2x2", when `torchrun` started several;
            by default members are divided first.
        trunk: where tensors live that members share: "replicated" on every process, or "sharded"
            over the processes along data, each of which gathers a layer when it is used.
        peer_timeout: seconds after which a silent process counts as lost.
        resume: continue the run in `out`, if there is one.
        save_every: seconds between checkpoints; 0 saves after every step.
        stall_after: seconds without a batch after which a run reports that its data loader stalls.
        keep_every: epochs between snapshots of the members for `shoal landscape`; `out` keeps at
            most 60. None keeps no snapshots.
        loggers: "tensorboard", "wandb", "mlflow", "csv", or objects with log(dict, step).
        callbacks: functions called with an `EpochEnd` after every epoch, or `Callback` objects,
            which also see steps; both may stop the run.
        progress: show a progress bar, or one line per epoch.

    Returns:
        The run, with the trained ensemble and its history.
    """
    options = Options.of(locals())  # the arguments that are options
    with full_precision():
        where, dtype = destination(ensemble, options.device, options.precision)
        if out is not None:
            checked_path(out, "out")
        listeners = Listeners(checked_callbacks(callbacks), checked_loggers(loggers))
        best = keeps_best(options)
        load_to_device(ensemble)
        batches = batches_of(
            data,
            options.batch_size,
            options.seed,
            where,
            dtype,
            steps=options.steps,
            whole=ensemble.takes_whole,
            weight=sample_weight,
        )
        batches, held = validation_batches(options, batches, ensemble, where, dtype)
        ensemble.use_output(options.outputs)
        if options.likelihood is None:
            options = replace(options, likelihood=default_likelihood(ensemble, batches))
        settings = _resolved(without_auto(options), ensemble, batches, data)
        check_count(options.frozen, ensemble.members)
        sites = check_targets(ensemble, settings.likelihood, batches)
        if held is not None:
            check_targets(ensemble, settings.likelihood, held, to_train=False)
        moving = ensemble.members - options.frozen
        processes = Mesh.current(moving, options.mesh, options.peer_timeout, where)
        check_trunk(processes, ensemble, options)
        resume, choice = resume or restarted(), None
        if is_open(options):
            given = batches, held, sites, where, dtype, progress, processes
            choice = decide(Search(ensemble, data, options, settings, *given), out, resume)
            settings = _resolved(choice.applied(options), ensemble, batches, data)
        session = Session(ensemble, data, settings, batches, out, listeners, sites, processes)
        session.watch(held, best)
        if choice is not None:
            session.tell_choice(choice)
        return session.run(where, dtype, resume, progress)


def _resolved(
    options: Options, ensemble: Ensemble, batches: ArrayBatches | LoaderBatches, data: Any
) -> Settings:
    """The settings, with inputs for the points of the method."""
    settings = Settings.resolve(options)
    method = resolved(settings.method, ensemble, lambda: batches.first()[0], data)
    return replace(settings, method=method)

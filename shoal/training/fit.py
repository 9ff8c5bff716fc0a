"""Training: one loop around one step."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from shoal.data.sources import batches_of
from shoal.inference.ensemble import Ensemble
from shoal.inference.likelihoods import Likelihood
from shoal.inference.priors import FunctionalPrior, WeightPrior
from shoal.inference.priors import Gaussian as GaussianPrior
from shoal.interaction.methods import Method
from shoal.interaction.repulsion import Repulsion
from shoal.training.adversarial import Adversarial
from shoal.training.checks import check_keeping, check_targets, default_likelihood, destination
from shoal.training.frozen import check_count
from shoal.training.options import Options
from shoal.training.run import Run
from shoal.training.session import Callback, Session
from shoal.training.settings import Settings

__all__ = ["fit"]


def fit(
    ensemble: Ensemble,
    data: Any,
    *,
    method: str | Method | Repulsion | Mapping[str, Any] = "f-kde",
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
    temperature: float = 1.0,
    strength: float | None = None,
    annealing: Any = None,
    adversarial: Adversarial | float | Mapping[str, Any] | None = None,
    augment: Any = None,
    clip: float | None = None,
    seed: int = 0,
    device: torch.device | str | None = None,
    precision: str | None = None,
    engine: str = "auto",
    frozen: int = 0,
    resume: bool = False,
    out: str | Path | None = None,
    save_every: float = 30.0,
    keep_every: int | None = None,
    callbacks: Sequence[Callback] = (),
    progress: bool = True,
) -> Run:
    """Train the members of an ensemble together.

    Main arguments:
        ensemble: the members, changed in place.
        data: a `Dataset`, a pair (x, y) of arrays or tensors, a torch `Dataset` or `DataLoader`, or
            any iterable of batches (x, y). With `steps` it may be endless. Inputs that are bytes
            (uint8) are divided by 255; whole numbers stay whole for an embedding only.
        method: a name from `shoal list methods`, or a `Repulsion` of your own.
        epochs: how often to go through the data (20), or `steps` instead.
        out: a folder to keep the run in.

    Other arguments:
        legacy: the method as published, with its known faults.
        calibrated: the method with a push of the size that the posterior asks for.
        likelihood: by default Categorical for whole-number targets; for real ones a Gaussian that
            standardises the targets and learns its noise, one for each column, or one for each
            input when the network has two outputs for each target.
        prior: on the weights, or on the outputs.
        optimizer: any elementwise optimiser of torch: its name, its class, or {"name": ...,
            settings}.
        lr: learning rate.
        schedule: of the learning rate, as "cosine".
        steps: number of batches to train on.
        batch_size: points in a batch; the same batch for every member.
        temperature: T; 0 is the plain ensemble, 1 the posterior.
        strength: factor of the repulsion.
        annealing: of the drive, as "linear".
        adversarial: size of adversarial perturbations, or an `Adversarial`.
        augment: "crop-flip", or a function of (x, key).
        clip: longest velocity of a member.
        seed: decides everything that is random.
        device: where to train; by default where the ensemble is.
        precision: "float32", "float64", or "tf32", or "bfloat16" for the networks with weights,
            distances and states in float32; by default the ensemble's.
        engine: "auto", "vmap", "chunk:SIZE" or "loop": how members run, never what they do.
        frozen: how many of the first members are already trained: they repel the others and stay
            where they are; see `shoal.grow`.
        resume: continue the run in `out`, if there is one.
        save_every: seconds between checkpoints; 0 saves after every step.
        keep_every: epochs between snapshots of the members along training, which `shoal landscape`
            looks at; they stay in `out`, thinned to at most 60. None keeps none.
        callbacks: called with the run after every epoch.
        progress: show a bar, or a line an epoch.

    Returns:
        The run, with the trained ensemble and its history.
    """
    options = Options.of(locals())  # every argument that the list of options has
    where, dtype = destination(ensemble, options.device, options.precision)
    check_keeping(out, callbacks)
    batches = batches_of(
        data,
        options.batch_size,
        options.seed,
        where,
        dtype,
        steps=options.steps,
        whole=ensemble.takes_whole,
    )
    if options.likelihood is None:
        options = replace(options, likelihood=default_likelihood(ensemble, batches))
    settings = Settings.resolve(options)
    check_count(options.frozen, ensemble.members)
    check_targets(ensemble, settings.likelihood, batches)
    session = Session(ensemble, data, settings, batches, out, callbacks)
    return session.run(where, dtype, resume, progress)

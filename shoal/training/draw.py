"""`draw` samples the posterior, beginning at the members of a trained run."""

import copy
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from shoal.core.arguments import (
    checked,
    one_of,
    one_or_more,
    positive,
    seconds,
    text,
    whole,
    whole_64_bits,
    whole_or_zero,
)
from shoal.core.devices import usable_device
from shoal.core.display.progress import Progress, make_progress
from shoal.core.display.text import counted, size
from shoal.core.errors import ConfigError, StorageError
from shoal.core.interruption import Interruption
from shoal.core.storage.checkpoints import save_checkpoint, steps
from shoal.core.storage.disk import checked_path, machine_memory, sweep
from shoal.core.storage.lock import FolderLock
from shoal.core.types import Tree
from shoal.data.batches.sources import ArrayBatches, LoaderBatches, batches_of
from shoal.engine.members.member_runner import MemberRunner
from shoal.engine.members.precision import full_precision
from shoal.inference import priors, samplers
from shoal.inference.adapting.adapted import matching
from shoal.inference.ensemble import Ensemble, copied_to_device
from shoal.inference.likelihoods import Likelihood
from shoal.inference.posterior import Posterior, total_weight
from shoal.inference.priors import FunctionalPrior, WeightPrior
from shoal.inference.samplers import Plan, Sampler, known_sampler
from shoal.training.draws.density import PosteriorDensity
from shoal.training.draws.moves import moves
from shoal.training.draws.store import DrawStore
from shoal.training.fit import in_type
from shoal.training.folder.own_data import own_data
from shoal.training.folder.provenance import provenance
from shoal.training.folder.run import Run, RunFolder, load, model_config, opened
from shoal.training.folder.run_folder import DRAWS
from shoal.training.loop.saving import check_same_data, check_same_settings
from shoal.training.mover.prepare import keep
from shoal.training.options.settings import spec_of
from shoal.training.options.target_checks import check_targets

__all__ = ["REFUSED", "draw"]

PIECE = 4096
"""Most data points in one pass of a gradient of all data."""

PRECISIONS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}
"""Types of stored draws."""


@checked(
    draws=whole,
    warmup=whole_or_zero,
    thin=whole,
    batch_size=whole,
    of=one_or_more(text),
    temperature=positive,
    seed=whole_64_bits,
    precision=one_of(*PRECISIONS),
    save_every=seconds,
)
def draw(
    run: Run | str | os.PathLike[str],
    data: Any = None,
    *,
    sampler: str | Mapping[str, Any] | Sampler = "mclmc",
    draws: int = 1000,
    warmup: int | None = None,
    thin: int | None = None,
    batch_size: int | None = None,
    prior: WeightPrior | str | Mapping[str, Any] | None = None,
    temperature: float | None = None,
    of: str | Iterable[str] | None = None,
    cache: bool = False,
    seed: int = 0,
    device: torch.device | str | None = None,
    precision: str = "float32",
    out: str | Path | None = None,
    resume: bool = False,
    save_every: float = 60.0,
    progress: bool = True,
) -> Run:
    """Draw networks from the posterior: every member becomes a chain and keeps draws.

        drawn = shoal.draw(run)
        pred = shoal.predict(drawn, x_test)

    A chain begins at its member and samples p(θ | D)^(1/T), with the likelihood, the prior and the
    temperature of the run. Noise that the run has learned stays as it is. Networks run in
    evaluation mode: without dropout, with the running statistics of their training.

    The result is a run whose members are the draws of all chains: member k M + c is draw k of
    chain c. `shoal.predict` and all that follows speak of the mixture over chains and draws.

    Args:
        run: a trained run, or its folder.
        data: the training data; by default those of the run, with what it held out.
        sampler: "mclmc", "hmc" or "nuts" with gradients of all data, "sghmc" or "sgld" with
            mini-batches; a table with settings, such as {"name": "sghmc", "schedule": "cyclical"};
            or an object.
        draws: number of draws K that each chain keeps.
        warmup: number of steps before the first draw. None is 1250 for "mclmc", 500 trajectories
            for "hmc" and "nuts", and for mini-batches half as many as come after it.
        thin: steps from draw to draw. None is 1, and for mini-batches a quarter of an epoch.
        batch_size: data points of a mini-batch; None for the run's batch size.
        prior: the prior, if it is another than that of the run.
        temperature: T, if it is another than that of the run; below 1 draws stay closer to maxima.
        of: names of the weights or layers that chains move, or patterns such as "head.*"; the other
            weights stay those of their member. None is all.
        cache: compute features that all members have in common once, as in `shoal.fit`; for heads
            and adapters behind a frozen trunk.
        seed: fixes all random numbers.
        device: device of the chains; None for that of the members.
        precision: type of stored draws: "float32", "bfloat16" or "float64".
        out: the folder that stores the run of draws; draws are written while chains move.
        resume: continue what was begun in `out`.
        save_every: seconds between two saves.
        progress: show a progress bar.
    """
    run, sampler = opened(run), known_sampler("sampler", sampler)
    if out is not None:
        checked_path(out, "out")
    if sampler.whole and batch_size is not None:
        raise ConfigError(
            "this sampler compares energies, so every step sees all data; leave batch_size out, "
            "or type sampler='sghmc' for mini-batches"
        )
    with full_precision():
        patterns = of if of is None else [of] if isinstance(of, str) else [*of]
        chains = _chains(run, device, patterns)
        batches = _batches(run, data, chains, batch_size, sampler.whole)
        density, target = _density(run, chains, batches, prior, temperature, sampler.whole)
        if cache:
            density.cache(batches.batch_size if isinstance(batches, ArrayBatches) else PIECE)
        plan = Plan.of(sampler, density, draws, warmup, thin, seed, epoch=batches.steps_per_epoch)
        config = _config(run, chains, plan, precision, prior)
        config |= {} if temperature is None else {"temperature": temperature}
        asked = {"batch_size": batch_size, "of": patterns, "temperature": temperature}
        config[DRAWS] |= {name: value for name, value in asked.items() if value is not None}
        session = _Drawing(run, density, plan, config, target, precision, out)
        return session.run(resume, save_every, progress)


def _chains(
    run: Run, device: torch.device | str | None, patterns: Sequence[str] | None
) -> Ensemble:
    """A copy of the finite members, on the device of the chains; only what moves has gradients."""
    if DRAWS in run.config:
        raise ConfigError("the members of this run are draws already; draw from the trained run")
    ensemble = run.ensemble
    if not bool(ensemble.alive.all()):
        lost = ", ".join(map(str, (~ensemble.alive).nonzero().flatten().tolist()))
        raise ConfigError(
            f"members {lost} have diverged and cannot begin a chain; train again with a smaller "
            f"learning rate"
        )
    chains = copied_to_device(ensemble) if ensemble.offload else copy.deepcopy(ensemble)
    chains = chains if device is None else chains.to(usable_device(device))
    chains.train(False)
    for tensor in chains.trained_shared.values():
        tensor.requires_grad_(False)  # chains move what is theirs, given the rest
    moving = _moving(chains, patterns)
    for name, tensor in chains.weights.items():
        tensor.requires_grad_(name in moving)
    return chains


def _moving(chains: Ensemble, patterns: Sequence[str] | None) -> set[str]:
    """Names of the weights that patterns of weights and layers select."""
    names = [*chains.weights]
    if patterns is None:
        return set(names)
    parts = [name.split(".") for name in names]
    layers = {".".join(part[:i]): None for part in parts for i in range(1, len(part))}
    moving: set[str] = set()
    for matches in matching("of", patterns, [*layers, *names]).values():
        inside = tuple(f"{name}." for name in matches)
        moving |= {name for name in names if name in matches or name.startswith(inside)}
    for group in chains.groups:
        if not any(f"{group.prefix}{name}" in moving for name in group.weights):
            raise ConfigError(
                f"of names no weight of the members {group.prefix}*; add one of theirs, such as "
                f"'{group.prefix}{[*group.weights][-1]}'"
            )
    return moving


def _batches(
    run: Run, data: Any, chains: Ensemble, batch_size: int | None, whole_data: bool
) -> ArrayBatches | LoaderBatches:
    """The data of the chains, as training has them."""
    weight = None
    if data is None:
        given = run.given
        data = None if given is None else given.data
        weight = None if given is None else given.weight
        if data is None:
            data = own_data(run, "this run", "pass data=(x, y)", whole=True)
    points = batch_size or (PIECE if whole_data else int(run.config.get("batch_size", 128)))
    where = chains.device, chains.dtype
    seed = int(run.config.get("seed") or 0)
    return batches_of(data, points, seed, *where, whole=chains.takes_whole, weight=weight)


def _density(
    run: Run,
    chains: Ensemble,
    batches: ArrayBatches | LoaderBatches,
    prior: Any,
    temperature: float | None,
    whole_data: bool,
) -> tuple[PosteriorDensity, Likelihood]:
    """The posterior of the chains, and the likelihood of the run of draws."""
    trained: Any = run.trained.likelihood
    if getattr(trained, "damping", 0):  # a damped loss is no log density
        trained = replace(trained, damping=0.0).restored(trained.state)
    state = {name: tensor.to(chains.device) for name, tensor in trained.state.items()}
    likelihood = trained.restored(state) if state else trained
    batches = in_type(batches, likelihood, chains.dtype)
    sites = check_targets(chains, likelihood, batches, to_train=False)
    y = batches.y if isinstance(batches, ArrayBatches) else batches.first()[1]
    n = total_weight(likelihood, y, sites) * batches.n / len(y)
    if temperature is None:
        temperature = float(run.config.get("temperature", 1.0))
    if temperature == 0:
        raise ConfigError("at temperature=0 the posterior is one point; type temperature=1")
    posterior = Posterior(likelihood, _prior(run, prior), n, temperature)
    return PosteriorDensity(chains, posterior, batches, whole_data, sites), trained


def _prior(run: Run, given: Any) -> WeightPrior:
    stored = run.config.get("prior", "gaussian")
    if given is None and isinstance(stored, Mapping) and "custom" in stored:
        raise ConfigError(
            f"the prior of this run was your own '{stored['custom']}', which a run cannot store; "
            f"type: shoal.draw(run, prior={stored['custom']})"
        )
    prior = priors.known_prior("prior", stored if given is None else given)
    if isinstance(prior, FunctionalPrior):
        raise ConfigError(
            "a prior on functions has no density at the weights; name another, such as "
            "prior='gaussian'"
        )
    return prior


def _config(run: Run, chains: Ensemble, plan: Plan, precision: str, prior: Any) -> dict[str, Any]:
    """The settings of the run of draws: those of the training, and how its members were drawn."""
    models = model_config(chains)["model"]
    config = {**run.config, "members": plan.draws * chains.members}
    config.pop("folds", None)  # chains see all points
    config["model"] = [table | {"members": plan.draws * table["members"]} for table in models]
    if prior is not None:
        config["prior"] = spec_of(priors.registry, _prior(run, prior))
    config[DRAWS] = {
        "chains": chains.members,
        "draws": plan.draws,
        "warmup": plan.warmup,
        "thin": plan.thin,
        "seed": plan.seed,
        "precision": precision,
        "sampler": spec_of(samplers.registry, plan.sampler),
    }
    return config


class _Drawing:
    """One call of `draw`."""

    def __init__(
        self,
        run: Run,
        density: PosteriorDensity,
        plan: Plan,
        config: dict[str, Any],
        likelihood: Likelihood,
        precision: str,
        out: str | Path | None,
    ) -> None:
        self.source, self.density, self.plan, self.config = run, density, plan, config
        self.likelihood, self.chains = likelihood, density.ensemble
        self.folder = None if out is None else RunFolder(Path(out))
        shape = plan.draws, self.chains.members, density.width
        dtype = PRECISIONS[precision]
        numbers = sum(t.numel() for t in self.chains.weights.values())
        self.bytes = plan.draws * numbers * dtype.itemsize
        memory = machine_memory()
        if memory is not None and self.bytes > memory:
            raise ConfigError(
                f"{plan.draws * self.chains.members:,} draws take {size(self.bytes)}, and this "
                f"machine has {size(memory)}; keep fewer, or type precision='bfloat16'"
            )
        self.store = DrawStore(shape, dtype, None if out is None else Path(out))
        self.provenance = {**run.provenance, **provenance(density.batches, self.chains.device)}
        self.provenance["seconds"] = 0.0

    def run(self, resume: bool, save_every: float, show: bool) -> Run:
        """Move the chains to the last draw."""
        with ExitStack() as stack:
            interruption, done = Interruption(), None
            if self.folder is not None:
                stack.enter_context(interruption)
                done = self._open(self.folder, resume, stack)
            if done is not None:
                return done
            saved = self.store.restore(self.chains.device)
            progress = make_progress(show, "draw", self.plan.steps, saved[0] if saved else 0)
            stack.callback(progress.close)
            progress.say(self._sentence)
            self._sample(saved, progress, interruption, save_every)
            result = self._result()
            if self.folder is not None:
                self._keep(result, self.folder)
        return result

    @property
    def _sentence(self) -> str:
        chains, where = self.chains.members, "on disk and in memory" if self.folder else "in memory"
        each = counted(self.plan.draws, "draw")
        return f"{counted(chains, 'chain')} of {each}: {size(self.bytes)} {where}."

    def _open(self, folder: RunFolder, resume: bool, stack: ExitStack) -> Run | None:
        """Begin or continue the folder; returns the run if all its draws are there."""
        stack.callback(folder.leave, made=not os.path.exists(folder.path))
        stack.enter_context(FolderLock(folder.path))
        sweep(folder.path)
        folder.refuse_links()
        if not folder.holds_run:
            keep(folder.path, {}, self.chains.frozen_state)
            folder.begin(self.config, self.provenance)
            return None
        if not resume:
            raise folder.is_taken()
        check_same_settings(folder, self.config)
        check_same_data(folder, self.provenance, True)
        self.provenance["run_id"] = folder.provenance().get("run_id")
        if not steps(folder.checkpoints):
            return None
        groups = zip(self.chains.builds, self.chains.groups, strict=True)
        builds = [(build, group.members) for build, group in groups if build is not None]
        known = len(builds) == len(self.chains.groups)
        return load(folder.path, builds if known else None, self.source.trained.likelihood)

    def _sample(
        self,
        saved: tuple[int, Tree, dict[str, Any]] | None,
        progress: Progress,
        interruption: Interruption,
        save_every: float,
    ) -> None:
        """Move the chains, from their members or from the last save."""
        plan, store, sampler = self.plan, self.store, self.plan.sampler
        step, kept, spent = 0, 0, 0.0
        state = sampler.begin(self.density, self.density.read(), plan.seed)
        if saved is not None:
            first, (step, state, values) = state, saved
            if first.keys() != state.keys():
                raise StorageError(
                    "the chains of this folder were begun by another version of shoal, which kept "
                    "other numbers; draw again, with another folder as out"
                )
            kept, spent = int(values["kept"]), float(values["seconds"])
        began = time.monotonic()
        due = began + save_every
        move = moves(self.density, plan, state)
        while store.count < plan.draws:
            move(step)
            kept, drawn = plan.kept(step, kept)
            if drawn:
                store.add(state["x"])
            step += 1
            progress.step()
            now = time.monotonic()
            if interruption.received is not None or now >= due:
                store.save(step, state, {"kept": kept, "seconds": spent + now - began})
                due = time.monotonic() + save_every
            if interruption.received is not None:
                interruption.stop()
        store.collect()
        known = sampler.diagnostics(state)
        self.provenance["seconds"] = spent + time.monotonic() - began
        self.provenance[DRAWS] = {"steps": step} | {
            name: [float(value) for value in values] for name, values in known.items()
        }

    def _result(self) -> Run:
        """The run whose members are the draws."""
        drawn = self.store.draws.to(self.chains.dtype)
        named = {name: t.flatten(0, 1) for name, t in self.density.named(drawn).items()}
        ensemble = self.chains.repeated(self.plan.draws, named)
        notes = [*self.source.notes, *_notes(self.provenance[DRAWS])]
        folder = None if self.folder is None else self.folder.path
        return Run(
            ensemble, self.likelihood, self.config, self.source.history, notes, self.provenance,
            folder, given=self.source.given,
        )  # fmt: skip

    def _keep(self, run: Run, folder: RunFolder) -> None:
        """Write the draws as members of an ordinary run."""
        stored = self.store.draws.dtype
        parts: dict[str, Any] = {"ensemble": {}}
        for name, tensor in run.ensemble.changing_state.items():
            kept = tensor.detach()
            parts["ensemble"][name] = kept.to(stored) if name.startswith("weights/") else kept
        if run.likelihood.state:
            parts["likelihood"] = run.likelihood.state
        state = {
            "step": 0,
            "history": folder.history.keep(run.history),
            "optimizer": {},
            "mapping": asdict(MemberRunner()),
        }
        folder.begin(run.config, {**run.provenance, "notes": run.notes})
        save_checkpoint(folder.checkpoints, 0, parts, state, run=folder.belongings)
        self.store.clear()


REFUSED = 0.02
"""Share of refused steps above which the draws of a chain are not trusted."""


def _notes(known: Mapping[str, Any]) -> list[str]:
    """What to say of chains whose steps were refused."""
    refused = known.get("refused", [])
    bad = [str(chain) for chain, share in enumerate(refused) if share > REFUSED]
    if not bad:
        return []
    which = f"Chain {bad[0]}" if len(bad) == 1 else f"Chains {', '.join(bad)}"
    return [
        f"{which} refused more than {REFUSED:.0%} of the steps, whose energies jumped: do not "
        f"trust the draws there; take a longer warm-up, or a smaller energy_error."
    ]

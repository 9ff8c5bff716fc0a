"""The search for method and strength: `fit(method="auto")` and `fit(strength="auto")`.

Arms train for a short time from the same initial members, on the same data. Held-out data judge
them; `training.search.plan` has the candidates, the lengths and the rule. The ensemble is then
as before the search, so the training that follows equals one with the chosen settings.
"""

import functools
import gc
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from shoal.core.display.progress import Ticker
from shoal.core.display.text import counted
from shoal.core.errors import ConfigError, DataError, ShoalError, ShoalWarning
from shoal.data.batches.sources import ArrayBatches, LoaderBatches
from shoal.engine.processes.mesh import Mesh
from shoal.inference.ensemble import Ensemble, load_to_device
from shoal.training.folder.choice import ArmResult, Choice, Trial, reason
from shoal.training.folder.run_folder import RunFolder
from shoal.training.loop.callbacks import Listeners
from shoal.training.loop.session import Session, check_snapshots
from shoal.training.loop.validation import Data
from shoal.training.members.shards import refill_trunk
from shoal.training.options.options import AUTO, Options
from shoal.training.options.settings import Settings
from shoal.training.options.torch_schedules import Plateau
from shoal.training.search.judge import Judge, divided, judge_on
from shoal.training.search.plan import (
    BUDGET,
    PLAIN,
    RULE,
    RUNGS,
    Arm,
    PointScores,
    method_arms,
    paired,
    price_of,
    share_of,
    strength_arms,
)
from shoal.training.search.price import too_costly
from shoal.training.search.processes import SearchProcesses

__all__ = ["Search", "decide"]


_LEAST = 10
"""Data points from which a search is worthwhile."""


@dataclass(eq=False)
class Search:
    """One search.

    Attributes:
        ensemble: the members, which are as before when the search ends.
        data: the training data as the user gave them.
        options: with method or strength "auto".
        settings: those of `without_auto(options)`.
        batches: the training data.
        held: validation data; None without any.
        sites: shape of one data point's targets.
        device: device of the training.
        dtype: type of the weights.
        show: show progress.
        mesh: the processes that train together; None for one process.
    """

    ensemble: Ensemble
    data: Any
    options: Options
    settings: Settings
    batches: Data
    held: Data | None
    sites: torch.Size
    device: torch.device
    dtype: torch.dtype
    show: bool = True
    mesh: Mesh | None = None

    def __post_init__(self) -> None:
        self.processes = SearchProcesses(self.mesh)
        self.unit = price_of(self.settings.method)  # of the training that was asked for

    @property
    def asked(self) -> dict[str, Any]:
        """The options that are left to the search, as a config stores them."""
        if self.options.method == AUTO:
            return {"method": AUTO}
        return {"method": self.settings.config()["method"], "strength": AUTO}

    def run(self) -> Choice:
        """Train all arms for a short time, and choose one."""
        started = time.monotonic()
        self.results: dict[str, ArmResult] = {}
        if (reason := self._needless() or self._impossible()) is not None:
            plain = ArmResult(PLAIN.label, PLAIN.method, None)
            return Choice(self.asked, PLAIN.label, reason, (plain,))
        arms = method_arms() if self.options.method == AUTO else strength_arms(self.settings.method)
        trains, judge = self._judge()
        own = too_costly(arms, self.ensemble, self.batches)
        costly = self.processes.broadcast_from_first(lambda: own)
        for arm in arms:
            result = ArmResult(arm.label, arm.method, arm.strength, failed=costly.get(arm.label))
            self.results[arm.label] = result
        arms = [arm for arm in arms if arm.label not in costly]
        show = self.show and self.processes.first
        with self._unchanged(), Ticker(_runs(arms), show=show) as self.ticker:
            scores, cost = self._rounds(arms, trains, judge)
            found = self.processes.choice(lambda: self._chosen(scores, cost, judge, started))
        assert found is not None
        return found

    def _chosen(
        self, scores: dict[str, PointScores], cost: float, judge: Judge, started: float
    ) -> Choice:
        """The arm that wins by the scores of the last round."""
        others = dict(scores)
        plain = others.pop(PLAIN.label)
        winner = RULE.winner(others, plain)
        trials = [trial for result in self.results.values() for trial in result.trials]
        where, shifted = f"{len(plain.clean):,} points of {judge.words}", bool(judge.copies)
        return Choice(
            asked=self.asked,
            chosen=winner or PLAIN.label,
            why=reason(None if winner is None else self.results[winner], where, shifted),
            arms=tuple(self.results.values()),
            judge=judge.words,
            points=len(plain.clean),
            shifts=tuple(judge.copies),
            cost=cost / self.unit,
            steps=sum(trial.steps for trial in trials),
            seconds=time.monotonic() - started,
        )

    def _needless(self) -> str | None:
        """Why the plain ensemble is the only candidate; None if it is not."""
        if self.ensemble.members == 1:
            return "One member has no other member to repel, so the plain ensemble was chosen."
        if self.options.temperature == 0:
            return "At temperature 0 nothing repels, so the plain ensemble was chosen."
        return None

    def _impossible(self) -> str | None:
        """Why `method="auto"` cannot search; `strength="auto"` raises this instead."""
        loader = isinstance(self.batches, LoaderBatches)
        if loader and isinstance(self.batches.loader, Iterator):  # pyright: ignore
            words, advice = "the data can be read only once", "give data that can be read again"
        elif loader and self.held is None:
            words, advice = "no part of a loader can be held out", "give validation=(x, y)"
        elif (self.batches if self.held is None else self.held).n < _LEAST:
            words, advice = f"fewer than {_LEAST} data points cannot judge", "give more data"
        else:
            return None
        if self.options.method != AUTO:
            raise ConfigError(f"strength='auto' needs a search, but {words}; {advice}, or a number")
        return f"The plain ensemble was trained without a search: {words}. To search, {advice}."

    def _judge(self) -> tuple[Data, Judge]:
        """The data to train on, and the judge."""
        if self.held is not None:
            return self.batches, judge_on(self.held, self.options.seed, "validation data")
        assert isinstance(self.batches, ArrayBatches)
        return divided(self.batches, self.options.seed)

    def _rounds(
        self, arms: Sequence[Arm], trains: Data, judge: Judge
    ) -> tuple[dict[str, PointScores], float]:
        """Scores of the last round, and the price of all rounds."""
        whole = self.settings.total_steps(self.batches.steps_per_epoch)
        left, spent, taking = BUDGET * self.unit, 0.0, list(arms)
        scores: dict[str, PointScores] = {}
        for rung in RUNGS:
            if (keep := rung.keep) is not None:
                best = self.processes.broadcast_from_first(functools.partial(_best, scores, keep))
                taking = [arm for arm in arms if arm is PLAIN or arm.label in best]
            steps = int(share_of(rung, taking, left - spent) * whole)
            if scores and (len(taking) == 1 or steps <= max(self._lengths())):
                break
            spent += max(steps, 1) / whole * sum(arm.price for arm in taking)
            scores = self._round(taking, max(steps, 1), trains, judge)
        return scores, spent

    def _lengths(self) -> Iterator[int]:
        return (trial.steps for result in self.results.values() for trial in result.trials)

    def _round(
        self, arms: Sequence[Arm], steps: int, trains: Data, judge: Judge
    ) -> dict[str, PointScores]:
        """Train and score each arm; the plain ensemble comes first."""
        scores: dict[str, PointScores] = {}
        for arm in arms:
            self.ticker.note(arm.label)
            started = time.monotonic()
            found, failed = self._tried(arm, steps, trains, judge)
            result = self.results[arm.label]
            if found is None:
                self.results[arm.label] = replace(result, failed=failed)
                self.ticker.tick(f"search: {arm.label} failed: {failed}")
                continue
            scores[arm.label] = found
            trial = _trial(steps, time.monotonic() - started, found, scores[PLAIN.label])
            self.results[arm.label] = replace(result, trials=(*result.trials, trial))
            self.ticker.tick(
                f"search: {arm.label}, {counted(steps, 'step')}: NLL {trial.nll:.4f}, "
                f"under shift {trial.shifted_nll:.4f}"
            )
        return scores

    def _tried(
        self, arm: Arm, steps: int, trains: Data, judge: Judge
    ) -> tuple[PointScores | None, str | None]:
        """Scores of an arm, or why it has none; errors of the plain ensemble are raised."""
        caught: Any = (ShoalError, RuntimeError) if self.options.method == AUTO else DataError

        def act() -> PointScores:
            found = self._trained(arm, steps, trains, judge)
            self._check(arm, found)
            return found

        return self.processes.tried(act, lambda e: arm is not PLAIN and isinstance(e, caught))

    def _check(self, arm: Arm, found: PointScores) -> None:
        """Refuse an arm with a diverged member, or with scores that are not finite."""
        lost = int((~self.ensemble.alive).sum())
        if arm is not PLAIN and lost:
            raise DataError(f"{counted(lost, 'member')} diverged")
        if found.finite:
            return
        if arm is not PLAIN:
            raise DataError("the NLL is not finite")
        raise DataError(
            "the NLL of the plain ensemble is not finite after a short training, so "
            "nothing can be compared; lower the learning rate, or name the method"
        )

    def _trained(self, arm: Arm, steps: int, trains: Data, judge: Judge) -> PointScores:
        self._restore()
        options = self._options(arm, steps)
        settings = Settings.resolve(options)
        listeners = Listeners((), ())
        batches, mesh = _again(trains, steps), self.processes.for_training()
        given = settings, batches, None, listeners, self.sites, mesh
        session = Session(self.ensemble, self.data, *given)
        if isinstance(settings.schedule, Plateau):  # its learning rate follows these data
            session.watch(self.held, False)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ShoalWarning)
            run = session.run(self.device, self.dtype, False, False)
        return judge.scores(session.part, run.likelihood, mesh, options.frozen)

    def _options(self, arm: Arm, steps: int) -> Options:
        """The options of a short training: nothing is stored, and nothing ends it early."""
        method: Any = arm.method
        if method is None:
            method = self.settings.method.with_strength(arm.strength)
        return replace(
            self.options,
            method=method,
            strength=arm.strength,
            epochs=None,
            steps=steps,
            patience=None,
            keep=None,
            keep_every=None,
        )

    @contextmanager
    def _unchanged(self) -> Iterator[None]:
        """A block after which the ensemble is as before."""
        ensemble, sharded = self.ensemble, self.options.trunk == "sharded"
        state = ensemble.changing_state.items()
        self.initial = {name: tensor.detach().to("cpu", copy=True) for name, tensor in state}
        self.drawn, self.trunk = ensemble.made, dict(ensemble.shared) if sharded else {}
        try:
            yield
        finally:
            self.processes.leave()
            self._restore()

    def _restore(self) -> None:
        if self.device.type == "cuda":
            gc.collect()  # frees the captured steps of the last arm
        load_to_device(self.ensemble)
        refill_trunk(self.ensemble, self.trunk)
        self.ensemble.load_state(self.initial)
        self.ensemble.made = self.drawn


def _runs(arms: Sequence[Arm]) -> int:
    """Number of short trainings of a search, if no arm fails."""
    others = len(arms) - 1
    return sum(1 + (others if rung.keep is None else min(rung.keep, others)) for rung in RUNGS)


def _best(scores: dict[str, PointScores], keep: int) -> list[str]:
    """Labels of the best arms beside the plain ensemble."""
    others = {label: found for label, found in scores.items() if label != PLAIN.label}
    return RULE.ranked(others)[:keep]


def _trial(steps: int, seconds: float, found: PointScores, plain: PointScores) -> Trial:
    clean = paired(found.clean, plain.clean, plain.weight)
    shifted = paired(found.under_shift, plain.under_shift, plain.weight)
    means = found.mean(found.clean), found.mean(found.under_shift)
    return Trial(steps, seconds, *means, clean, shifted)


def _again(batches: Data, steps: int) -> Data:
    """The batches from their beginning; a loader is read anew, so that its counts stay unknown."""
    if isinstance(batches, ArrayBatches):
        return batches
    b = batches
    limit = None if b.steps is None else steps
    return LoaderBatches(b.loader, b.seed, b.device, b.dtype, b.check, limit, b.whole)


def decide(search: Search, out: str | Path | None, resume: bool) -> Choice:
    """The choice that the folder of a resumed run stores, or that of a search."""
    check_snapshots(search.options, out)
    if out is None:
        return search.run()
    stored = search.processes.choice(lambda: _stored(RunFolder(Path(out)), search.asked, resume))
    return search.run() if stored is None else stored


def _stored(folder: RunFolder, asked: dict[str, Any], resume: bool) -> Choice | None:
    """The choice of the run that a folder holds; None without a run."""
    if not folder.holds_run:
        return None
    if not resume:
        raise folder.is_taken()
    known = folder.choice()
    if known is not None and known.asked == asked:
        return known
    config = folder.config()
    raise ConfigError(
        f"the run in {folder.path} has method = {config.get('method')!r} and strength = "
        f"{config.get('strength')!r}, which no such search chose; type these, or choose another "
        f"folder"
    )

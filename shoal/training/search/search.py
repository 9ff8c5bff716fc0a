"""The search for method and strength: `fit(method="auto")` and `fit(strength="auto")`.

Candidates train for a short time from the same initial members, on the same data, and are compared
on held-out data; `training.search.candidates` has the candidates, the lengths and the rule. The
ensemble is then as before the search, so the training that follows equals one with the chosen
settings.

With several processes, all of them train every candidate, and the first one decides.
"""

import functools
import gc
import json
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from shoal.core.display.progress import Ticker
from shoal.core.display.text import counted
from shoal.core.errors import (
    ConfigError,
    DataError,
    PeerLost,
    ShoalError,
    ShoalWarning,
    first_line,
)
from shoal.core.random import generator
from shoal.core.storage.formats import to_json
from shoal.data.batches.sources import ArrayBatches, LoaderBatches
from shoal.data.sets.mild_shifts import mild_shifts
from shoal.engine.members.precision import calculating_in
from shoal.engine.processes.groups import fresh_groups, give_up, same_error
from shoal.engine.processes.mesh import Mesh
from shoal.inference.ensemble import Ensemble, load_to_device
from shoal.inference.likelihoods import Likelihood
from shoal.prediction.predictive import Predictive
from shoal.training.folder.choice import CandidateResult, Choice, Trial, reason
from shoal.training.folder.run_folder import RunFolder
from shoal.training.loop.callbacks import Listeners
from shoal.training.loop.session import RunData, Session, check_snapshots
from shoal.training.loop.validation import Data, Validation, evaluating
from shoal.training.members.shards import refill_trunk
from shoal.training.mover.prepare import Fitted
from shoal.training.options.options import AUTO, Options
from shoal.training.options.settings import Settings
from shoal.training.options.torch_schedules import Plateau
from shoal.training.search.candidates import (
    BUDGET,
    LEAST_POINTS,
    MOST_HELD_OUT,
    PLAIN,
    ROUNDS,
    RULE,
    Candidate,
    PointScores,
    division,
    method_candidates,
    paired,
    price_of,
    share_of,
    strength_candidates,
    too_costly,
)

__all__ = [
    "HeldOutData",
    "Search",
    "SearchProcesses",
    "decide",
    "divided",
    "held_out_data",
    "is_open",
    "point_losses",
    "without_auto",
]

T = TypeVar("T")

BATCHES_PER_PASS = 4
"""Batches scored at once on a GPU. They need no gradients, so a training step takes more memory."""


def is_open(options: Options) -> bool:
    """Whether method or strength is left to a search."""
    return any(isinstance(o, str) and o == AUTO for o in (options.method, options.strength))


def without_auto(options: Options) -> Options:
    """The options with the plain ensemble, or the default strength, where a search chooses."""
    if not is_open(options):
        return options
    if options.calibrated:
        raise ConfigError(
            "calibrated repulsion has the size that the posterior requires, so there is nothing "
            "to choose; leave calibrated or 'auto' out"
        )
    if PLAIN.method in (options.method, getattr(options.method, "name", None)):
        raise ConfigError(
            "strength='auto' has nothing to choose, since the plain ensemble repels nothing; type "
            "method='auto', or name a method that repels, such as 'f-kde'"
        )
    if options.method != AUTO:
        return replace(options, strength=None)
    if options.strength not in (None, AUTO):
        raise ConfigError(
            f"method='auto' chooses the strength too, and strength={options.strength:g} came; "
            f"leave strength out, or name the method"
        )
    return replace(options, method=PLAIN.method, strength=None)


@dataclass(eq=False)
class Search:
    """One search.

    Attributes:
        ensemble: the members, which are as before when the search ends.
        options: with method or strength "auto".
        settings: those of `without_auto(options)`.
        data: what the run trains on and is measured on.
        device: device of the training.
        dtype: type of the weights.
        show: show progress.
        mesh: the processes that train together; None for one process.
    """

    ensemble: Ensemble
    options: Options
    settings: Settings
    data: RunData
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
        """Train all candidates for a short time, and choose one."""
        started = time.monotonic()
        if (reason := self._needless() or self._impossible()) is not None:
            plain = CandidateResult(PLAIN.label, PLAIN.method, None)
            return Choice(self.asked, PLAIN.label, reason, (plain,))
        candidates = (
            method_candidates()
            if self.options.method == AUTO
            else strength_candidates(self.settings.method)
        )
        self.training, self.held_out = self._divided()
        same = self.training is self.data.batches
        self.fitted = self.data.fitted if same else Fitted()
        reasons = too_costly(candidates, self.ensemble, self.data.batches)
        left_out = self.processes.broadcast_from_first(lambda: reasons)
        self.results = {
            label: CandidateResult(label, method, strength, failed=left_out.get(label))
            for label, method, strength, _ in candidates
        }
        candidates = [candidate for candidate in candidates if candidate.label not in left_out]
        show = self.show and self.processes.first
        with self._unchanged(), Ticker(_trainings(candidates), show=show) as self.ticker:
            scores, cost = self._rounds(candidates)
            choice = self.processes.choice(lambda: self._chosen(scores, cost, started))
        assert choice is not None
        return choice

    def _chosen(self, scores: dict[str, PointScores], cost: float, started: float) -> Choice:
        """The candidate that wins by the scores of the last round."""
        others = dict(scores)
        plain = others.pop(PLAIN.label)
        winner = RULE.winner(others, plain)
        trials = [trial for result in self.results.values() for trial in result.trials]
        data, shifts = self.held_out.words, tuple(self.held_out.copies)
        where = f"{len(plain.clean):,} points of {data}"
        return Choice(
            asked=self.asked,
            chosen=winner or PLAIN.label,
            why=reason(None if winner is None else self.results[winner], where, bool(shifts)),
            candidates=tuple(self.results.values()),
            judge=data,
            points=len(plain.clean),
            shifts=shifts,
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
        loader = isinstance(self.data.batches, LoaderBatches)
        if loader and isinstance(self.data.batches.loader, Iterator):  # pyright: ignore
            words, advice = "the data can be read only once", "give data that can be read again"
        elif loader and self.data.held is None:
            words, advice = "no part of a loader can be held out", "give validation=(x, y)"
        elif (self.data.batches if self.data.held is None else self.data.held).n < LEAST_POINTS:
            words, advice = f"fewer than {LEAST_POINTS} data points cannot judge", "give more data"
        else:
            return None
        if self.options.method != AUTO:
            raise ConfigError(f"strength='auto' needs a search, but {words}; {advice}, or a number")
        return f"The plain ensemble was trained without a search: {words}. To search, {advice}."

    def _divided(self) -> tuple[Data, "HeldOutData"]:
        """The data to train on, and those to compare on."""
        if self.data.held is not None:
            return self.data.batches, held_out_data(
                self.data.held, self.options.seed, "validation data"
            )
        assert isinstance(self.data.batches, ArrayBatches)
        return divided(self.data.batches, self.options.seed)

    def _rounds(self, candidates: Sequence[Candidate]) -> tuple[dict[str, PointScores], float]:
        """Scores of the last round, and the price of all rounds."""
        whole = self.settings.total_steps(self.data.batches.steps_per_epoch)
        left, spent, taking = BUDGET * self.unit, 0.0, list(candidates)
        scores: dict[str, PointScores] = {}
        for round in ROUNDS:
            if (keep := round.keep) is not None:
                best = self.processes.broadcast_from_first(functools.partial(_best, scores, keep))
                taking = [each for each in candidates if each is PLAIN or each.label in best]
            steps = int(share_of(round, taking, left - spent) * whole)
            if scores and (len(taking) == 1 or steps <= max(self._lengths())):
                break
            spent += max(steps, 1) / whole * sum(candidate.price for candidate in taking)
            scores = self._round(taking, max(steps, 1))
        return scores, spent

    def _lengths(self) -> Iterator[int]:
        return (trial.steps for result in self.results.values() for trial in result.trials)

    def _round(self, candidates: Sequence[Candidate], steps: int) -> dict[str, PointScores]:
        """Train and score each candidate; the plain ensemble comes first."""
        scores: dict[str, PointScores] = {}
        for candidate in candidates:
            self.ticker.note(candidate.label)
            started = time.monotonic()
            point_scores, failed = self._tried(candidate, steps)
            result = self.results[candidate.label]
            if point_scores is None:
                self.results[candidate.label] = replace(result, failed=failed)
                self.ticker.tick(f"search: {candidate.label} failed: {failed}")
                continue
            scores[candidate.label] = point_scores
            trial = _trial(steps, time.monotonic() - started, point_scores, scores[PLAIN.label])
            self.results[candidate.label] = replace(result, trials=(*result.trials, trial))
            self.ticker.tick(
                f"search: {candidate.label}, {counted(steps, 'step')}: NLL {trial.nll:.4f}, "
                f"under shift {trial.shifted_nll:.4f}"
            )
        return scores

    def _tried(self, candidate: Candidate, steps: int) -> tuple[PointScores | None, str | None]:
        """Scores of a candidate, or why it has none; errors of the plain ensemble are raised."""
        caught: Any = (ShoalError, RuntimeError) if self.options.method == AUTO else DataError

        def act() -> PointScores:
            scores = self._trained(candidate, steps)
            self._check(candidate, scores)
            return scores

        return self.processes.tried(act, lambda e: candidate is not PLAIN and isinstance(e, caught))

    def _check(self, candidate: Candidate, scores: PointScores) -> None:
        """Refuse a candidate with a diverged member, or with scores that are not finite."""
        diverged = int((~self.ensemble.alive).sum())
        if candidate is not PLAIN and diverged:
            raise DataError(f"{counted(diverged, 'member')} diverged")
        if scores.finite:
            return
        if candidate is not PLAIN:
            raise DataError("the NLL is not finite")
        raise DataError(
            "the NLL of the plain ensemble is not finite after a short training, so "
            "nothing can be compared; lower the learning rate, or name the method"
        )

    def _trained(self, candidate: Candidate, steps: int) -> PointScores:
        """Scores of a candidate after a short training."""
        self._restore()
        options = self._options(candidate, steps)
        settings, mesh = Settings.resolve(options), self.processes.for_training()
        follows = isinstance(settings.schedule, Plateau)  # the learning rate follows the NLL
        data = replace(
            self.data,
            batches=_from_beginning(self.training, steps),
            held=self.data.held if follows else None,
            fitted=self.fitted,
        )
        session = Session(self.ensemble, settings, data, None, Listeners((), ()), mesh)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ShoalWarning)
            run = session.run(self.device, self.dtype, False, False)
        with calculating_in(options.precision, session.part):  # as the validation of a training
            return self.held_out.scores(session.part, run.likelihood, mesh, options.frozen)

    def _options(self, candidate: Candidate, steps: int) -> Options:
        """The options of a short training: nothing is stored, and nothing ends it early."""
        method: Any = candidate.method
        if method is None:
            method = self.settings.method.with_strength(candidate.strength)
        return replace(
            self.options,
            method=method,
            strength=candidate.strength,
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
        load_to_device(self.ensemble)
        refill_trunk(self.ensemble, self.trunk)
        self.ensemble.load_state(self.initial)
        self.ensemble.made = self.drawn


def _trainings(candidates: Sequence[Candidate]) -> int:
    """Number of short trainings of a search, if no candidate fails."""
    others = len(candidates) - 1
    return sum(1 + (others if r.keep is None else min(r.keep, others)) for r in ROUNDS)


def _best(scores: dict[str, PointScores], keep: int) -> list[str]:
    """Labels of the best candidates beside the plain ensemble."""
    others = {label: each for label, each in scores.items() if label != PLAIN.label}
    return RULE.ranked(others)[:keep]


def _trial(steps: int, seconds: float, scores: PointScores, plain: PointScores) -> Trial:
    return Trial(
        steps,
        seconds,
        nll=scores.mean(scores.clean),
        shifted_nll=scores.mean(scores.under_shift),
        nll_change=paired(scores.clean, plain.clean, plain.weight),
        shifted_change=paired(scores.under_shift, plain.under_shift, plain.weight),
    )


def _from_beginning(batches: Data, steps: int) -> Data:
    """The batches from their beginning; a loader is read anew, so that its counts stay unknown."""
    if isinstance(batches, ArrayBatches):
        return batches
    b = batches
    limit = None if b.steps is None else steps
    return LoaderBatches(
        b.loader, b.seed, b.device, b.dtype, b.check, limit, b.whole, b.gives_own, b.loaders
    )


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


@dataclass(frozen=True, eq=False)
class HeldOutData:
    """Data that no candidate trains on, and the scores of an ensemble on them.

    Attributes:
        words: which data these are.
        clean: the points.
        copies: shifted copies by name.
    """

    words: str
    clean: Data
    copies: dict[str, ArrayBatches]

    def scores(
        self,
        ensemble: Ensemble,
        likelihood: Likelihood,
        mesh: Mesh | None = None,
        frozen: int = 0,
    ) -> PointScores:
        """NLL of the ensemble on each point, and the mean over its shifted copies.

        Args:
            ensemble: the members of this process.
            likelihood: with its learned numbers.
            mesh: the processes with the other members; None for one process.
            frozen: number of frozen members, which every process has.
        """

        def scored(data: Data) -> tuple[Tensor, Tensor | None]:
            captures = mesh is None and ensemble.offload is None
            validation = Validation(data, mesh, frozen, captures)
            return _losses(validation.predictions(ensemble, likelihood))

        with torch.no_grad(), evaluating(ensemble):
            clean, weight = scored(self.clean)
            copies = [scored(each)[0] for each in self.copies.values()]
        shifted = torch.stack(copies).mean(0) if copies else None
        return PointScores(clean, shifted, weight)


def divided(batches: ArrayBatches, seed: int) -> tuple[ArrayBatches, HeldOutData]:
    """A part of the training data to train on, and the rest, held out."""
    rows = division(batches.n, batches.batch_size, seed)
    part, rest = (
        replace(batches, x=batches.x[each], y=batches.y[each])
        for each in (tensor.to(batches.x.device) for tensor in rows)
    )
    return part, held_out_data(rest, seed, "held-out training data")


def held_out_data(held: Data, seed: int, words: str) -> HeldOutData:
    """Held-out data with shifted copies; some of the points, if there are many."""
    if isinstance(held, LoaderBatches):
        held = _gathered(held) or held
    if isinstance(held, LoaderBatches):
        return HeldOutData(words, held, {})
    if held.n > MOST_HELD_OUT:
        order = torch.randperm(held.n, generator=generator(seed, "judge"))
        rows = order[:MOST_HELD_OUT].sort().values.to(held.x.device)
        held = replace(held, x=held.x[rows], y=held.y[rows])
    if held.x.device.type == "cuda":
        held = replace(held, batch_size=BATCHES_PER_PASS * held.batch_size)
    copies = mild_shifts(held.x, seed)
    return HeldOutData(words, held, {name: replace(held, x=x) for name, x in copies.items()})


def _gathered(held: LoaderBatches) -> ArrayBatches | None:
    """The first points of a loader, if they are tensors of one shape."""
    pairs, points = list[tuple[Tensor, Tensor]](), 0
    for x, y in held.sweep():
        if not isinstance(x, Tensor) or not isinstance(y, Tensor):
            return None
        pairs.append((x, y))
        points += len(x)
        if points >= MOST_HELD_OUT:
            break
    if not pairs or len({(x.shape[1:], y.shape[1:]) for x, y in pairs}) > 1:
        return None
    x, y = (torch.cat(each) for each in zip(*pairs, strict=True))
    return ArrayBatches(x, y, len(pairs[0][0]))


def _losses(predictions: Iterable[tuple[Predictive, Any, Any]]) -> tuple[Tensor, Tensor | None]:
    """NLL of each data point [N], and its weight."""
    losses, weights = list[Tensor](), list[Tensor]()
    for pred, y, weight in predictions:
        each, counts = point_losses(pred, y)
        losses.append(each)
        if weight is not None:
            weights.append(weight.flatten()[counts].double())
    if not losses:  # all members diverged
        return torch.full((1,), torch.inf), None
    return torch.cat(losses), torch.cat(weights) if weights else None


def point_losses(pred: Predictive, y: Any) -> tuple[Tensor, Tensor]:
    """NLL of each data point [B], the mean over its targets; and which points have targets [B].

    A custom loss takes the place of the NLL. Points whose targets are all ignored are left out.
    """
    targets = pred.check(y)
    sites = pred.members.shape[2:-1].numel()
    place = torch.arange(len(pred), device=pred.members.device).repeat_interleave(sites)
    counted = pred.likelihood.counted(targets)
    place = place if counted is None else place[counted.flatten().to(place.device)]
    count = torch.bincount(place, minlength=len(pred))
    if not len(place):
        return pred.members.new_empty(0), count > 0
    flat, targets = pred.points(targets)
    if "any" in pred.likelihood.about.kinds:
        log_prob = flat.log_prob(targets)
    else:
        log_prob = flat.average(pred.likelihood.log_prob(flat.members, flat.check(targets)))
    each = -log_prob.double().reshape(len(place), -1).mean(1)
    total = torch.zeros(len(pred), dtype=torch.float64, device=each.device)
    total.index_add_(0, place, each)
    return (total / count)[count > 0], count > 0


class SearchProcesses:
    """What one process and several do alike in a search.

    Short trainings exchange through process groups of their own. A process whose candidate fails
    gives these groups up, so that no other process waits for it. All processes then meet in the
    groups of the run, where every candidate ends: each process says whether its training failed,
    and why.

    Attributes:
        mesh: the processes of the run; None for one process.
    """

    def __init__(self, mesh: Mesh | None) -> None:
        self.mesh = mesh
        self._short: Mesh | None = None

    @property
    def first(self) -> bool:
        """Whether this process shows progress."""
        return self.mesh is None or self.mesh.first

    def for_training(self) -> Mesh | None:
        """The mesh of a short training; None for one process."""
        if self._short is None and (m := self.mesh) is not None:
            groups = fresh_groups(m.grid, m.timeout)
            self._short = Mesh(m.total, m.grid, m.rank, groups, timeout=m.timeout)
        return self._short

    def leave(self) -> None:
        """Give up the groups of short trainings."""
        if self._short is not None:
            groups, self._short.groups = self._short.groups, ()  # pyright: ignore
            self._short = None
            give_up(groups)
            del groups
            gc.collect()  # a group ends with its last reference

    def tried(
        self, act: Callable[[], T], loses: Callable[[Exception], bool]
    ) -> tuple[T | None, str | None]:
        """What `act` returns, or None and the reason if it failed on any process.

        Args:
            act: trains and scores a candidate.
            loses: whether an error makes the candidate lose; all processes raise other errors.
        """
        result, error = None, None
        try:
            result = act()
        except Exception as caught:
            if self.mesh is None and not loses(caught):
                raise
            error = caught
        if self.mesh is None:
            return result, None if error is None else first_line(error)
        failed = self._agreed(self.mesh, error, loses)
        return (result, None) if failed is None else (None, failed)

    def _agreed(
        self, mesh: Mesh, error: Exception | None, loses: Callable[[Exception], bool]
    ) -> str | None:
        """Why a candidate failed on any process; None if it failed on none."""
        reason = None
        if error is not None:
            _forget_frames(error)
            self.leave()
            if not isinstance(error, PeerLost):  # the reason is another process's
                reason = [loses(error), f"{type(error).__name__}: {error}"]
        answers = mesh.texts(json.dumps([error is not None, reason]))
        failures = [json.loads(text) for text in answers]
        if not any(failed for failed, _ in failures):
            return None
        self.leave()
        reasons = [each for _, each in failures if each is not None]
        if error is not None and (not reasons or (reason is not None and not reason[0])):
            raise error
        for candidate_loses, text in reasons:
            if not candidate_loses:
                raise same_error(text, "another process")
        if not reasons:
            raise PeerLost("a connection to another process was lost; start all processes again")
        kind, _, message = reasons[0][1].partition(": ")
        return message.partition("\n")[0] or kind.partition(":")[0]

    def broadcast_from_first(self, make: Callable[[], T]) -> T:
        """What `make` returns on the first process, in types that JSON has; its errors too."""
        if self.mesh is None:
            return make()
        value: Any = None

        def act() -> None:
            nonlocal value
            value = make()

        self.mesh.on_first(act)
        return json.loads(self.mesh.from_first(to_json(value)))

    def choice(self, make: Callable[[], Choice | None]) -> Choice | None:
        """The choice that `make` returns on the first process."""
        if self.mesh is None:
            return make()

        def make_table() -> dict[str, Any] | None:
            choice = make()
            return None if choice is None else choice.table()

        table = self.broadcast_from_first(make_table)
        return None if table is None else Choice.of(table)


def _forget_frames(error: BaseException | None) -> None:
    """Drop the variables of the frames that an error passed: they may hold process groups."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__

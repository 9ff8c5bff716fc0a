r"""Arms that cost the same: what else could be done with the seconds of the dearest method?

A short pilot measures every arm on this machine, in turn: its start a and its seconds b per step.
The dearest method has $T = a + b S$ seconds for the S steps of the config. Every other arm gets as
many steps as fit into T: $S' = (T - a') / b'$. The same call resumes the stored plan.
"""

import gc
import itertools
import math
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from shoal.core.display.text import counted
from shoal.core.display.text import seconds as shown
from shoal.core.errors import ConfigError, DataError, ShoalError, ShoalWarning
from shoal.core.registry import nearest
from shoal.core.storage.disk import read_plain, storage_errors
from shoal.core.storage.files import write_text
from shoal.core.storage.formats import parse_json, to_json
from shoal.core.storage.lock import FolderLock
from shoal.data.dataset import Dataset, Split
from shoal.evaluation.evaluate import evaluate_run
from shoal.experiment.bench.measure import machine, versions
from shoal.experiment.build import train
from shoal.experiment.grid import Grid, GridPoint
from shoal.experiment.variants import Variant
from shoal.inference.ensemble import Ensemble
from shoal.training.loop.callbacks import Callback, RunBegin, StepEnd
from shoal.training.options.options import AUTO, DEFAULT_METHOD
from shoal.training.search.candidates import division

__all__ = ["ARMS", "PLAN", "Arm", "CostPlan", "check_arms", "load_plan", "parse_arms", "planned"]

ARMS = ("members", "longer", "own", "tuned", "placebo")
"""What `--equal-cost` adds: more members, longer training, own batches, tuning, placebos."""

PLAN = "plan.json"
"""File of the plan, beside the runs."""

ROUNDS = 3
"""Rounds of the pilot; every arm is measured once in each."""

SECONDS = 0.5
"""Seconds of steady steps that a round measures of each arm."""

WARM = 10
"""Steps of a pilot before steady steps are measured."""

GUESSES = 4
"""Ensemble sizes that are measured at most, to find the one that fits."""

CLOSE = 0.02
"""Lengths that differ less, relatively, are the same."""

FACTORS = (1 / 3, 3.0)
"""Learning rates and widths of the prior that tuning tries, beside those of the config."""

SHORT = 0.5
"""Length of the trainings that choose rate, prior and batches, as a share of the config's."""


@dataclass(frozen=True)
class Arm:
    """One way to spend the seconds.

    Attributes:
        label: the variant, as it is typed.
        kind: "reference", "method", "members", "longer", "tuned" or "placebo".
        members: ensemble size.
        steps: number of training steps.
        epochs: the same as passes over the data.
        seconds: planned seconds of a training.
        of: the method that a placebo belongs to.
    """

    label: str
    kind: str
    members: int
    steps: int
    epochs: float
    seconds: float
    of: str = ""

    @property
    def plain(self) -> bool:
        """Whether the arm is a plain ensemble with the seconds of the dearest method."""
        return self.kind in ("members", "longer", "tuned")

    def matches(self, name: str) -> bool:
        """Whether a run's folder is one of this arm."""
        return name.startswith(f"{self.label.replace(':', '-x')}-m{self.members}-s")


@dataclass(frozen=True)
class CostPlan:
    """The arms, and how their lengths were found.

    Attributes:
        asked: the methods, the kinds of arms and the ensemble size that were asked for.
        dearest: the method whose seconds every arm gets.
        seconds: these seconds.
        arms: all arms; the reference is the plain ensemble of the config, which costs less.
        timings: seconds of the start and milliseconds per step, by variant.
        tuning: trials of the tuned arm with their held-out NLL and seconds; empty without.
        spent: seconds of pilot and tuning.
        machine: where it was measured.
    """

    asked: dict[str, list[str]]
    dearest: str
    seconds: float
    arms: tuple[Arm, ...]
    timings: dict[str, dict[str, float]]
    tuning: list[dict[str, Any]]
    spent: float
    machine: dict[str, Any]

    def announcement(self, seeds: int) -> str:
        """Arms, planned seconds and their total, before anything is trained."""
        rows = [
            f"  {arm.label}: {counted(arm.members, 'member')}, {arm.epochs:.3g} epochs, "
            f"{shown(arm.seconds)}"
            for arm in self.arms
        ]
        total = seeds * sum(arm.seconds for arm in self.arms)
        head = (
            f"Equal cost: every arm gets the {shown(self.seconds)} of {self.dearest}; "
            f"{counted(len(self.arms), 'arm')}, {counted(seeds, 'seed')}, about {shown(total)}"
        )
        tried = sum(trial["seconds"] for trial in self.tuning)
        tuned = f"; tuning took {shown(tried)}" if self.tuning else ""
        return "\n".join([head, *rows, f"The plan took {shown(self.spent)}{tuned}."])


def parse_arms(text: str | bool) -> tuple[str, ...]:
    """The kinds of arms; all of them for True or "all".

    >>> parse_arms("own,members")
    ('members', 'own')
    """
    if text is True or text == "all":
        return ARMS
    words = [word.strip() for word in str(text).split(",") if word.strip()]
    unknown = [word for word in words if word not in ARMS]
    if unknown or not words:
        word = unknown[0] if unknown else str(text)
        raise ConfigError(
            f"--equal-cost has no arm called {word!r}; {nearest(word, ARMS)} (settings of the "
            f"config, such as epochs=20, are typed before --equal-cost)"
        )
    return tuple(arm for arm in ARMS if arm in words)


def planned(
    grid: Grid,
    data: Dataset,
    kinds: Sequence[str],
    prepare: Callable[[Ensemble], None] = lambda ensemble: None,
    say: Callable[[str], None] = lambda text: None,
) -> CostPlan:
    """The plan in the grid's folder, or a new one, which is stored there.

    Args:
        grid: its variants are the methods; it has one ensemble size.
        data: training data; the test set is not used.
        kinds: some of `ARMS`.
        prepare: called with each ensemble before it is trained.
        say: takes sentences about the progress.
    """
    methods, asked = _methods(grid), _asked(grid, kinds)
    known = load_plan(grid.folder)
    if known is not None:
        return known
    with FolderLock(grid.folder):
        plan = _Planner(grid, data, methods, kinds, prepare, say).plan(asked)
        write_text(grid.folder / PLAN, to_json(asdict(plan), indent=1))
    return plan


def load_plan(folder: Path) -> CostPlan | None:
    """The plan of a folder; None without one."""
    path = folder / PLAN
    if not path.exists():
        return None
    with storage_errors("read", path):
        table = parse_json(read_plain(path).decode())
    return CostPlan(**table | {"arms": tuple(Arm(**arm) for arm in table["arms"])})


def _has_size(grid: Grid) -> bool:
    """Whether one number is the ensemble size; several networks have one each."""
    return not (isinstance(grid.config.model, list) and len(grid.config.model) > 1)


def _methods(grid: Grid) -> list[Variant]:
    return [variant for variant in grid.variants if variant.repels]


def _asked(grid: Grid, kinds: Sequence[str]) -> dict[str, list[str]]:
    methods = [variant.label for variant in _methods(grid)]
    return {"methods": methods, "arms": list(kinds), "members": [str(grid.sizes[0])]}


def check_arms(grid: Grid, kinds: Sequence[str]) -> None:
    """Refuse what cannot be planned, and a folder with another plan, before any work."""
    methods = _methods(grid)
    if not methods:
        raise ConfigError(
            "--equal-cost compares methods that repel with plain ensembles, and none was named; "
            "type --methods kde:300, for example"
        )
    for variant in methods:
        if AUTO in (variant.method, variant.strength):
            raise ConfigError(
                f"{variant.label} searches anew for every seed, so its seconds cannot be planned; "
                f"name method and strength"
            )
        if variant.members is not None:
            raise ConfigError(f"--equal-cost chooses ensemble sizes; leave members out of "
                              f"{variant.label}")  # fmt: skip
    if len(grid.sizes) > 1:
        raise ConfigError(f"--equal-cost takes one ensemble size, not {len(grid.sizes)}")
    if grid.config.patience is not None:
        raise ConfigError("patience ends runs early, so their seconds differ; leave patience out")
    if "members" in kinds and not _has_size(grid):
        raise ConfigError(
            "several networks have no common size to enlarge; type --equal-cost "
            "longer,own,tuned,placebo"
        )
    known = load_plan(grid.folder)
    if known is not None and known.asked != _asked(grid, kinds):
        words = "; ".join(f"{what} {', '.join(each)}" for what, each in known.asked.items())
        raise ConfigError(
            f"{grid.folder} holds another plan of equal cost ({words}); choose another folder with "
            f"-o (in Python out=...)"
        )


class _Clock(Callback):
    """Measures the start and the steady steps of a run, then ends it.

    With one thread on a CPU it is processor time, which other programs do not lengthen.
    """

    def __init__(self, device: torch.device) -> None:
        self.device, self.total = device, 0
        alone = device.type == "cpu" and torch.get_num_threads() == 1
        self.now = time.process_time if alone else time.perf_counter
        self.marks: list[tuple[int, float]] = []

    def run_begin(self, event: RunBegin) -> None:
        """The start."""
        self._mark(0)

    def step_end(self, event: StepEnd) -> None:
        """Marks after warm steps, and when enough time has passed."""
        self.total = event.steps
        if event.step in (min(WARM, (event.steps + 1) // 2), event.steps):
            self._mark(event.step)
        elif len(self.marks) == 2 and self.now() - self.marks[1][1] > SECONDS:
            self._mark(event.step)
            event.stop("measured")

    def _mark(self, step: int) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.marks.append((step, self.now()))

    @property
    def timing(self) -> tuple[float, float]:
        """Seconds of the start, and of a step."""
        (_, start), (warm, first), (last, end) = self.marks[0], self.marks[1], self.marks[-1]
        step = (end - first) / max(last - warm, 1)
        return max(first - start - warm * step, 0.0), step


@dataclass
class _Planner:
    grid: Grid
    data: Dataset
    methods: Sequence[Variant]
    kinds: Sequence[str]
    prepare: Callable[[Ensemble], None]
    say: Callable[[str], None]

    def __post_init__(self) -> None:
        self.device = torch.device(self.grid.config.device or "cpu")
        self.epochs: dict[str, float] = {}  # steps of an epoch
        self.timings: dict[str, tuple[float, float]] = {}
        self.trials: list[dict[str, Any]] = []
        self.size = self.grid.sizes[0]

    def plan(self, asked: dict[str, list[str]]) -> CostPlan:
        """Measure, choose lengths and sizes, and tune."""
        started = time.perf_counter()
        self.reference = Variant(DEFAULT_METHOD)
        plains = [self.reference]
        if "own" in self.kinds or "tuned" in self.kinds:
            plains.append(_with(self.reference, batches="own"))
        self.measure([*plains, *self.methods])
        costs = {method: self.seconds(method) for method in self.methods}
        self.dearest = max(costs, key=lambda method: costs[method])
        self.budget = costs[self.dearest]
        arms = [self.arm("reference", self.reference)]
        arms += [self.arm("method", self.filled(method)) for method in self.methods]
        self.larger = self.size
        if "members" in self.kinds or ("tuned" in self.kinds and _has_size(self.grid)):
            self.larger = self.enlarged(plains)
        arms += self.plain_arms(plains if "own" in self.kinds else plains[:1])
        if "tuned" in self.kinds:
            arms.append(self.tuned())
        if "placebo" in self.kinds:
            placebos = {m: _placebo(self.filled(m)) for m in self.methods}
            self.measure(list(placebos.values()))
            arms += [
                self.arm("placebo", placebo, of=self.filled(method).label)
                for method, placebo in placebos.items()
            ]
        return CostPlan(
            asked=asked,
            dearest=self.dearest.label,
            seconds=self.budget,
            arms=tuple(arms),
            timings={
                label: {"start_s": start, "step_ms": 1e3 * step}
                for label, (start, step) in self.timings.items()
            },
            tuning=self.trials,
            spent=time.perf_counter() - started,
            machine=machine(self.device) | versions(),
        )

    def plain_arms(self, plains: Sequence[Variant]) -> Iterator[Arm]:
        """More members and longer training, with common and own batches."""
        if "members" in self.kinds:
            larger = [_with(plain, members=str(self.larger)) for plain in plains]
            yield from (self.arm("members", self.filled(each)) for each in larger)
        if "longer" in self.kinds or ("own" in self.kinds and "members" not in self.kinds):
            kept = plains if "longer" in self.kinds else plains[1:]
            yield from (self.arm("longer", self.filled(each)) for each in kept)

    def measure(self, variants: Sequence[Variant]) -> None:
        """Time every variant in turn, in several rounds, beside the plain ensemble.

        A busy machine slows all arms of a round, so the median of ratios within a round counts.
        """
        plain = _key(self.reference)
        timed = list({_key(each): each for each in (self.reference, *variants)}.values())
        rounds: dict[str, list[tuple[float, float]]] = {_key(each): [] for each in timed}
        for number, variant in itertools.product(range(ROUNDS), timed):
            if variant is not self.reference or plain not in self.timings:
                self.say(f"pilot {number + 1} of {ROUNDS}: {variant.label}")
            clock, config = _Clock(self.device), self.grid.config_of(self.point(variant))
            self.train(variant, self.data, clock)
            rounds[_key(variant)].append(clock.timing)
            whole = math.ceil(len(self.data.train) / config.batch_size)
            self.epochs[_key(variant)] = clock.total / config.epochs if config.epochs else whole
        if plain not in self.timings:
            self.timings[plain] = _medians(rounds[plain])
        unit = self.timings[plain][1]
        for key in rounds.keys() - {plain}:
            pairs = zip(rounds[key], rounds[plain], strict=True)
            ratios = [(start, unit * mine / step) for (start, mine), (_, step) in pairs]
            self.timings[key] = _medians(ratios)

    def train(self, variant: Variant, data: Dataset, *callbacks: Callback) -> Any:
        config = self.grid.config_of(self.point(variant))
        if self.device.type == "cuda":
            gc.collect()  # frees the captured steps of the last training
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ShoalWarning)
            return train(
                config, data, None, progress=False, prepare=self.prepare, build=self.grid.build,
                callbacks=callbacks,
            )  # fmt: skip

    def point(self, variant: Variant) -> GridPoint:
        return GridPoint(variant, variant.members or self.size, self.grid.config.seed)

    def steps(self, variant: Variant) -> int:
        """Steps of the variant's config."""
        config = self.grid.config_of(self.point(variant))
        return config.steps or round((config.epochs or 1) * self.epochs[_key(variant)])

    def seconds(self, variant: Variant) -> float:
        start, step = self.timings[_key(variant)]
        return start + step * self.steps(variant)

    def filled(self, variant: Variant) -> Variant:
        """The variant with as many steps as fit into the budget: whole epochs where they do."""
        start, step = self.timings[_key(variant)]
        steps = (self.budget - start) / step
        if abs(steps / self.steps(variant) - 1) <= CLOSE:
            return variant
        epochs = steps / self.epochs[_key(variant)]
        if self.grid.config.epochs is not None and abs(round(epochs) / epochs - 1) <= CLOSE:
            return _with(variant, epochs=str(round(epochs)))
        return _with(variant, steps=str(max(round(steps), 1)))

    def enlarged(self, plains: Sequence[Variant]) -> int:
        """The ensemble size that fits into the budget at the length of the config.

        The first guess is proportional to the members. Then a line through the config's size and
        the last measured size gives the next one: many members may cost little more than a few.
        """
        start, step = self.timings[_key(self.reference)]
        wanted = (self.budget - start) / self.steps(self.reference)
        size = max(int(self.size * wanted / step), self.size + 1)
        for _ in range(GUESSES):
            guess = _with(self.reference, members=str(size))
            self.measure([guess])
            slope = (self.timings[_key(guess)][1] - step) / (size - self.size)
            reach = self.size + (wanted - step) / slope if slope > 0 else math.inf
            better = int(min(max(reach, self.size + 1), 4 * size))
            if abs(better / size - 1) < 0.15:
                break
            size = better
        sized = [_with(plain, members=str(size)) for plain in plains]
        if missing := [each for each in sized if _key(each) not in self.timings]:
            self.measure(missing)
        return size

    def arm(self, kind: str, variant: Variant, of: str = "") -> Arm:
        steps, members = self.steps(variant), self.point(variant).members
        epochs = steps / self.epochs[_key(variant)]
        return Arm(variant.label, kind, members, steps, epochs, self.seconds(variant), of)

    def tuned(self) -> Arm:
        """Learning rate, prior, batches and length, chosen one after another on held-out data.

        Rate, prior and batches are chosen by shorter trainings. Then the seconds go into a longer
        training or into more members, whichever has the lower held-out NLL.
        """
        config, best = self.grid.config, self.reference
        divided = _divided(self.data, config.batch_size, config.seed)
        short = max(round(SHORT * self.steps(self.reference)), 1)
        scores: dict[str, float] = {}

        def lowest(candidates: Sequence[Variant], steps: int | None = None) -> Variant:
            of = {c: c if steps is None else _with(c, steps=str(steps)) for c in candidates}
            for trial in of.values():
                if trial.label not in scores:
                    scores[trial.label] = self.tried(trial, divided)
            return min(candidates, key=lambda candidate: scores[of[candidate].label])

        rates = [_with(best, lr=_word(config.lr * factor)) for factor in FACTORS]
        best = lowest([best, *rates], short)
        std = _width(config.prior)
        if std is not None:
            widths = [_with(best, **{"prior.std": _word(std * factor)}) for factor in FACTORS]
            best = lowest([best, *widths], short)
        best = lowest([best, _with(best, batches="own")], short)
        best = [best, _with(best, members=str(self.larger))][: 1 + (self.larger > self.size)]
        return self.arm("tuned", lowest([*map(self.filled, best)]))

    def tried(self, variant: Variant, data: Dataset) -> float:
        """Held-out NLL of a trial; infinite if it fails."""
        self.say(f"tuning: {variant.label}")
        started, failed = time.perf_counter(), ""
        try:
            scores = evaluate_run(self.train(variant, data), data, gallery=0, keep=False).test
            nll = float(scores.get("nll", math.nan))
        except ShoalError as error:
            nll, failed = math.nan, str(error)
        seconds = time.perf_counter() - started
        row = {"label": variant.label, "nll": nll, "seconds": seconds}
        self.trials.append(row | ({"failed": failed} if failed else {}))
        return math.inf if math.isnan(nll) else nll


def _medians(timings: Sequence[tuple[float, float]]) -> tuple[float, float]:
    starts, steps = zip(*timings, strict=True)
    return statistics.median(starts), statistics.median(steps)


def _with(variant: Variant, **options: str) -> Variant:
    """The variant with other options; one of steps and epochs takes the other's place."""
    words = dict(variant.options)
    if options.keys() & {"steps", "epochs"}:
        words = {key: value for key, value in words.items() if key not in ("steps", "epochs")}
    return replace(variant, options=tuple(sorted((words | options).items())))


def _key(variant: Variant) -> str:
    """What decides the time of a step: all but length, rate and prior."""
    other = ("epochs", "steps", "lr")
    kept = [(k, v) for k, v in variant.options if k not in other and not k.startswith("prior")]
    return replace(variant, options=tuple(kept)).label


def _placebo(variant: Variant) -> Variant:
    settings = dict(variant.settings) | {"placebo": True}
    return replace(variant, settings=tuple(sorted(settings.items())))


def _word(number: float) -> str:
    return f"{number:.3g}".replace("e+", "e")


def _width(prior: Any) -> float | None:
    """Standard deviation of a normal prior; None for any other prior."""
    if prior == "gaussian":
        return 1.0
    named = isinstance(prior, dict) and prior.get("name") == "gaussian"
    return float(prior.get("std", 1.0)) if named else None


def _divided(data: Dataset, batch_size: int, seed: int) -> Dataset:
    """A part of the training data to train on, and the rest as test set."""
    x, y = data.train.x, data.train.y
    if data.validation is not None:
        return replace(data, test=data.validation, shifts={}, ood={})
    if y is None:
        raise DataError("tuning needs targets; leave 'tuned' out of --equal-cost")
    rows = (each.to(y.device) for each in division(len(data.train), batch_size, seed))
    part, rest = (Split(x[each], y[each]) for each in rows)
    return replace(data, train=part, test=rest, shifts={}, ood={})

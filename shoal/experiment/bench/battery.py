"""A battery: methods and engines on one network, timed in turns together with baselines.

The workloads are training by Shoal, a plain loop over modules, and bare matrix products. A workload
that cannot run becomes a row with the reason; the others continue.
"""

import copy
import functools
import gc
import inspect
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, replace
from itertools import count, pairwise
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shoal.core.errors import ShoalError, ShoalWarning, first_line, named_line
from shoal.core.random import generator
from shoal.data.batches.sources import ArrayBatches
from shoal.engine.members.network_call import selected_output
from shoal.engine.members.precision import calculating_in
from shoal.experiment.bench.measure import MIB, Peak, Timing, Work, interleave, seconds_of
from shoal.experiment.bench.networks import CLASSES, Network
from shoal.experiment.variants import parse_method
from shoal.inference.ensemble import Ensemble
from shoal.inference.members import Build
from shoal.inference.priors import WeightPrior
from shoal.interaction.methods import Method
from shoal.training.fit import fit
from shoal.training.loop.trainer import Trainer
from shoal.training.mover.prepare import destination, prepared
from shoal.training.options.options import Options
from shoal.training.options.settings import Settings

__all__ = [
    "LOOP",
    "PRODUCTS",
    "BareProducts",
    "Case",
    "Contestant",
    "EnsembleSteps",
    "ModuleLoop",
    "Row",
    "Workload",
    "contestants",
    "figures",
    "forever",
    "measure",
    "random_data",
    "reason",
    "train_once",
    "trainer",
]


@functools.lru_cache(maxsize=1)
def _initial(network: Network, members: int) -> Ensemble:
    """New members on the host, which take longer to draw than to copy."""
    build: Build = network.blueprint
    if network.adapt is not None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            build = network.adapt(network.blueprint())
    return Ensemble.init(build, members, seed=0)


@functools.lru_cache(maxsize=1)
def random_data(
    input_shape: tuple[int, ...],
    points: int,
    device: str,
    dtype: torch.dtype,
    words: int | None = None,
    places: tuple[int, ...] = (),
    classes: int = CLASSES,
) -> tuple[Tensor, Tensor]:
    """Normal inputs or uniform tokens, and uniform labels: the time does not depend on values."""
    random = generator(0, "bench")
    if words is None:
        x = torch.randn(points, *input_shape, generator=random).to(device, dtype)
    else:
        x = torch.randint(0, words, (points, *input_shape), generator=random).to(device)
    y = torch.randint(0, classes, (points, *places), generator=random)
    return x, y.to(device)


_STEPS = 4_500
"""Steps of one run; fewer than in runs that are compiled by default."""


@dataclass(frozen=True)
class Case:
    """One training problem.

    Attributes:
        network: network with its sizes.
        members: M.
        batch_size: B.
        precision: "float32", "tf32", "bfloat16" or "float64".
        optimizer: name in torch.
        device: device to train on.
        points: data points N.
        lr: learning rate.
        batches: "common" or "own".
    """

    network: Network
    members: int
    batch_size: int
    precision: str
    optimizer: str
    device: torch.device
    points: int
    lr: float = 1e-3
    batches: str = "common"

    @property
    def weights(self) -> int:
        """Number of trained weights of one member."""
        weights = _initial(self.network, self.members).weights
        return sum(tensor.numel() for tensor in weights.values()) // self.members

    @property
    def dtype(self) -> torch.dtype:
        """Type of weights and inputs."""
        return torch.float64 if self.precision == "float64" else torch.float32

    def make(self) -> Ensemble:
        """New members on the device; the same at every call."""
        ensemble = copy.deepcopy(_initial(self.network, self.members))
        return ensemble.to(*destination(ensemble, self.device, self.precision))

    def data(self) -> tuple[Tensor, Tensor]:
        """Inputs and labels on the device."""
        net, device = self.network, str(self.device)
        kind = net.words, net.places, net.classes
        return random_data(net.input_shape, self.points, device, self.dtype, *kind)

    def source(self) -> ArrayBatches:
        """The data in batches."""
        return ArrayBatches(*self.data(), self.batch_size)


def trainer(
    case: Case,
    ensemble: Ensemble,
    method: str | Method,
    engine: str,
    steps: int = _STEPS,
    legacy: bool = False,
    strength: float | None = None,
    prior: str | WeightPrior = "gaussian",
) -> Trainer:
    """A trainer of the case's data; the usual prior on the weights is standard normal."""
    chosen = parse_method(method, legacy) if isinstance(method, str) else method
    chosen = chosen.with_strength(strength)
    options = dict(
        method=chosen, legacy=legacy, prior=prior, likelihood="categorical",
        optimizer=case.optimizer, lr=case.lr, batch_size=case.batch_size, steps=steps,
        precision=case.precision, engine=engine, batches=case.batches,
    )  # fmt: skip
    settings = Settings.resolve(Options.of(options))
    ensemble.train()
    source = case.source()
    repulsion, _ = prepared(settings.method, source, None, ensemble.dtype)
    return Trainer(ensemble, settings, source, repulsion)


class EnsembleSteps:
    """Training steps of `shoal.fit`."""

    def __init__(
        self, case: Case, ensemble: Ensemble, method: str, engine: str, legacy: bool = False
    ) -> None:
        self.trainer = trainer(case, ensemble, method, engine, legacy=legacy)
        self.trainer.fit_batches()
        torch.set_num_threads(self.trainer.autotune_threads())
        self._steps = self._forever()

    def __call__(self, steps: int) -> None:
        """Take more steps."""
        for _ in range(steps):
            next(self._steps)

    def _forever(self) -> Iterator[None]:
        while True:
            self.trainer.step = 0
            yield from self.trainer.run()


class ModuleLoop:
    """Ordinary modules, one after another, each with autograd and a torch optimiser.

    Members, batches, loss and prior equal those of a plain ensemble; the prior is weight decay.

    Attributes:
        modules: the members.
        optimizers: one optimiser per member.
        batches: endless batches, in the order of an ensemble.
    """

    def __init__(self, case: Case, ensemble: Ensemble) -> None:
        self.case, members = case, range(ensemble.members)
        self.modules = [ensemble.member(i).to(case.device).train() for i in members]
        self.optimizers = [_optimizer(case, module) for module in self.modules]
        self.batches = forever(case.source())

    def __call__(self, steps: int) -> None:
        """Take more steps."""
        for _ in range(steps):
            x, y = next(self.batches)
            for module, optimizer in zip(self.modules, self.optimizers, strict=True):
                optimizer.zero_grad()
                self.loss(module, x, y).backward()
                optimizer.step()

    def memory_floor(self) -> float | None:
        """Activations of one member, and weights, gradients and optimiser states of all, in MiB.

        The members have taken a few training steps. None without a GPU.
        """
        device = self.case.device
        if device.type != "cuda":
            return None
        x, y = next(self.batches)
        before = torch.cuda.memory_allocated(device)
        loss = self.loss(self.modules[0], x, y)
        activations = torch.cuda.memory_allocated(device) - before
        del loss
        states = [state for optimizer in self.optimizers for state in optimizer.state.values()]
        kept = _bytes(value for state in states for value in state.values())
        weights = _bytes(p for module in self.modules for p in module.parameters())
        return (activations + 2 * weights + kept) / MIB

    def loss(self, module: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        """Cross entropy of one member."""
        low = self.case.precision == "bfloat16"
        kind = self.case.device.type
        with torch.autocast(kind, torch.bfloat16) if low else nullcontext():
            outputs = selected_output(module, module(x))
        outputs = outputs.float() if low else outputs
        return F.cross_entropy(outputs.flatten(0, -2), y.flatten())


def _bytes(values: Iterable[object]) -> int:
    tensors = [value for value in values if isinstance(value, Tensor)]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def forever(source: ArrayBatches) -> Iterator[tuple[Any, Any]]:
    """Batches of one epoch after another, in the order of an ensemble."""
    for epoch in count():
        yield from source.batches(epoch)


def _optimizer(case: Case, module: nn.Module) -> torch.optim.Optimizer:
    kinds = {name.lower(): kind for name, kind in vars(torch.optim).items()}
    kind: Any = kinds[case.optimizer.lower()]
    known = inspect.signature(kind).parameters
    decay = {"weight_decay": 1 / case.points} if "weight_decay" in known else {}
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    return kind(trained, lr=case.lr, **decay)


class BareProducts:
    """Only the matrix products of a perceptron's step, forward and backward.

    Members share the product with the inputs; the other products are `torch.bmm`.
    """

    def __init__(self, case: Case) -> None:
        layers = case.network.layers or (CLASSES, CLASSES)
        dtype = _product_type(case.precision)
        M, B, where = case.members, case.batch_size, {"device": case.device, "dtype": dtype}
        self.inputs = torch.randn(B, layers[0], **where)
        self.first = torch.randn(M * layers[1], layers[0], **where)
        self.weights = [torch.randn(M, o, i, **where) for i, o in pairwise(layers[1:])]
        self.values = [torch.randn(M, width, B, **where) for width in layers[1:]]
        self._graph = self._captured() if case.device.type == "cuda" else None

    def __call__(self, steps: int) -> None:
        """Repeat the products."""
        for _ in range(steps):
            self._products() if self._graph is None else self._graph.replay()

    def _products(self) -> None:
        first = self.values[0].view(-1, len(self.inputs))
        torch.mm(self.first, self.inputs.mT)
        for weight, below in zip(self.weights, self.values, strict=False):
            torch.bmm(weight, below)
        for weight, below, above in zip(self.weights, self.values, self.values[1:], strict=False):
            torch.bmm(above, below.mT)
            torch.bmm(weight.mT, above)
        torch.mm(first, self.inputs)

    def _captured(self) -> torch.cuda.CUDAGraph:
        self._products()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._products()
        return graph


def _product_type(precision: str) -> torch.dtype:
    kinds = {"bfloat16": torch.bfloat16, "float64": torch.float64}
    return kinds.get(precision, torch.float32)


LOOP, PRODUCTS = "module loop", "bare products"

_WARM_UP = 8

Row = dict[str, Any]
"""One row of a table."""


class Workload(Protocol):
    """A workload to time."""

    @property
    def case(self) -> Case:
        """The training problem."""
        ...

    @property
    def what(self) -> str:
        """ "shoal", or the name of a baseline."""
        ...

    @property
    def label(self) -> str:
        """A label for tables."""
        ...

    def build(self, stack: ExitStack) -> Work:
        """The work, before warm-up; its context managers are entered on the stack."""
        ...

    def row(self) -> Row:
        """The columns that are known before the run."""
        ...


@dataclass(frozen=True)
class Contestant:
    """One row of a battery.

    Attributes:
        case: the training problem.
        what: "shoal", or one of the two baselines.
        method: name of the method.
        engine: name of the engine.
        legacy: the method as published.
    """

    case: Case
    what: str = "shoal"
    method: str | None = None
    engine: str | None = None
    legacy: bool = False

    @property
    def label(self) -> str:
        """A label for tables."""
        name = f"{self.method} as published" if self.legacy else self.method
        own = ", own batches" if self.case.batches == "own" else ""
        who = self.what if self.method is None else f"{name}, {self.engine}{own}"
        return f"{self.case.network.name}, {who}, {self.case.precision}"

    def build(self, stack: ExitStack) -> Work:
        """The work, before warm-up, in the precision of the case while the stack is open."""
        if self.what == PRODUCTS:
            return BareProducts(self.case)
        ensemble = self.case.make()
        stack.enter_context(calculating_in(self.case.precision, ensemble))
        if self.method is None or self.engine is None:
            return ModuleLoop(self.case, ensemble.to("cpu"))
        return EnsembleSteps(self.case, ensemble, self.method, self.engine, self.legacy)

    def row(self) -> Row:
        """The columns that are known before the run."""
        case = self.case
        return {
            "model": case.network.name,
            "what": self.what,
            "method": self.method,
            "engine": self.engine,
            "legacy": self.legacy,
            "members": case.members,
            "batch_size": case.batch_size,
            "batches": case.batches,
            "weights": case.weights,
            "precision": case.precision,
            "optimizer": case.optimizer,
            "device": str(case.device),
        }


def contestants(
    case: Case, methods: Sequence[str], engines: Sequence[str], batches: Sequence[str] = ("common",)
) -> list[Contestant]:
    """The module loop, the bare products if there are any, and every method with every engine."""
    products = [Contestant(case, PRODUCTS)] if case.network.layers else []
    ours = [
        Contestant(replace(case, batches=kind), "shoal", method, engine)
        for engine in engines
        for method in methods
        for kind in batches
    ]
    return [Contestant(case, LOOP), *products, *ours]


def measure(
    workloads: Sequence[Workload], seconds: float, say: Callable[[str], None] = lambda line: None
) -> list[Row]:
    """One row per workload, in order; all on one device and in one precision.

    Args:
        workloads: workloads to time.
        seconds: seconds per workload.
        say: called when a workload is warm, or when it cannot run.
    """
    device, threads = workloads[0].case.device, torch.get_num_threads()
    with ExitStack() as stack:
        started = [_start(workload, stack, threads, say) for workload in workloads]
        live = [work for work, _ in started if work is not None]
        timings = iter(interleave(live, device, seconds) if live else [])
        for work, row in started:
            row |= {} if work is None else figures(next(timings), row)
        torch.set_num_threads(threads)
    rows = [row for _, row in started]
    del started, live
    gc.collect()
    return _compared(rows)


def _start(
    workload: Workload, stack: ExitStack, threads: int, say: Callable[[str], None]
) -> tuple[Work | None, Row]:
    """A warm workload and the first columns of its row; None if it cannot run."""
    workload.case.data()  # shared by all workloads, and not counted as memory
    row, begun, peak = workload.row(), time.perf_counter(), Peak(workload.case.device)
    torch.set_num_threads(threads)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            work = workload.build(stack)
            peak.forget()
            work(_WARM_UP)
            if workload.what != "shoal":
                _choose_threads(work, workload.case.device)
        except Exception as error:
            say(f"{workload.label}: {reason(error)}")
            return None, row | {"error": reason(error)}
    row |= {"memory_mib": peak.mib(), "setup_seconds": time.perf_counter() - begun}
    row |= {"memory_floor_mib": work.memory_floor()} if isinstance(work, ModuleLoop) else {}
    notes = [str(w.message) for w in caught if issubclass(w.category, ShoalWarning)]
    row |= {"threads": torch.get_num_threads(), "note": "; ".join(dict.fromkeys(notes)) or None}
    say(f"{workload.label}: warm after {row['setup_seconds']:.1f} s")
    return _with_threads(work, row["threads"]), row


def _choose_threads(work: Work, device: torch.device) -> None:
    """Set one thread or all, whichever is faster, as in the training of an ensemble."""
    if device.type == "cpu" and (most := torch.get_num_threads()) > 1:
        times = {}
        for threads in (most, 1):
            torch.set_num_threads(threads)
            times[threads] = min(seconds_of(work, 1, device) for _ in range(3))
        torch.set_num_threads(min(times, key=lambda threads: times[threads]))


def _with_threads(work: Work, threads: int) -> Work:
    """The work, run with its chosen number of threads."""

    def run(steps: int) -> None:
        torch.set_num_threads(threads)
        work(steps)

    return run


def figures(timing: Timing, row: Row) -> Row:
    """The columns of a timing."""
    samples = row["members"] * row["batch_size"]
    return {
        "timing": timing,
        "ms": timing.median,
        "quartiles_ms": list(timing.quartiles),
        "spread": timing.spread,
        "rounds_ms": timing.rounds,
        "steps_a_round": timing.steps,
        "member_samples_per_second": 1e3 * samples / timing.median,
    }


def _compared(rows: list[Row]) -> list[Row]:
    """Rows with time ratios within the same rounds, and memory relative to its floor."""
    timings = {row["what"]: row.get("timing") for row in rows if row["what"] != "shoal"}
    least = next((row["memory_floor_mib"] for row in rows if row.get("memory_floor_mib")), None)
    for row in rows:
        timing = row.pop("timing", None)
        if timing is None:
            continue
        loop, products = timings.get(LOOP), timings.get(PRODUCTS)
        row["times_faster_than_loop"] = loop and loop.over(timing)
        row["times_bare_products"] = products and timing.over(products)
        row["memory_over_floor"] = least and row["memory_mib"] and row["memory_mib"] / least
    return rows


def reason(error: Exception) -> str:
    """The reason of an error in one line."""
    return first_line(error) if isinstance(error, ShoalError) else named_line(error)


EPOCHS = 15


def train_once(case: Case, method: str, engine: str, epochs: int = EPOCHS) -> dict[str, Any]:
    """Seconds of one complete call of `fit`, or the reason why it cannot run."""
    row: dict[str, Any] = {"method": method, "engine": engine, "epochs": epochs}
    row |= {"points": case.points, "members": case.members, "batch_size": case.batch_size}
    row |= {"precision": case.precision, "optimizer": case.optimizer, "device": str(case.device)}
    try:
        ensemble = case.make()
        data = case.data()
        start = time.perf_counter()
        run = fit(
            ensemble, data, method=parse_method(method), engine=engine, lr=case.lr,
            optimizer=case.optimizer, epochs=epochs, batch_size=case.batch_size,
            precision=case.precision, progress=False,
        )  # fmt: skip
        if case.device.type == "cuda":
            torch.cuda.synchronize(case.device)
    except Exception as error:
        return row | {"error": reason(error)}
    seconds, steps = time.perf_counter() - start, run.history[-1]["step"]
    return row | {
        "seconds": seconds,
        "training_seconds": float(run.provenance["seconds"]),
        "steps": steps,
        "ms": 1e3 * seconds / steps,
    }

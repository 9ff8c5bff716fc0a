"""The timed workloads: training by Shoal, a plain loop over modules, bare matrix products."""

import functools
import inspect
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import count, pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shoal.core.random import generator
from shoal.data.batches.sources import ArrayBatches
from shoal.experiment.bench.networks import CLASSES, NETWORKS, Network, network, perceptron
from shoal.experiment.variants import parse_method
from shoal.inference.ensemble import Ensemble
from shoal.inference.initialise import Build
from shoal.inference.priors import WeightPrior
from shoal.interaction.methods import Method
from shoal.training.loop.trainer import Trainer
from shoal.training.mover.prepare import destination, prepared
from shoal.training.options.options import Options
from shoal.training.options.settings import Settings

__all__ = [
    "CLASSES",
    "NETWORKS",
    "BareProducts",
    "Case",
    "EnsembleSteps",
    "ModuleLoop",
    "Network",
    "forever",
    "network",
    "perceptron",
    "random_data",
    "trainer",
]


@functools.lru_cache(maxsize=1)
def random_data(
    input_shape: tuple[int, ...],
    points: int,
    device: str,
    dtype: torch.dtype,
    tokens: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Normal inputs and uniform labels, since the time does not depend on their values.

    With `tokens`, the size of a vocabulary: tokens as inputs, and one label per token.
    """
    random = generator(0, "bench")
    if tokens is not None:
        x, y = torch.randint(0, tokens, (2, points, *input_shape), generator=random).to(device)
        return x, y
    x = torch.randn(points, *input_shape, generator=random)
    y = torch.randint(0, CLASSES, (points,), generator=random)
    return x.to(device, dtype), y.to(device)


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
    """

    network: Network
    members: int
    batch_size: int
    precision: str
    optimizer: str
    device: torch.device
    points: int
    lr: float = 1e-3

    @property
    def weights(self) -> int:
        """Number of trained weights of one member."""
        with torch.device("meta" if self.network.adapt is None else "cpu"):
            member = self.network.blueprint()
            if self.network.adapt is not None:
                member = self.network.adapt(member)()
        return sum(p.numel() for p in member.parameters() if p.requires_grad)

    @property
    def dtype(self) -> torch.dtype:
        """Type of weights and inputs."""
        return torch.float64 if self.precision == "float64" else torch.float32

    def make(self) -> Ensemble:
        """New members on the device; the same at every call."""
        build: Build = self.network.blueprint
        if self.network.adapt is not None:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(0)
                build = self.network.adapt(self.network.blueprint())
        ensemble = Ensemble.init(build, self.members, seed=0)
        return ensemble.to(*destination(ensemble, self.device, self.precision))

    def data(self) -> tuple[Tensor, Tensor]:
        """Inputs and labels on the device."""
        tokens = self.network.classes if self.network.tokens else None
        where = str(self.device), self.dtype
        return random_data(self.network.input_shape, self.points, *where, tokens)

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
    given = dict(
        method=chosen, legacy=legacy, strength=strength, prior=prior, likelihood="categorical",
        optimizer=case.optimizer, lr=case.lr, batch_size=case.batch_size, steps=steps,
        precision=case.precision, engine=engine,
    )  # fmt: skip
    settings = Settings.resolve(Options.of(given))
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

    def loss(self, module: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        """Cross entropy of one member."""
        low = self.case.precision == "bfloat16"
        kind = self.case.device.type
        with torch.autocast(kind, torch.bfloat16) if low else nullcontext():
            outputs = module(x)
        outputs = outputs.float() if low else outputs
        return F.cross_entropy(outputs.flatten(0, -2), y.flatten())


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

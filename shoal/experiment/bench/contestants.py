"""The timed workloads: training by Shoal, a plain loop over modules, bare matrix products."""

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import count, pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shoal.core.errors import ConfigError
from shoal.core.random import generator
from shoal.core.registry import nearest
from shoal.data.sources import ArrayBatches
from shoal.experiment.variants import parse_method
from shoal.inference.adapters import last_layer, lora
from shoal.inference.ensemble import Ensemble
from shoal.inference.initialise import Build
from shoal.inference.priors import WeightPrior
from shoal.interaction.methods import Method
from shoal.models.blueprint import Architecture, Blueprint
from shoal.models.cnn import SmallCNN
from shoal.models.mlp import MLP
from shoal.models.resnet import ResNet18
from shoal.models.vit import ViT
from shoal.training.options import Options
from shoal.training.prepare import destination, prepared
from shoal.training.settings import Settings
from shoal.training.trainer import Trainer

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

CLASSES = 10


@dataclass(frozen=True)
class Network:
    """A network with its default sizes.

    Attributes:
        name: what to type.
        architecture: what to build.
        input_shape: shape of one input.
        members: M.
        batches: full batches per epoch.
        precision: default precision.
        layers: widths from input to output, for a network of matrix products only.
        adapt: turns one frozen network into a factory of members that share it; None for members
            that are networks of their own.
    """

    name: str
    architecture: Architecture
    input_shape: tuple[int, ...]
    members: int = 20
    batches: int = 100
    precision: str = "float32"
    layers: tuple[int, ...] | None = None
    adapt: Callable[[nn.Module], Build] | None = None

    @property
    def blueprint(self) -> Blueprint:
        """Builds one member."""
        return Blueprint(self.architecture, self.input_shape, CLASSES)


def perceptron(width: int = 100) -> Network:
    """The perceptron 784-100-100-100-10 of published studies, or one of another width."""
    hidden = (width, width, width)
    return Network("mlp", MLP(hidden), (784,), batches=468, layers=(784, *hidden, CLASSES))


def _low_rank(module: nn.Module) -> Build:
    return lora(module, rank=4, targets=("blocks.*",))


def _on_a_trunk(
    name: str, architecture: Architecture, members: int, adapt: Callable[[nn.Module], Build]
) -> Network:
    return Network(name, architecture, (3, 32, 32), members, 20, "bfloat16", adapt=adapt)


NETWORKS = {
    "mlp": perceptron(),
    "small-cnn": Network("small-cnn", SmallCNN(), (1, 28, 28)),
    "resnet18": Network("resnet18", ResNet18(), (3, 32, 32), 10, 20, precision="bfloat16"),
    "resnet18-bare": Network(
        "resnet18-bare", ResNet18(norm=None), (3, 32, 32), 10, 20, precision="bfloat16"
    ),
    "vit": Network("vit", ViT(), (3, 32, 32), 10, 20, precision="bfloat16"),
    "vit-heads": _on_a_trunk("vit-heads", ViT(), 100, last_layer),
    "vit-lora": _on_a_trunk("vit-lora", ViT(), 100, _low_rank),
    "vit-base-lora": _on_a_trunk(
        "vit-base-lora", ViT(width=768, depth=12, heads=12), 16, _low_rank
    ),
}
"""The networks of `shoal bench`; a bare network has no normalisation.

Members of the last three share a frozen transformer. Each has a head of its own, or adapters of
rank 4 in all linear layers of the blocks and a head.
"""


def network(name: str) -> Network:
    """The network called `name`."""
    if name not in NETWORKS:
        raise ConfigError(f"there is no model {name!r} to measure; {nearest(name, NETWORKS)}")
    return NETWORKS[name]


@functools.lru_cache(maxsize=1)
def random_data(
    input_shape: tuple[int, ...], points: int, device: str, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Normal inputs and uniform labels, since the time does not depend on their values."""
    random = generator(0, "bench")
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
        return random_data(self.network.input_shape, self.points, str(self.device), self.dtype)

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
        torch.set_num_threads(self.trainer.try_out())
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
        return F.cross_entropy(outputs.float() if low else outputs, y)


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

"""The plan of a benchmark, from the options and the defaults of the device."""

from argparse import Namespace
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from shoal.core.devices import usable_device
from shoal.core.errors import ConfigError
from shoal.core.registry import nearest
from shoal.experiment.bench.battery import Case, Contestant, contestants
from shoal.experiment.bench.networks import NETWORKS, Network
from shoal.experiment.bench.zoo import find_network
from shoal.training.mover.prepare import PRECISIONS

__all__ = ["BenchPlan", "find_device"]

_MODELS = {"cpu": "mlp,small-cnn", "cuda": "mlp,small-cnn,resnet18"}
_ENGINES = {"cpu": "auto,vmap,loop", "cuda": "auto,auto+compile,vmap+eager,loop"}
_SECONDS = {"cpu": 5.0, "cuda": 2.0}
_QUICK_BATCHES = 8
_PREDICTED_BATCHES = 100
"""Most batches per call of `predict`; inputs of all of them are in memory."""


@dataclass(frozen=True)
class BenchPlan:
    """The settings of a benchmark.

    Attributes:
        device: device to measure.
        models: names of networks.
        methods: names of methods.
        engines: names of engines.
        precisions: precisions for each network; if empty, that of the network.
        members: M; None takes that of the network.
        batch_size: B; None takes that of the network.
        optimizer: name in torch.
        seconds: seconds per row of the table.
        quick: less data, to check that everything runs.
        predict: time predictions instead of training steps.
        batches: "common", "own" or both.
        fit: time whole calls of `fit` instead of blocks of steps.
    """

    device: str
    models: tuple[str, ...]
    methods: tuple[str, ...]
    engines: tuple[str, ...]
    precisions: tuple[str, ...] = ()
    members: int | None = None
    batch_size: int | None = None
    optimizer: str = "sgd"
    seconds: float = 5.0
    quick: bool = False
    predict: bool = False
    batches: tuple[str, ...] = ("common",)
    fit: bool = False

    @classmethod
    def of(cls, options: Namespace) -> "BenchPlan":
        """The plan of the command line options."""
        device = find_device(options.device)
        kind = "cuda" if device.type == "cuda" else "cpu"
        models = options.models or _MODELS[kind]
        if options.fit and options.predict:
            raise ConfigError("--fit times training and --predict predictions; type one of them")
        for name in ("members", "batch_size", "seconds"):
            value = getattr(options, name)
            if value is not None and value <= 0:
                raise ConfigError(f"--{name.replace('_', '-')} must be positive, not {value}")
        for precision in _names(options.precision or ""):
            if precision not in PRECISIONS:
                raise ConfigError(
                    f"there is no precision '{precision}'; {nearest(precision, PRECISIONS)}"
                )
        return cls(
            str(device),
            () if models == "none" else _names(models),
            _names(options.methods or "ensemble,kde,f-kde"),
            _names(options.engines or ("auto" if options.fit else _ENGINES[kind])),
            _names(options.precision or ""),
            options.members,
            options.batch_size or (1024 if options.predict and kind == "cuda" else None),
            options.optimizer,
            options.seconds or (0.2 if options.quick else _SECONDS[kind]),
            options.quick,
            options.predict,
            _names(options.batches),
            options.fit,
        )

    def batteries(self) -> list[list[Contestant]]:
        """Workloads that are timed in turns: all workloads of a network in one precision.

        On a GPU convolutional networks are timed one engine at a time, since the activations of all
        engines would not fit.
        """
        batteries = []
        for model in map(find_network, self.models):
            separate = self.device != "cpu" and model.layers is None
            engines = [(engine,) for engine in self.engines] if separate else [self.engines]
            for precision in self.precisions or (model.precision,):
                case = self.case(model, precision)
                batteries += [
                    contestants(case, self.methods, some, self.batches) for some in engines
                ]
        return batteries

    def predictions(self) -> list[Case]:
        """The prediction problems: every network in every precision."""
        cases = []
        for model in map(find_network, self.models):
            few = replace(model, batches=min(model.batches, _PREDICTED_BATCHES))
            kinds = self.precisions or (model.precision,)
            cases += [self.case(few, precision) for precision in kinds]
        return cases

    def case(self, model: Network, precision: str, points: int | None = None) -> Case:
        """One network in one precision."""
        batches = _QUICK_BATCHES if self.quick else model.batches
        size = self.batch_size or model.batch_size
        return Case(
            network=model,
            members=self.members or model.members,
            batch_size=size,
            precision=precision,
            optimizer=self.optimizer,
            device=torch.device(self.device),
            points=points or batches * size,
            batches=self.batches[0],
        )

    def whole_training(self) -> list[Case]:
        """60,000 points for the perceptron, in every requested precision."""
        model = NETWORKS["mlp"]
        points = 10 * (self.batch_size or model.batch_size) if self.quick else 60_000
        return [self.case(model, p, points) for p in self.precisions or (model.precision,)]

    def settings(self) -> dict[str, Any]:
        """As plain values."""
        return asdict(self)


def find_device(name: str | None) -> torch.device:
    """The device called `name`; by default a GPU if there is one."""
    return usable_device(name or ("cuda" if torch.cuda.is_available() else "cpu"))


def _names(text: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(word.strip() for word in text.split(",") if word.strip()))

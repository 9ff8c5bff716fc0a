"""The networks that are measured, and random data for them."""

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from shoal.core.errors import ConfigError
from shoal.core.registry import nearest
from shoal.core.seeds import generator
from shoal.models.blueprint import Architecture, Blueprint
from shoal.models.cnn import SmallCNN
from shoal.models.mlp import MLP
from shoal.models.resnet import ResNet18

__all__ = ["CLASSES", "NETWORKS", "Network", "network", "perceptron", "random_data"]

CLASSES = 10


@dataclass(frozen=True)
class Network:
    """A network with the sizes at which it is usually measured.

    Attributes:
        name: what to type.
        architecture: what to build.
        input_shape: of one input.
        members: M.
        batches: in an epoch; every batch is full.
        precision: what it is usually trained in.
        layers: widths from input to output, when it is nothing but matrix products.
    """

    name: str
    architecture: Architecture
    input_shape: tuple[int, ...]
    members: int = 20
    batches: int = 100
    precision: str = "float32"
    layers: tuple[int, ...] | None = None

    @property
    def blueprint(self) -> Blueprint:
        """Builds one member."""
        return Blueprint(self.architecture, self.input_shape, CLASSES)


def perceptron(width: int = 100) -> Network:
    """The perceptron 784-100-100-100-10 of published studies, or one of another width."""
    hidden = (width, width, width)
    return Network("mlp", MLP(hidden), (784,), batches=468, layers=(784, *hidden, CLASSES))


NETWORKS = {
    "mlp": perceptron(),
    "small-cnn": Network("small-cnn", SmallCNN(), (1, 28, 28)),
    "resnet18": Network("resnet18", ResNet18(), (3, 32, 32), 10, 20, precision="bfloat16"),
    "resnet18-bare": Network(
        "resnet18-bare", ResNet18(norm=None), (3, 32, 32), 10, 20, precision="bfloat16"
    ),
}
"""What `shoal bench` can measure; a bare network has no normalisation."""


def network(name: str) -> Network:
    """The network called `name`."""
    if name not in NETWORKS:
        raise ConfigError(f"there is no model {name!r} to measure; {nearest(name, NETWORKS)}")
    return NETWORKS[name]


@functools.lru_cache(maxsize=1)
def random_data(
    input_shape: tuple[int, ...], points: int, device: str, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Normal inputs and uniform labels: what is timed does not depend on what they mean."""
    random = generator(0, "bench")
    x = torch.randn(points, *input_shape, generator=random)
    y = torch.randint(0, CLASSES, (points,), generator=random)
    return x.to(device, dtype), y.to(device)

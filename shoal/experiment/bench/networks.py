"""The networks that `shoal bench` times, with their default sizes."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import nn

from shoal.core.errors import ConfigError
from shoal.core.registry import nearest
from shoal.experiment.bench.sequences import (
    CausalTransformer,
    EncoderViT,
    RecurrentReader,
    SequenceCNN,
)
from shoal.inference.adapters import last_layer, lora
from shoal.inference.initialise import Build
from shoal.models.blueprint import Architecture, Blueprint
from shoal.models.cnn import SmallCNN
from shoal.models.mlp import MLP
from shoal.models.resnet import ResNet18
from shoal.models.vit import ViT

__all__ = ["CLASSES", "NETWORKS", "Network", "network", "perceptron"]

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
        classes: number of outputs; for tokens, the size of the vocabulary.
        tokens: inputs are tokens, and every token has a target.
    """

    name: str
    architecture: Architecture
    input_shape: tuple[int, ...]
    members: int = 20
    batches: int = 100
    precision: str = "float32"
    layers: tuple[int, ...] | None = None
    adapt: Callable[[nn.Module], Build] | None = None
    classes: int = CLASSES
    tokens: bool = False

    @property
    def blueprint(self) -> Blueprint:
        """Builds one member."""
        return Blueprint(self.architecture, self.input_shape, self.classes)


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


def _on_sequences(name: str, architecture: Architecture, shape: tuple[int, ...]) -> Network:
    return Network(name, architecture, shape, 10, 20, "bfloat16")


NETWORKS = {
    "mlp": perceptron(),
    "small-cnn": Network("small-cnn", SmallCNN(), (1, 28, 28)),
    "resnet18": Network("resnet18", ResNet18(), (3, 32, 32), 10, 20, precision="bfloat16"),
    "resnet18-bare": Network(
        "resnet18-bare", ResNet18(norm=None), (3, 32, 32), 10, 20, precision="bfloat16"
    ),
    "vit": Network("vit", ViT(), (3, 32, 32), 10, 20, precision="bfloat16"),
    "vit-encoder": Network("vit-encoder", EncoderViT(), (3, 32, 32), 10, 20, "bfloat16"),
    "vit-heads": _on_a_trunk("vit-heads", ViT(), 100, last_layer),
    "vit-lora": _on_a_trunk("vit-lora", ViT(), 100, _low_rank),
    "vit-base-lora": _on_a_trunk(
        "vit-base-lora", ViT(width=768, depth=12, heads=12), 16, _low_rank
    ),
    "gru": _on_sequences("gru", RecurrentReader("gru"), (64, 32)),
    "lstm": _on_sequences("lstm", RecurrentReader("lstm"), (64, 32)),
    "cnn1d": _on_sequences("cnn1d", SequenceCNN(), (32, 256)),
    "gpt2": Network(
        "gpt2", CausalTransformer(), (128,), 10, 20, "bfloat16", classes=256, tokens=True
    ),
}
"""The networks of `shoal bench`; a bare network has no normalisation.

Members of `vit-heads`, `vit-lora` and `vit-base-lora` share a frozen transformer. Each has a head,
or adapters of rank 4 in all linear layers of the blocks and a head. `gpt2` has outputs per token.
"""


def network(name: str) -> Network:
    """The network called `name`."""
    if name not in NETWORKS:
        raise ConfigError(f"there is no model {name!r} to measure; {nearest(name, NETWORKS)}")
    return NETWORKS[name]

"""Networks of torchvision and transformers, which `shoal bench` times by their names there.

    shoal bench --fit --models torchvision:resnet50,transformers:llama

The weights are random. The library is imported when one of its networks is asked for.
"""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from torch import nn

from shoal.core.errors import ConfigError
from shoal.core.optional import require
from shoal.core.registry import nearest
from shoal.experiment.bench.networks import Network, network

__all__ = ["Torchvision", "Transformer", "find_network"]

IMAGE, VIDEO, TOKENS = (3, 224, 224), (3, 16, 112, 112), (128,)


def find_network(name: str) -> Network:
    """The network of the bench called `name`, or that of a library: `torchvision:resnet50`."""
    library, colon, kind = name.partition(":")
    if not colon:
        return network(name)
    if library not in _LIBRARIES:
        raise ConfigError(f"there are no networks of {library!r}; {nearest(library, _LIBRARIES)}")
    return _LIBRARIES[library](name, kind, require(library))


def _sized(name: str, architecture: Any, shape: tuple[int, ...], **more: Any) -> Network:
    return Network(name, architecture, shape, 5, 40, "bfloat16", batch_size=16, **more)


@dataclass(frozen=True)
class Torchvision:
    """A network of torchvision.

    Attributes:
        name: its name in `torchvision.models.list_models()`.
    """

    name: str

    def build(self, input_shape: tuple[int, ...], outputs: int) -> nn.Module:
        """A freshly initialised network; its own classifier has this number of outputs."""
        models = importlib.import_module("torchvision.models")
        parts = {"weights_backbone": None} if ".segmentation." in _module(self.name) else {}
        return models.get_model(self.name, weights=None, num_classes=outputs, **parts)


def _of_torchvision(name: str, kind: str, library: ModuleType) -> Network:
    models = importlib.import_module("torchvision.models")
    _check(name, kind, models.list_models())
    module, architecture = _module(kind), Torchvision(kind)
    if any(f".{field}." in module for field in ("detection", "optical_flow", "quantization")):
        raise ConfigError(
            f"'{name}' has outputs or a loss of its own; "
            f"type a network for classes or segmentation, such as torchvision:resnet50"
        )
    if ".video." in module:
        return _sized(name, architecture, VIDEO)
    places = IMAGE[1:] if ".segmentation." in module else ()
    return _sized(name, architecture, IMAGE, places=places)


def _module(name: str) -> str:
    models = importlib.import_module("torchvision.models")
    return models.get_model_builder(name).__module__ + "."


@dataclass(frozen=True)
class Transformer:
    """A small network of transformers: a classifier of images or texts, or a language model.

    Attributes:
        name: its type in transformers, such as `bert`.
        task: the class of transformers that builds it.
        width: length of an embedding.
        depth: number of blocks.
        heads: attention heads of a block.
        settings: further settings of its config.
    """

    name: str
    task: str
    width: int = 256
    depth: int = 4
    heads: int = 4
    settings: tuple[tuple[str, Any], ...] = ()

    def build(self, input_shape: tuple[int, ...], outputs: int) -> nn.Module:
        """A freshly initialised network."""
        transformers = importlib.import_module("transformers")
        return getattr(transformers, self.task).from_config(self.config(input_shape, outputs))

    def config(self, input_shape: tuple[int, ...], outputs: int) -> Any:
        """The config of transformers."""
        transformers = importlib.import_module("transformers")
        # Types have names of their own for some sizes; a config keeps those that it does not know.
        sizes = {
            "hidden_size": self.width, "num_hidden_layers": self.depth,
            "num_attention_heads": self.heads, "num_key_value_heads": self.heads,
            "intermediate_size": 4 * self.width, "hidden_dim": 4 * self.width,
        }  # fmt: skip
        kind = {"vocab_size": outputs} if self.task == _LANGUAGE else {"num_labels": outputs}
        kind |= {"use_cache": False} if self.task == _LANGUAGE else {}
        kind |= {"image_size": input_shape[-1]} if len(input_shape) == 3 else {}
        return transformers.AutoConfig.for_model(self.name, **sizes, **kind, **dict(self.settings))


_IMAGES, _TEXTS = "AutoModelForImageClassification", "AutoModelForSequenceClassification"
_LANGUAGE = "AutoModelForCausalLM"


def _of_transformers(name: str, kind: str, library: ModuleType) -> Network:
    auto = importlib.import_module("transformers.models.auto.configuration_auto")
    _check(name, kind, auto.CONFIG_MAPPING_NAMES)
    tasks = importlib.import_module("transformers.models.auto.modeling_auto")
    if kind in tasks.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES:
        return _sized(name, Transformer(kind, _IMAGES), IMAGE)
    words = getattr(library.AutoConfig.for_model(kind), "vocab_size", None)
    if kind in tasks.MODEL_FOR_MASKED_LM_MAPPING_NAMES:
        return _sized(name, Transformer(kind, _TEXTS), TOKENS, words=words)
    if kind in tasks.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        model = Transformer(kind, _LANGUAGE)
        return _sized(name, model, TOKENS, words=words, places=TOKENS, classes=words)
    raise ConfigError(
        f"'{name}' classifies neither images nor texts and is no language model; "
        f"type one that does, such as transformers:vit, transformers:bert or transformers:llama"
    )


def _check(name: str, kind: str, known: Any) -> None:
    if kind not in known:
        library = name.partition(":")[0]
        raise ConfigError(f"{library} has no network {kind!r}; {nearest(kind, known)}")


_LIBRARIES: dict[str, Callable[[str, str, ModuleType], Network]] = {
    "torchvision": _of_torchvision,
    "transformers": _of_transformers,
}

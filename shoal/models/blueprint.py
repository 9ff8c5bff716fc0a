"""A blueprint: an architecture with input shape and outputs, a factory that a run can store."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from shoal.core.errors import ConfigError
from shoal.core.registry import Registry
from shoal.core.values import check_value

__all__ = ["Architecture", "Blueprint", "registry"]

registry = Registry("model")


class Architecture(Protocol):
    """Settings of a network that do not depend on the data."""

    def build(self, input_shape: tuple[int, ...], outputs: int) -> nn.Module:
        """A freshly initialised network."""
        ...


@dataclass(frozen=True)
class Blueprint:
    """A callable that builds the network; `spec` is the table that describes the blueprint.

    Attributes:
        architecture: the architecture.
        input_shape: shape of one input.
        outputs: number of outputs.
    """

    architecture: Architecture
    input_shape: tuple[int, ...]
    outputs: int

    def __call__(self) -> nn.Module:
        return self.architecture.build(self.input_shape, self.outputs)

    @property
    def spec(self) -> dict[str, Any]:
        """Name, settings and sizes, as plain values."""
        sizes = {"input_shape": list(self.input_shape), "outputs": self.outputs}
        return registry.spec(self.architecture) | sizes

    def numbers(self) -> int:
        """Count of the network's numbers, computed without allocating them."""
        try:
            with torch.device("meta"):
                module = self()
        except (AttributeError, OverflowError, RuntimeError, TypeError) as error:
            reason = str(error).strip().partition("\n")[0]
            raise ConfigError(f"the network cannot be made ({reason}); change its sizes") from error
        return sum(tensor.numel() for tensor in [*module.parameters(), *module.buffers()])

    @classmethod
    def from_spec(cls, spec: Mapping[str, Any]) -> "Blueprint":
        """The inverse of `spec`."""
        settings = dict(spec)
        input_shape, outputs = settings.pop("input_shape"), settings.pop("outputs")
        check_value("model.input_shape", input_shape, tuple[int, ...])
        check_value("model.outputs", outputs, int)
        if min([outputs, *input_shape]) < 1:
            raise ConfigError(
                f"a network has inputs and outputs, not shape {input_shape} and {outputs} outputs"
            )
        return cls(registry.make(settings), tuple(input_shape), outputs)

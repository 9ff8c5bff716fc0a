"""A blueprint: an architecture with input shape and outputs, a factory that a run can store."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from shoal.core.errors import ConfigError
from shoal.core.registry import Registry
from shoal.core.values import check_value, describe_value

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

    def __post_init__(self) -> None:
        made = registry.make(self.architecture)
        if not hasattr(made, "build") or isinstance(made, type):
            came = describe_value(made)
            raise ConfigError(
                f"architecture must be one of shoal.models, such as MLP(), not {came}"
            )
        object.__setattr__(self, "architecture", made)
        check_value("input_shape", self.input_shape, tuple[int, ...])
        check_value("outputs", self.outputs, int)
        if min([self.outputs, *self.input_shape]) < 1:
            raise ConfigError(
                f"a network has inputs and outputs, not shape {self.input_shape} and "
                f"{self.outputs} outputs"
            )

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
        return cls(registry.make(settings), tuple(input_shape), outputs)

"""Members with private last layers on a trunk that all members train together."""

from collections import OrderedDict
from dataclasses import dataclass

from torch import nn

from shoal.core.errors import ConfigError
from shoal.core.registry import nested_field
from shoal.models.blueprint import Architecture, registry
from shoal.models.mlp import MLP
from shoal.models.rank_one import check_plain

__all__ = ["MultiHead"]


@registry.register("multi-head", cite=("lee2015m",))
@dataclass(frozen=True)
class MultiHead:
    """Private last layers on a shared trunk, f_i(x) = h_i(g(x)).

    The trunk g is computed once for all members and trained by all of them. Lee et al. (2015),
    arXiv 1511.06314.

    >>> network = MultiHead(MLP(hidden=(7,))).build((2,), 3)
    >>> network.shared_tensors, network.head
    (('trunk.*',), Linear(in_features=7, out_features=3, bias=True))

    Attributes:
        trunk: the architecture, such as `mlp` or `small-cnn`; its last layer is the head.
    """

    trunk: Architecture = nested_field(registry, MLP)

    def __post_init__(self) -> None:
        check_plain("multi-head", self.trunk)

    def build(self, input_shape: tuple[int, ...], outputs: int) -> nn.Module:
        """A freshly initialised network: one member."""
        network = self.trunk.build(input_shape, outputs)
        if not isinstance(network, nn.Sequential) or not list(network[:-1].parameters()):
            raise ConfigError(
                "multi-head needs a network with layers before its last one, such as 'mlp'; "
                "choose another trunk"
            )
        parts = OrderedDict(trunk=network[:-1], head=network[-1])
        whole = nn.Sequential(parts)
        whole.shared_tensors = ("trunk.*",)  # pyright: ignore
        return whole

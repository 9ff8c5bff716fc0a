"""Which mapping suits an ensemble where it lies, when nobody has measured."""

from collections.abc import Sequence

import torch
from torch import nn

from shoal.inference.group import Group
from shoal.inference.mapping import Mapping

__all__ = ["STREAMS", "has_batch_norm", "has_convolutions", "suited_mapping"]

STREAMS = 10
"""Members with convolutions that are under way at a time on a GPU."""


def suited_mapping(groups: Sequence[Group], device: torch.device) -> Mapping:
    """All members together; on a GPU those with convolutions one after another on several streams.

    There a convolution for each member is faster than a grouped one for all.
    """
    if device.type == "cuda" and has_convolutions(groups):
        return Mapping("loop", streams=STREAMS)
    return Mapping()


def has_convolutions(groups: Sequence[Group]) -> bool:
    """Any member convolves."""
    return _has(groups, nn.modules.conv._ConvNd)


def has_batch_norm(groups: Sequence[Group]) -> bool:
    """Any member couples the points of a batch by their statistics."""
    return _has(groups, nn.modules.batchnorm._BatchNorm)


def _has(groups: Sequence[Group], kinds: type[nn.Module]) -> bool:
    return any(isinstance(layer, kinds) for g in groups for layer in g.skeleton.modules())

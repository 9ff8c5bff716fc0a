"""Which mapping suits an ensemble where it lies, when nobody has measured."""

from torch import nn

from shoal.inference.ensemble import Ensemble
from shoal.inference.mapping import Mapping

__all__ = ["STREAMS", "has_batch_norm", "has_convolutions", "suited_mapping"]

STREAMS = 10
"""Members with convolutions that are under way at a time on a GPU."""


def suited_mapping(ensemble: Ensemble) -> Mapping:
    """All members together; on a GPU those with convolutions one after another on several streams.

    There a convolution for each member is faster than a grouped one for all.
    """
    if ensemble.device.type == "cuda" and has_convolutions(ensemble):
        return Mapping("loop", streams=STREAMS)
    return Mapping()


def has_convolutions(ensemble: Ensemble) -> bool:
    """Any member convolves."""
    return _has(ensemble, nn.modules.conv._ConvNd)


def has_batch_norm(ensemble: Ensemble) -> bool:
    """Any member couples the points of a batch by their statistics."""
    return _has(ensemble, nn.modules.batchnorm._BatchNorm)


def _has(ensemble: Ensemble, kinds: type[nn.Module]) -> bool:
    return any(isinstance(layer, kinds) for g in ensemble.groups for layer in g.skeleton.modules())

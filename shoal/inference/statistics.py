"""Batch normalisation with the statistics that it will predict with."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch.nn.modules.batchnorm import _BatchNorm

from shoal.inference.ensemble import Ensemble

__all__ = ["running_statistics"]


@contextmanager
def running_statistics(ensemble: Ensemble) -> Iterator[None]:
    """A block in which batches are normalised by running statistics, which stay as they are.

    Everything else, such as dropout, is as before. Layers that keep no statistics go on with those
    of the batch.
    """
    layers = [
        layer
        for group in ensemble.groups
        for layer in group.skeleton.modules()
        if isinstance(layer, _BatchNorm) and layer.training and layer.running_mean is not None
    ]
    for layer in layers:
        layer.training = False
    try:
        yield
    finally:
        for layer in layers:
            layer.training = True

"""Running statistics of batch normalisation for weights that were never trained themselves.

The statistics of a solution do not belong to a point beside it: without new ones a network with
batch normalisation looks far worse there than it is. Izmailov et al. (2018), arXiv 1803.05407.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from shoal.analysis.landscape.points import only_group
from shoal.inference.ensemble import Ensemble

__all__ = ["batch_norms", "refresh", "using_batch_statistics"]


def batch_norms(ensemble: Ensemble) -> list[nn.Module]:
    """The layers that carry running statistics."""
    layers = only_group(ensemble).skeleton.modules()
    return [m for m in layers if isinstance(m, _BatchNorm) and m.track_running_stats]


@contextmanager
def using_batch_statistics(ensemble: Ensemble) -> Iterator[list[nn.Module]]:
    """Batch normalisation as in training, and everything else, such as dropout, as in use."""
    layers = batch_norms(ensemble)
    before = [(layer.training, layer.momentum) for layer in layers]
    for layer in layers:
        layer.train()
    try:
        yield layers
    finally:
        for layer, (mode, momentum) in zip(layers, before, strict=True):
            layer.train(mode)
            layer.momentum = momentum  # pyright: ignore


def refresh(ensemble: Ensemble, x: Tensor, batch_size: int = 256) -> Ensemble:
    r"""Give every member the statistics of its own activations on `x`, in place.

    Means and variances of the batches are averaged as they come, $m_k = m_{k-1} + (b_k -
    m_{k-1})/k$, so that nothing but the statistics is stored. Without batch normalisation nothing
    happens.
    """
    with torch.no_grad(), using_batch_statistics(ensemble) as layers:
        if not layers:
            return ensemble
        # A last batch of one or two inputs would count as much as a whole one.
        full = max(len(x) // batch_size, 1) * batch_size
        for count, batch in enumerate(x[:full].split(batch_size), start=1):
            for layer in layers:
                layer.momentum = 1 / count  # pyright: ignore
            ensemble(batch.to(ensemble.device, ensemble.dtype))
    return ensemble

r"""Are the members where the theory wants them: at the top of their log posterior?

Point masses maximise the evidence only at maximisers of the likelihood, and a penalised training
ends at maximisers of the posterior. The check is the length of $∇ \log p(θ_m | D) / N$.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from shoal.core.tree import add_scaled, member_norms
from shoal.core.types import Tree
from shoal.data.dataset import Split
from shoal.inference.ensemble import Ensemble
from shoal.inference.posterior import Posterior
from shoal.training.step import Batch, forces

__all__ = ["gradient_norms"]


def gradient_norms(
    ensemble: Ensemble, posterior: Posterior, data: Split, batch_size: int = 1024
) -> Tensor:
    """Length of the gradient of log p(theta | D) / N for each member [M], over all the data.

    Args:
        ensemble: the members; they run as in prediction, and come back in the mode they were in.
        posterior: likelihood and prior, with N = len(data).
        data: what the members were trained on, with targets.
        batch_size: points that go through the members at once.
    """
    training = ensemble.training
    ensemble.train(False)
    total: Tree | None = None
    try:
        for x, y in _batches(ensemble, data, batch_size):
            drive, _ = forces(ensemble, posterior, None, (x, y))
            # each batch has the whole prior in it, and these shares sum to one
            share = len(x) / len(data)
            total = add_scaled(
                {n: torch.zeros_like(t) for n, t in drive.items()} if total is None else total,
                drive,
                share,
            )
    finally:
        ensemble.train(training)
    assert total is not None, "a split has at least one point"
    return member_norms(total, ensemble.spans).cpu()


def _batches(ensemble: Ensemble, data: Split, batch_size: int) -> Iterator[Batch]:
    assert data.y is not None, "the evidence of data without targets is not asked for"
    for x, y in zip(data.x.split(batch_size), data.y.split(batch_size), strict=True):
        x = x.to(ensemble.device, ensemble.dtype if x.is_floating_point() else None)
        yield x, y.to(ensemble.device)

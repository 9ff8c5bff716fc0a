"""The score of a functional prior, from networks drawn anew at each step."""

import torch
from torch import Tensor

from shoal.core.random import hashed, key, uniform
from shoal.inference.ensemble import Ensemble
from shoal.inference.mapping import Mapping
from shoal.inference.posterior import Posterior
from shoal.inference.priors import FunctionalPrior, GaussianProcess, WeightPrior

__all__ = ["functional_score"]


def functional_score(
    ensemble: Ensemble,
    posterior: Posterior,
    outputs: Tensor,
    x: Tensor,
    seed: int,
    step: int | Tensor,
) -> Tensor | None:
    """Gradient of log p(f) / N at the outputs [M, B, C]; None when the prior is on the weights."""
    prior = posterior.prior
    if not isinstance(prior, FunctionalPrior):
        return None
    start = key(seed, "prior", step, ensemble.device)
    seen = _places(ensemble, prior, outputs, start)
    draws = _drawn_outputs(ensemble, prior.weights, prior.draws, x[seen], start)
    score = prior.score_outputs(outputs[:, seen], draws, ensemble.alive) / posterior.n
    if isinstance(seen, slice):
        return score
    return torch.zeros_like(outputs).index_copy(1, seen, score)


def _places(
    ensemble: Ensemble, prior: FunctionalPrior, outputs: Tensor, start: Tensor
) -> Tensor | slice:
    """Which points of the batch a Gaussian process sees: no more than the weights can fill.

    A network of D weights with C outputs fills no more than D / C points freely. On more points a
    process of full rank would count the same weights again and again; on any D / C of them it is
    the weight prior itself, when the network is linear.
    """
    _, B, C = outputs.shape
    weights = [sum(t[0].numel() for t in group.weights.values()) for group in ensemble.groups]
    points = max(min(weights) // C, 1)
    if not isinstance(prior, GaussianProcess) or points >= B:
        return slice(None)
    return uniform(hashed(start - 1), (B,)).argsort()[:points]


@torch.no_grad()
def _drawn_outputs(
    ensemble: Ensemble,
    prior: WeightPrior,
    draws: int | None,
    x: Tensor,
    start: Tensor,
) -> Tensor:
    outputs = []
    for index, group in enumerate(ensemble.groups):
        count = group.members if draws is None else draws
        weights = prior.draw(group.weights, count, hashed(start + index))
        # A drawn network has seen no data: its running statistics are those it was built with.
        fresh = dict(group.prototype.named_buffers())
        buffers = {
            name: fresh.get(name, tensor[0]).expand(count, *tensor.shape[1:])
            for name, tensor in group.buffers.items()
        }
        keys = torch.zeros(count, dtype=torch.int64, device=x.device)
        state = weights | buffers | dict.fromkeys(group.keys, keys)
        training = group.skeleton.training
        group.skeleton.eval()
        mapping = Mapping("loop" if group.must_loop else "vmap")
        outputs.append(mapping(group.skeleton, state, x, False))
        group.skeleton.train(training)
    return torch.cat(outputs)

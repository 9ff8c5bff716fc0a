"""The score of a functional prior, from networks drawn anew at each step."""

import torch
from torch import Tensor

from shoal.core.random import hashed, key
from shoal.inference.ensemble import Ensemble
from shoal.inference.mapping import Mapping
from shoal.inference.posterior import Posterior
from shoal.inference.priors import FunctionalPrior, WeightPrior

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
    draws = _drawn_outputs(ensemble, prior.weights, prior.draws, x, start)
    return prior.score_outputs(outputs, draws, ensemble.alive) / posterior.n


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

r"""The softmax form of released code: drives, prior and push all act on the probabilities.

With $p_i = \mathrm{softmax}(f_i)$ the released code of D'Angelo & Fortuin (2021), arXiv 2106.11642,
takes every force at p and pulls their sum back through the softmax of the same member,

$$ v_i = (∂p_i / ∂θ_i)^T \Big[ \sum_j mix_{ij} \big( ∇_p \log p(y | p_j) + ∇_p \log π(p_j) \big)
- (T / N) \, strength \, \sum_j B_{ij} p_j \Big]. $$

The likelihood is log(p_y + 1e-15). In a Wasserstein flow its pull-back equals the gradient at the
outputs, as long as p_y is far above 1e-15. A Stein flow mixes gradients of size 1 / p_y: members
that are wrong dominate the others.
"""

import torch
from torch import Tensor

from shoal.core.differentiate import with_pullback
from shoal.core.tree import finite, per_member
from shoal.core.types import Tree
from shoal.data.batches.batch import Targets
from shoal.inference.posterior import Posterior
from shoal.interaction.points import Batch
from shoal.interaction.repulsion import Repulsion
from shoal.interaction.spaces import Outputs

__all__ = ["act_on_probabilities", "at_outputs", "forces_act_at", "likelihood_gradient"]


def act_on_probabilities(posterior: Posterior, repulsion: Repulsion | None) -> bool:
    """Whether all forces act on the probabilities: published form, of classes, at the batch."""
    if repulsion is None or not isinstance(repulsion.space, Outputs):
        return False
    released = repulsion.space.probabilities and repulsion.space.published
    at_batch = isinstance(repulsion.points, Batch)
    return released and at_batch and posterior.likelihood.about.has_classes


def forces_act_at(outputs: Tensor, squashed: bool) -> Tensor:
    """Where forces act [M, B, C]: the outputs, or their probabilities."""
    return outputs.softmax(-1) if squashed else outputs


def likelihood_gradient(
    posterior: Posterior, at: Tensor, y: Targets, alive: Tensor, squashed: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Loss [M], finite members [M], and the gradient of the log-likelihood [M, B, C].

    Outputs log(p + 1e-15) have the probabilities p. Their normalisation adds the same number to
    the gradient of every class, which `at_outputs` removes.

    Args:
        posterior: has the likelihood.
        at: outputs [M, B, C], or their probabilities if `squashed`.
        y: targets.
        alive: which members were finite [M].
        squashed: the gradient is that at the probabilities.
    """

    def log_likelihood(tree: Tree) -> list[Tensor]:
        outputs = (tree["at"] + 1e-15).log() if squashed else tree["at"]
        return [posterior.log_likelihood(outputs, y)]

    (value,), pull = with_pullback(log_likelihood, {"at": at})
    gradient = pull([torch.ones_like(value)])["at"]
    alive = alive & finite(value)
    return -value, alive, torch.where(per_member(alive, gradient), gradient, 0.0)


def at_outputs(probabilities: Tensor, cotangent: Tensor) -> Tensor:
    """The cotangent at p pulled back through the softmax: p (c - sum p c)."""
    return probabilities * (cotangent - (probabilities * cotangent).sum(-1, keepdim=True))

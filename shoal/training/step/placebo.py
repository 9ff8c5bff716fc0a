r"""The placebo of a repulsion: a random push of equal norm.

$$ v_i = drive_i + |push_i| \, ξ_i / |ξ_i|, \qquad ξ_i \sim N(0, 1) $$

The drive, with the mixing of a Stein flow, stays. The norm is that of the push on the weights of
member i, after $J_i^T$. A gain that the placebo has too is not one of the repulsion's direction.
"""

import torch
from torch import Tensor

from shoal.core.random import hashed, key
from shoal.core.tree import add_scaled, member_norms
from shoal.core.types import Tree
from shoal.inference.ensemble import Ensemble
from shoal.training.options.noise import add_normal

__all__ = ["with_placebo"]


@torch.no_grad()
def with_placebo(
    ensemble: Ensemble, velocity: Tree, pushed: Tensor, seed: int, step: int | Tensor
) -> Tree:
    """The velocity with a random push of norm `pushed` [M].

    The direction depends on seed, step and the member's number in the whole ensemble.
    """
    device = next(iter(velocity.values())).device
    numbers = torch.arange(ensemble.first, ensemble.first + ensemble.members, device=device)
    keys = hashed(key(seed, "placebo", step, device) + numbers)
    private = {name: velocity[name] for name in ensemble.weights}
    random = {name: torch.zeros_like(tensor) for name, tensor in private.items()}
    spans = ensemble.spans
    first = 0
    for group in ensemble.groups:
        mine, one = slice(first, first + group.members), torch.ones(group.members, device=device)
        add_normal([random[f"{group.prefix}{n}"] for n in group.weights], keys[mine], one)
        first += group.members
    scale = pushed.to(device) / member_norms(random, spans)
    return velocity | add_scaled(private, random, scale, spans)

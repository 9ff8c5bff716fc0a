r"""A step of FoRDE as its equations read, on members that Shoal keeps and runs.

With u the normalised and rotated gradient of the true class's output with respect to the input, and
the lengths of principal components, the members minimise

$$ \sum_i CE_i + \frac{1}{B} \sum_i \log \sum_j \frac{1}{B} \sum_b
   \exp(-|u_{ib} - u_{jb}|^2 / h_{jb}), $$

where the second argument is held fixed and h is the median over i, over log M. Nothing here is
shared with the trainer, so that how the networks are differentiated can be timed by itself.
"""

import math
from contextlib import AbstractContextManager

import torch
from torch import Tensor
from torch.nn import functional as F

from shoal.inference.ensemble import Ensemble
from shoal.inference.mapping import Mapping

__all__ = ["Look", "cotangents", "look", "plain_gradients", "pull", "shown_to_members"]

Look = tuple[Tensor, Tensor]
"""Outputs [M, B, C] and input gradients [M, B, ...], both with their graph."""


def shown_to_members(x: Tensor, members: int, dtype: torch.dtype) -> Tensor:
    """A copy of the images for each member, channels last in memory, whose gradients are kept."""
    last = x.to(dtype).movedim(1, -1).expand(members, -1, -1, -1, -1).contiguous()
    return last.movedim(-1, 2).requires_grad_()


def look(
    ensemble: Ensemble, x: Tensor, y: Tensor, mapping: Mapping, way: AbstractContextManager
) -> Look:
    """Forward, and to the gradients of the true class with respect to the inputs."""
    shown = shown_to_members(x, ensemble.members, ensemble.groups[0].compute or x.dtype)
    with way:
        outputs = ensemble(shown, mapping, own_inputs=True)
    picked = outputs.gather(-1, y.expand(ensemble.members, -1).unsqueeze(-1))
    (slopes,) = torch.autograd.grad(picked.sum(), shown, create_graph=True)
    return outputs, slopes


def cotangents(outputs: Tensor, slopes: Tensor, y: Tensor, axes: Tensor, count: int) -> Look:
    """Gradients of the loss at the outputs, and of the repulsion at the input gradients.

    Args:
        outputs: [M, B, C].
        slopes: [M, B, ...].
        y: labels of the outputs.
        axes: [D, D], principal axes with the square roots of their variances.
        count: points by which the repulsion is divided.
    """
    z = outputs.detach().float().requires_grad_()
    g = slopes.detach().float().requires_grad_()
    loss = F.cross_entropy(z.flatten(0, 1), y.repeat(len(z))) * len(z)
    (at_outputs,) = torch.autograd.grad(loss, z)
    flat = g.flatten(2)
    u = F.normalize(flat, dim=-1, eps=1e-12) @ axes
    fixed = u.detach()
    norms = u.square().sum(-1)
    d2 = norms[:, None] + norms.detach()[None] - 2 * torch.einsum("ibd,jbd->ijb", u, fixed)
    d2 = d2.clamp(min=0)
    h = d2.detach().median(0).values / math.log(len(u)) + 1e-12
    kernel = torch.exp(-d2 / h).mean(-1)
    (at_slopes,) = torch.autograd.grad(kernel.sum(1).log().sum() / count, g)
    return at_outputs, at_slopes


def pull(ensemble: Ensemble, found: Look, at: Look) -> list[Tensor]:
    """What both cotangents ask of the weights, by one backward pass through both graphs."""
    weights = list(ensemble.weights.values())
    given = [cotangent.to(value.dtype) for value, cotangent in zip(found, at, strict=True)]
    return list(torch.autograd.grad(found, weights, given))


def plain_gradients(ensemble: Ensemble, x: Tensor, y: Tensor, mapping: Mapping) -> list[Tensor]:
    """The same without repulsion: the step of a plain ensemble."""
    outputs = ensemble(x, mapping)
    loss = F.cross_entropy(outputs.float().flatten(0, 1), y.repeat(len(outputs))) * len(outputs)
    return list(torch.autograd.grad(loss, list(ensemble.weights.values())))

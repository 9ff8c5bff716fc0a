r"""A step of FoRDE by its equations, on members that Shoal holds and runs.

Let u be the input gradient of the true class's output, normalised, rotated to principal components
and scaled by their lengths. The members minimise

$$ \sum_i CE_i + \frac{1}{B} \sum_i \log \sum_j \frac{1}{B} \sum_b
   \exp(-|u_{ib} - u_{jb}|^2 / h_{jb}), $$

where the second argument is fixed and h is the median over i, divided by log M. This file shares no
code with the trainer. The differentiation of the networks can therefore be timed by itself.
"""

import math
from contextlib import AbstractContextManager

import torch
from torch import Tensor
from torch.nn import functional as F

from shoal.engine.members.member_runner import MemberRunner
from shoal.inference.ensemble import Ensemble

__all__ = [
    "PassResult",
    "backward_pass",
    "cotangents",
    "forward_with_gradients",
    "member_inputs",
    "plain_gradients",
]

PassResult = tuple[Tensor, Tensor]
"""Outputs [M, B, C] and input gradients [M, B, ...], both with their graph."""


def member_inputs(x: Tensor, members: int, dtype: torch.dtype) -> Tensor:
    """A copy of the images per member, channels last in memory, that requires gradients."""
    last = x.to(dtype).movedim(1, -1).expand(members, -1, -1, -1, -1).contiguous()
    return last.movedim(-1, 2).requires_grad_()


def forward_with_gradients(
    ensemble: Ensemble, x: Tensor, y: Tensor, mapping: MemberRunner, way: AbstractContextManager
) -> PassResult:
    """Forward pass, and the input gradients of the true class."""
    inputs = member_inputs(x, ensemble.members, ensemble.groups[0].compute or x.dtype)
    with way:
        outputs = ensemble(inputs, mapping, own_inputs=True)
    picked = outputs.gather(-1, y.expand(ensemble.members, -1).unsqueeze(-1))
    (input_gradients,) = torch.autograd.grad(picked.sum(), inputs, create_graph=True)
    return outputs, input_gradients


def cotangents(
    outputs: Tensor, input_gradients: Tensor, y: Tensor, axes: Tensor, count: int
) -> PassResult:
    """Gradients of the loss at the outputs, and of the repulsion at the input gradients.

    Args:
        outputs: [M, B, C].
        input_gradients: [M, B, ...].
        y: labels of the outputs.
        axes: [D, D], principal axes with the square roots of their variances.
        count: number of points that divides the repulsion.
    """
    z = outputs.detach().float().requires_grad_()
    g = input_gradients.detach().float().requires_grad_()
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
    (at_gradients,) = torch.autograd.grad(kernel.sum(1).log().sum() / count, g)
    return at_outputs, at_gradients


def backward_pass(ensemble: Ensemble, found: PassResult, at: PassResult) -> list[Tensor]:
    """Gradients of the weights for both cotangents, by one backward pass."""
    weights = list(ensemble.weights.values())
    given = [cotangent.to(value.dtype) for value, cotangent in zip(found, at, strict=True)]
    return list(torch.autograd.grad(found, weights, given))


def plain_gradients(
    ensemble: Ensemble, x: Tensor, y: Tensor, mapping: MemberRunner
) -> list[Tensor]:
    """The same without repulsion: the step of a plain ensemble."""
    outputs = ensemble(x, mapping)
    loss = F.cross_entropy(outputs.float().flatten(0, 1), y.repeat(len(outputs))) * len(outputs)
    return list(torch.autograd.grad(loss, list(ensemble.weights.values())))

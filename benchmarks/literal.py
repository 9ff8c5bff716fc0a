"""The released update of repulsive ensembles: flat weights and a loop over members.

D'Angelo & Fortuin (2021), arXiv 2106.11642. Each member is a row of one matrix W [M, d]. A step
takes a detached copy of W, runs one member after another, computes every gradient by autograd,
writes the negative direction into `W.grad` and calls a torch optimiser. This file shares no code
with Shoal. It follows the formulas without needless cost: kernels come from one Gram matrix.

    s_i  gradient of log p(w_i | D), the likelihood scaled from the batch to all N points
    G_i  gradient of sum_j k(w_i, w_j) with the second argument held fixed
"""

import math
from collections.abc import Iterator
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional as F

__all__ = ["Published"]

_ETA = 0.01


class Published:
    """M perceptrons in one matrix.

    Args:
        weights: [M, d], each row the layers' weights and biases in order.
        layers: widths from input to output.
        points: N.
        optimizer: a class of torch.optim.
        lr: its learning rate.
        prior_std: of the normal prior on every weight.
        functional_prior: estimate the prior's score from draws of functions, as released; else
            there is no prior in function space.
    """

    def __init__(
        self,
        weights: Tensor,
        layers: tuple[int, ...],
        points: int,
        optimizer: type[torch.optim.Optimizer],
        lr: float,
        prior_std: float = 1.0,
        functional_prior: bool = True,
    ) -> None:
        self.W = weights.detach().clone().requires_grad_()
        self.layers, self.points, self.prior_std = layers, points, prior_std
        self.functional_prior = functional_prior
        self.optimizer = optimizer([self.W], lr=lr)  # pyright: ignore[reportCallIssue]

    def step(self, method: str, x: Tensor, y: Tensor) -> None:
        """One step of every member by "kde" or "f-kde"."""
        W = self.W.detach().clone().requires_grad_()
        outputs = torch.stack([self._member(w, x) for w in W])
        direction = self._weight_space if method == "kde" else self._function_space
        self.W.grad = -direction(W, outputs, x, y)
        self.optimizer.step()

    def _member(self, w: Tensor, x: Tensor) -> Tensor:
        """Outputs [B, C] of one row of weights."""
        *hidden, last = self._layers(w)
        for weight, bias in hidden:
            x = F.relu(F.linear(x, weight, bias))
        return F.linear(x, *last)

    def _layers(self, w: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        start = 0
        for before, after in pairwise(self.layers):
            end = start + before * after
            yield w[start:end].view(after, before), w[end : end + after]
            start = end + after

    def _log_likelihood(self, outputs: Tensor, y: Tensor) -> Tensor:
        """N times the mean over the batch, for each member [M]."""
        losses = [F.cross_entropy(each, y) for each in outputs]
        return -self.points * torch.stack(losses)

    def _weight_space(self, W: Tensor, outputs: Tensor, x: Tensor, y: Tensor) -> Tensor:
        """s - G / (K 1)."""
        prior = torch.distributions.Normal(0.0, self.prior_std).log_prob(W).sum(1)
        log_posterior = self._log_likelihood(outputs, y) + prior
        (score,) = torch.autograd.grad(log_posterior.sum(), W)
        kernel = rbf(W, W.detach())
        (G,) = torch.autograd.grad(kernel.sum(), W)
        return score - G / kernel.detach().sum(1, keepdim=True)

    def _function_space(self, W: Tensor, outputs: Tensor, x: Tensor, y: Tensor) -> Tensor:
        """J^T (a + prior - G / (K 1)), all of it on the outputs, then one product with J^T."""
        (score,) = torch.autograd.grad(
            self._log_likelihood(outputs, y).sum(), outputs, retain_graph=True
        )
        f = outputs.detach().flatten(1).requires_grad_()
        kernel = rbf(f, f.detach())
        (G,) = torch.autograd.grad(kernel.sum(), f)
        phi = score.flatten(1) - G / kernel.detach().sum(1, keepdim=True)
        if self.functional_prior:
            phi = phi + self._prior_score(f.detach(), x)
        (pulled,) = torch.autograd.grad(outputs, W, phi.view_as(outputs))
        return pulled

    def _prior_score(self, f: Tensor, x: Tensor) -> Tensor:
        """Spectral estimate at f [M, D] from as many functions drawn from the prior."""
        # The draws carry an unused graph, as in the released code.
        drawn = (self.prior_std * torch.randn_like(self.W.detach())).requires_grad_()
        draws = torch.stack([self._member(w, x) for w in drawn]).flatten(1).detach()
        draws.requires_grad_()
        kernel = rbf(draws, draws.detach())
        (G,) = torch.autograd.grad(kernel.sum(), draws)
        noise = _ETA * torch.eye(len(kernel), device=f.device, dtype=f.dtype)
        eigenvalues, U = torch.linalg.eigh(kernel.detach() + noise)
        across = rbf(f, draws.detach())
        return across @ U / eigenvalues @ (U.mT @ G / eigenvalues[:, None])


def rbf(a: Tensor, b: Tensor) -> Tensor:
    """exp(-d² / 2 h²) with h² = median of all d² (diagonal included) / (2 ln(M + 1))."""
    d2 = a.square().sum(1)[:, None] + b.square().sum(1) - 2 * a @ b.mT
    h2 = torch.quantile(d2.detach().flatten(), 0.5) / (2 * math.log(len(b) + 1))
    return torch.exp(-d2 / (2 * h2))

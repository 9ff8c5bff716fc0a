"""Mean-field variational inference: independent normal weights around one network.

The loss is the mean NLL plus kl_weight * KL(q || prior) / N. kl_weight = 1 is the evidence lower
bound; a smaller weight is a colder posterior. Blundell et al. (2015), arXiv 1505.05424.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

import shoal
from shoal.analysis.landscape.points import chosen, with_weights
from shoal.analysis.landscape.subspace import Mode
from shoal.core.random import generator, key, normal
from shoal.core.tree import per_member
from shoal.core.types import Tree
from shoal.data.dataset import Split
from shoal.engine.resources.plan import default_runner
from shoal.inference.priors import FanIn

__all__ = ["KL_WEIGHTS", "MeanField", "divergence", "fitted"]

KL_WEIGHTS = (1.0, 0.1, 0.01, 0.001)
PRIOR = FanIn(2**0.5)
"""Weights ~ N(0, 2 / fan_in), biases ~ N(0, 2)."""


@dataclass(frozen=True, eq=False)
class MeanField:
    """A sampler of the landscape analyses: mean + reach * sigma * z.

    Attributes:
        sigma: standard deviations of the weights [1, ...].
    """

    sigma: Tree

    def __call__(self, mode: Mode, reach: Tensor, keys: Tensor) -> Tree:
        """One normal number per weight and sample."""
        found = {}
        for place, (name, mean) in enumerate(mode.centre.items()):
            noise = torch.stack([normal(k + place, mean.shape[1:], mean.dtype) for k in keys])
            found[name] = mean + per_member(reach.to(mean), noise) * self.sigma[name] * noise
        return found


def divergence(mean: Tree, log_sigma: Tree) -> Tensor:
    """KL(q || prior) of each network [K]."""
    total = []
    for name, mu in mean.items():
        prior, sigma = PRIOR.width(mu), log_sigma[name].exp()
        each = (sigma.square() + mu.square()) / (2 * prior**2) - (sigma / prior).log() - 0.5
        total.append(each.flatten(1).sum(1))
    return torch.stack(total).sum(0)


def fitted(
    ensemble: shoal.Ensemble,
    train: Split,
    *,
    epochs: int,
    batch_size: int = 128,
    lr: float = 1e-3,
    kl_weights: Sequence[float] = KL_WEIGHTS,
    seed: int = 0,
) -> list[tuple[Mode, MeanField]]:
    """The variational posterior for each KL weight, all trained at once.

    Args:
        ensemble: one initial network per KL weight.
        train: training data.
        epochs: passes over the data.
        batch_size: data points per step; one sample of the weights per step.
        lr: learning rate of the means; that of log sigma is ten times as large.
        kl_weights: factors of the KL term.
        seed: fixes batches and samples.
    """
    device = ensemble.device
    mean = {n: t.detach().clone().requires_grad_() for n, t in ensemble.weights.items()}
    start = {n: torch.full_like(t, 0.1 * PRIOR.width(t)).log() for n, t in mean.items()}
    log_sigma = {n: t.requires_grad_() for n, t in start.items()}
    optimizer = torch.optim.Adam(
        [{"params": [*mean.values()]}, {"params": [*log_sigma.values()], "lr": 10 * lr}], lr
    )
    steps = epochs * max(len(train) // batch_size, 1)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    weights = torch.tensor(kl_weights, device=device)
    random, x, y = generator(seed, "mean field"), train.x.to(device), train.y.to(device)
    for step in range(steps):
        index = torch.randint(len(train), (batch_size,), generator=random).to(device)
        noise = {
            name: normal(key(seed, f"noise {name}", step, device), t.shape, t.dtype)
            for name, t in mean.items()
        }
        drawn = {n: t + log_sigma[n].exp() * noise[n] for n, t in mean.items()}
        points = with_weights(ensemble, drawn)
        found = points(x[index], default_runner(points.groups, device))
        labels = y[index].expand(len(found), -1).flatten()
        fit = F.cross_entropy(found.flatten(0, 1), labels, reduction="none")
        losses = fit.reshape(len(found), -1).mean(1)
        optimizer.zero_grad()
        (losses + weights * divergence(mean, log_sigma) / len(train)).sum().backward()
        optimizer.step()
        schedule.step()
    result = with_weights(ensemble, {n: t.detach() for n, t in mean.items()})
    return [
        (
            Mode(chosen(result, [k])),
            MeanField({n: t[k : k + 1].detach().exp() for n, t in log_sigma.items()}),
        )
        for k in range(len(weights))
    ]

"""Train a curve between two solutions."""

from collections.abc import Callable

import torch
from torch import Tensor

from shoal.analysis.landscape.curves import Curve
from shoal.analysis.landscape.planes import line
from shoal.analysis.landscape.points import combined, only_group, with_weights
from shoal.analysis.landscape.statistics import using_batch_statistics
from shoal.core.errors import ConfigError, DataError
from shoal.core.seeds import generator
from shoal.core.tree import mixed, per_member, rows
from shoal.core.types import Tree
from shoal.data.dataset import Split
from shoal.inference.ensemble import Ensemble
from shoal.inference.likelihoods import Categorical, Likelihood
from shoal.inference.suited import suited_mapping

__all__ = ["connect"]


def connect(
    pair: Ensemble,
    curve: Curve,
    train: Split,
    *,
    likelihood: Likelihood | None = None,
    steps: int = 300,
    lr: float = 0.01,
    places: int = 12,
    batch_size: int = 512,
    seed: int = 0,
    tick: Callable[[int], None] = lambda count: None,
) -> Ensemble:
    """The pivots of a curve of low loss between two solutions, ends included.

    Minimises by Adam the mean of the loss over t; on a constrained curve every pivot is put back
    after each step into the hyperplane where it began. Garipov et al. (2018), arXiv 1802.10026;
    Fort & Jastrzebski (2019), arXiv 1906.04724.

    Args:
        pair: the two solutions.
        curve: how positions depend on pivots.
        train: what the loss is measured on.
        likelihood: what the outputs mean; Categorical by default.
        steps: of the optimiser.
        lr: learning rate, lowered along a cosine.
        places: points of the curve in every step, one at random in each of so many equal parts.
        batch_size: inputs in every step.
        seed: decides places and batches.
        tick: told how many networks a step looked at.
    """
    if pair.members != 2:
        raise ConfigError(f"a curve connects two members, not {pair.members}")
    if train.y is None:
        raise DataError("a curve is trained on labelled data, but these have no targets")
    t = torch.linspace(0, 1, curve.pivots + 2, dtype=torch.float64)
    pivots = combined(pair, line(curve.pivots + 2)).weights
    inner = {name: tensor[1:-1].clone().requires_grad_() for name, tensor in pivots.items()}
    ends = {name: tensor.detach() for name, tensor in only_group(pair).weights.items()}
    # A short memory for the size of gradients, which fall by orders of magnitude on the way.
    optimizer = torch.optim.Adam(list(inner.values()), lr, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    random = generator(seed, "connect")
    for _ in range(steps):
        at = (torch.arange(places) + torch.rand(places, generator=random).double()) / places
        batch = torch.randperm(len(train.x), generator=random)[:batch_size]
        coefficients = curve.coefficients(at).to(pair.device)
        losses = _losses(pair, _whole(ends, inner), coefficients, train, batch, likelihood)
        optimizer.zero_grad()
        losses.mean().backward()
        optimizer.step()
        schedule.step()
        if curve.constrained:
            _project(inner, ends, t[1:-1])
        tick(places)
    return with_weights(pair, {n: w.detach() for n, w in _whole(ends, inner).items()})


def _losses(
    pair: Ensemble,
    pivots: Tree,
    coefficients: Tensor,
    train: Split,
    batch: Tensor,
    likelihood: Likelihood | None,
) -> Tensor:
    """Mean negative log likelihood at the points coefficients @ pivots."""
    points = with_weights(pair, mixed(coefficients, pivots))
    x = train.x[batch].to(pair.device, pair.dtype)
    y = train.y[batch].to(pair.device) if train.y is not None else batch
    with using_batch_statistics(points):
        found = points(x, suited_mapping(points.groups, points.device))
    return -(likelihood or Categorical()).log_prob(found, y).mean(-1)


def _whole(ends: Tree, inner: Tree) -> Tree:
    return {name: torch.cat([t[:1], inner[name], t[1:]]) for name, t in ends.items()}


def _project(inner: Tree, ends: Tree, t: Tensor) -> None:
    """Put pivots back into their hyperplanes, (theta - theta_1) . e = t |e|², e the segment."""
    with torch.no_grad():
        along = {name: rows(tensor[1:] - tensor[:1])[0] for name, tensor in ends.items()}
        square = sum(float(e.double().square().sum()) for e in along.values())
        dots = sum(
            ((rows(p) - rows(ends[name][:1])) @ along[name]).double() for name, p in inner.items()
        )
        excess = dots / square - t.to(dots)  # pyright: ignore
        for name, pivot in inner.items():
            shift = per_member(excess.to(pivot), pivot) * along[name].reshape(pivot.shape[1:])
            pivot.sub_(shift)

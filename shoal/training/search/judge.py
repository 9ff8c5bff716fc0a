"""The data that judge the arms of a search: held-out points and their shifted copies."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from shoal.core.random import generator
from shoal.data.batches.sources import ArrayBatches, LoaderBatches
from shoal.data.dataset import held_out
from shoal.data.sets.mild_shifts import mild_shifts
from shoal.engine.processes.mesh import Mesh
from shoal.inference.ensemble import Ensemble
from shoal.inference.likelihoods import Likelihood
from shoal.prediction.predictive import Predictive
from shoal.training.loop.validation import Data, Validation, evaluating
from shoal.training.search.plan import HELD_OUT, MOST_HELD_OUT, PointScores

__all__ = ["Judge", "divided", "judge_on", "point_losses"]


@dataclass(frozen=True, eq=False)
class Judge:
    """Data that no arm trains on.

    Attributes:
        words: which data these are.
        clean: the points.
        copies: shifted copies by name.
    """

    words: str
    clean: Data
    copies: dict[str, ArrayBatches]

    def scores(
        self,
        ensemble: Ensemble,
        likelihood: Likelihood,
        mesh: Mesh | None = None,
        frozen: int = 0,
    ) -> PointScores:
        """NLL of the ensemble on each point, and the mean over its shifted copies.

        Args:
            ensemble: the members of this process.
            likelihood: with its learned numbers.
            mesh: the processes with the other members; None for one process.
            frozen: number of frozen members, which every process has.
        """

        def scored(data: Data) -> tuple[Tensor, Tensor | None]:
            found = Validation(data, mesh, frozen).predictions(ensemble, likelihood)
            return _losses(found)

        with torch.no_grad(), evaluating(ensemble):
            clean, weight = scored(self.clean)
            copies = [scored(each)[0] for each in self.copies.values()]
        shifted = torch.stack(copies).mean(0) if copies else None
        return PointScores(clean, shifted, weight)


def divided(batches: ArrayBatches, seed: int) -> tuple[ArrayBatches, Judge]:
    """A part of the training data to train on, and the rest as a judge."""
    share = min(HELD_OUT, MOST_HELD_OUT / batches.n)
    trains, held = held_out(batches.n, share, seed, "search")
    if len(trains) > 1 and (len(trains) - 1) % batches.batch_size == 0:
        trains = trains[:-1]  # networks with BatchNorm cannot train on a batch of one point
    part, rest = (
        replace(batches, x=batches.x[rows], y=batches.y[rows])
        for rows in (each.to(batches.x.device) for each in (trains, held))
    )
    return part, judge_on(rest, seed, "held-out training data")


def judge_on(held: Data, seed: int, words: str) -> Judge:
    """A judge on given data, or on some of them if there are many."""
    if isinstance(held, LoaderBatches):
        held = _gathered(held) or held
    if isinstance(held, LoaderBatches):
        return Judge(words, held, {})
    if held.n > MOST_HELD_OUT:
        order = torch.randperm(held.n, generator=generator(seed, "judge"))
        rows = order[:MOST_HELD_OUT].sort().values.to(held.x.device)
        held = replace(held, x=held.x[rows], y=held.y[rows])
    copies = mild_shifts(held.x, seed)
    return Judge(words, held, {name: replace(held, x=x) for name, x in copies.items()})


def _gathered(held: LoaderBatches) -> ArrayBatches | None:
    """The first points of a loader, if they are tensors of one shape."""
    pairs, points = list[tuple[Tensor, Tensor]](), 0
    for x, y in held.sweep():
        if not isinstance(x, Tensor) or not isinstance(y, Tensor):
            return None
        pairs.append((x, y))
        points += len(x)
        if points >= MOST_HELD_OUT:
            break
    if not pairs or len({(x.shape[1:], y.shape[1:]) for x, y in pairs}) > 1:
        return None
    x, y = (torch.cat(each) for each in zip(*pairs, strict=True))
    return ArrayBatches(x, y, len(pairs[0][0]))


def _losses(predictions: Iterable[tuple[Predictive, Any, Any]]) -> tuple[Tensor, Tensor | None]:
    """NLL of each data point [N], and its weight."""
    losses, weights = list[Tensor](), list[Tensor]()
    for pred, y, weight in predictions:
        found, counts = point_losses(pred, y)
        losses.append(found)
        if weight is not None:
            weights.append(weight.flatten()[counts].double())
    if not losses:  # all members diverged
        return torch.full((1,), torch.inf), None
    return torch.cat(losses), torch.cat(weights) if weights else None


def point_losses(pred: Predictive, y: Any) -> tuple[Tensor, Tensor]:
    """NLL of each data point [B], the mean over its targets; and which points have targets [B].

    A custom loss takes the place of the NLL. Points whose targets are all ignored are left out.
    """
    targets = pred.check(y)
    sites = pred.members.shape[2:-1].numel()
    place = torch.arange(len(pred), device=pred.members.device).repeat_interleave(sites)
    counted = pred.likelihood.counted(targets)
    place = place if counted is None else place[counted.flatten().to(place.device)]
    count = torch.bincount(place, minlength=len(pred))
    if not len(place):
        return pred.members.new_empty(0), count > 0
    flat, targets = pred.points(targets)
    if "any" in pred.likelihood.about.kinds:
        found = flat.log_prob(targets)
    else:
        found = flat.average(pred.likelihood.log_prob(flat.members, flat.check(targets)))
    each = -found.double().reshape(len(place), -1).mean(1)
    total = torch.zeros(len(pred), dtype=torch.float64, device=each.device)
    total.index_add_(0, place, each)
    return (total / count)[count > 0], count > 0

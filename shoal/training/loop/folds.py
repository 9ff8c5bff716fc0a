"""Folds: every member is measured on the data points that it never trains on.

The members that hold out a fold are a mixture there, which has not seen the fold. So all training
points together give the measures of an ensemble without a validation set.
"""

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shoal.core.errors import DataError
from shoal.core.opaque import Opaque
from shoal.core.structure import Inputs, parted
from shoal.data.batches.orders import Folds, member_batches
from shoal.engine.members.member_runner import MemberRunner
from shoal.engine.processes.mesh import Mesh
from shoal.inference.ensemble import Ensemble
from shoal.inference.likelihoods import Likelihood
from shoal.prediction.metrics import mean_scores
from shoal.prediction.predictive import Predictive
from shoal.training.loop.validation import Data, evaluating

__all__ = ["FoldMixture", "FoldValidation", "fold_outputs"]


@dataclass(frozen=True, eq=False)
class FoldMixture:
    """Which member is where in the mixtures of the folds.

    Attributes:
        places: the members of every fold that has any [F, S]; see `Folds.mixtures`.
        rows: the data points, as places among those of all folds [P].
        folds: for every data point, the row of `places` [P].
    """

    places: Tensor
    rows: Tensor
    folds: Tensor

    @classmethod
    def of(cls, folds: Folds, members: Sequence[int], counts: Tensor) -> "FoldMixture":
        """The mixtures of these members at the points of all folds that count [K, b]."""
        known, places = folds.mixtures(members)
        device, size = counts.device, counts.shape[1]
        own = torch.tensor(known, device=device, dtype=torch.int64)
        rows, kept = own[:, None] * size + torch.arange(size, device=device), counts[own]
        position = torch.arange(len(own), device=device)[:, None].expand_as(rows)
        return cls(torch.tensor(places, device=device), rows[kept], position[kept])

    def mixed(self, outputs: Tensor) -> Tensor:
        """Outputs of the mixtures [S, P, ...], from those of members on their folds [M, b, ...]."""
        size = outputs.shape[1]
        return outputs[self.places[self.folds].T, self.rows % size]

    def by_member(self, losses: Tensor, weights: Tensor, folds: Tensor, members: int) -> Tensor:
        """Sums over the fold of each member [M, 2] of losses [S, P] and weights [P]; else NaN."""
        table = losses.new_zeros(len(losses), len(self.places)).index_add_(1, folds, losses)
        total = weights.new_zeros(len(self.places)).index_add_(0, folds, weights)
        sums = losses.new_full((members, 2), math.nan)
        where = self.places.T
        sums[where.flatten(), 0] = table.flatten()
        sums[where.flatten(), 1] = total.expand_as(table).flatten()
        return sums


def fold_outputs(
    ensemble: Ensemble,
    x: Inputs,
    members: Sequence[int],
    folds: Folds,
    runner: MemberRunner | None = None,
) -> Tensor:
    """Outputs of all members [M, b, ...], each on its fold.

    Args:
        ensemble: the members.
        x: the inputs of all folds, fold by fold [K b, ...].
        members: the number of each member, which says its fold.
        folds: the folds.
        runner: how members run; None for the default.
    """
    if isinstance(x, Opaque):
        raise DataError(
            "folds need inputs of which each member takes its rows, such as tensors, and batch "
            "objects came; hold out data for all members with validation=0.1"
        )
    size = len(x) // folds.count
    fold = torch.tensor([member % folds.count for member in members])
    rows = (fold[:, None] * size + torch.arange(size)).flatten().to(x.device)
    own = member_batches(x.index_select(0, rows), rows, len(members))[0]
    outputs = ensemble(own, runner, own_inputs=True)
    return outputs if outputs.dtype == torch.float64 else outputs.float()


class FoldValidation:
    """The folds that members hold out, and how members are measured on them.

    Attributes:
        batches: the training data, in folds.
        size: points of a fold per forward pass.
        mesh: the processes with the other members; None for one process.
        frozen: number of frozen members, which every process has.
        ranked: measure members by CRPS, in units of the targets' standard deviation, not by NLL.
    """

    def __init__(
        self,
        batches: Data,
        size: int,
        mesh: Mesh | None = None,
        frozen: int = 0,
        ranked: bool = False,
    ) -> None:
        assert batches.folds is not None
        self.batches, self.folds, self.size = batches, batches.folds, size
        self.mesh, self.frozen, self.ranked = mesh, frozen, ranked

    def measure(
        self, ensemble: Ensemble, likelihood: Likelihood, runner: MemberRunner | None = None
    ) -> dict[str, Any]:
        r"""NLL or CRPS of every trained member on its fold, and measures of the mixtures there.

        Of member i with fold F: $-\frac{1}{|F|} \sum_{n \in F} \log p(y_n | f_i(x_n))$. Numbers are
        None if they are not finite. With several processes, all must call this.

        Args:
            ensemble: the members of this process.
            likelihood: with its learned numbers.
            runner: how members run; None for the default.
        """
        sums: list[Tensor] = []
        with torch.no_grad(), evaluating(ensemble):
            scores: Any = {
                "validation": mean_scores(self._predictions(ensemble, likelihood, runner, sums))
            }
            total, weight = torch.stack(sums).sum(0).unbind(1)
            scores["member_validation"] = (total / weight).tolist()
        if self.mesh is not None:  # rounding must not let processes disagree about the best epoch
            scores = json.loads(self.mesh.from_first(json.dumps(scores)))
        finite = {n: v if math.isfinite(v) else None for n, v in scores["validation"].items()}
        members = [v if math.isfinite(v) else None for v in scores["member_validation"]]
        return {"validation": finite, "member_validation": members}

    def _predictions(
        self,
        ensemble: Ensemble,
        likelihood: Likelihood,
        runner: MemberRunner | None,
        sums: list[Tensor],
    ) -> Iterator[tuple[Predictive, Any, Any]]:
        """Out-of-fold prediction, targets and weights of each batch; adds the members' losses."""
        for outputs, sound, y, counts in self._outputs(ensemble, runner):
            finite = sound.nonzero().flatten()
            members = [self.frozen + place for place in finite.tolist()]
            if not members:
                sums.append(counts.new_full((len(sound), 2), math.nan, dtype=torch.float64))
                continue
            mixture = FoldMixture.of(self.folds, members, counts)
            pred = Predictive(mixture.mixed(outputs[finite]), likelihood)
            targets, weight = parted(y.index_select(0, mixture.rows.to(y.device)))
            losses = self._losses(pred, targets, weight, mixture, len(finite))
            whole = losses.new_full((len(sound), 2), math.nan)
            sums.append(whole.index_copy_(0, finite, losses))
            yield pred, targets, weight

    def _outputs(
        self, ensemble: Ensemble, runner: MemberRunner | None
    ) -> Iterator[tuple[Tensor, Tensor, Any, Tensor]]:
        """Outputs of the trained members [M, b, ...], each on `b` points of its fold.

        Beside them: which members are finite [M], targets of all folds [K b], and which of these
        points count [K, b].
        """
        members, first = range(ensemble.members), self.frozen
        if self.mesh is not None:
            own = self.mesh.own
            members = [*range(first), *range(first + own.start, first + own.stop)]
        steps = list(self.folds.steps(self.size))
        reading = self.batches.read(rows.flatten() for rows, _ in steps)
        for (x, y), (_, counts) in zip(reading, steps, strict=True):
            outputs = fold_outputs(ensemble, x, members, self.folds, runner)[first:]
            sound = ensemble.alive[first:] & (outputs < torch.inf).flatten(1).all(-1)
            if self.mesh is not None:
                outputs, sound = self.mesh.gather(outputs, sound, "folds")
            yield outputs, sound, y, counts.to(outputs.device)

    def _losses(
        self, pred: Predictive, y: Any, weight: Tensor | None, mixture: FoldMixture, members: int
    ) -> Tensor:
        """Sum of the NLL or CRPS of each member over its points, and of the weights [M, 2]."""
        targets = pred.check(y)
        counted, sites = pred.likelihood.counted(targets), pred.members.shape[2:-1].numel()
        points = torch.arange(len(pred), device=pred.members.device).repeat_interleave(sites)
        weights = torch.ones_like(points, dtype=torch.float64)
        if weight is not None:
            weights = weight.double().flatten().repeat_interleave(len(points) // weight.numel())
        if counted is not None:
            points, weights = points[counted.flatten()], weights[counted.flatten()]
        flat, targets = pred.points(targets)
        likelihood = pred.likelihood
        if self.ranked:
            each = likelihood.ranked_score(flat.members, targets) / likelihood.unit
            each = each.double().sum(-1)
        else:
            each = -likelihood.log_prob(flat.members, targets).double()
        return mixture.by_member(each * weights, weights, mixture.folds[points], members)

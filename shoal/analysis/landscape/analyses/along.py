"""Similarity of the members' functions, along training and at its end."""

from typing import Any

import torch
from torch import Tensor
from torch.func import grad, vmap

from shoal.analysis.landscape.points import cosines, finite_members, joined, only_group
from shoal.analysis.landscape.scene import AnalysisResult, Scene, registry
from shoal.analysis.landscape.survey import apart, outputs
from shoal.analysis.landscape.trajectories import embedded, tracks
from shoal.core.errors import DataError
from shoal.data.dataset import Split
from shoal.engine.members.member_runner import MemberRunner, without_fallback_warnings
from shoal.inference.ensemble import Ensemble
from shoal.inference.posterior import as_points
from shoal.prediction.metrics.similarity import affinity, effective_number, pairwise_disagreement
from shoal.prediction.predictive import Predictive

__all__ = ["effective_numbers", "functions", "gradient_similarity", "trajectories"]


def effective_numbers(
    ensemble: Ensemble, pred: Predictive, split: Split, gradients: int = 200
) -> dict[str, float]:
    """The effective number of members in every space, from 1 (all equal) to M (all different).

    Each number is exp of the entropy of a similarity matrix's spectrum. The similarity of weights
    is the cosine, of outputs the Bhattacharyya affinity, of labels the share of inputs with the
    same label, of input gradients the mean cosine over inputs.

    Args:
        ensemble: the members.
        pred: their prediction for `split`.
        split: labelled inputs.
        gradients: number of inputs for the input gradients.
    """
    numbers = {"weights": effective_number(cosines(ensemble))}
    numbers["outputs"] = effective_number(affinity(pred))
    if pred.likelihood.about.has_classes:
        numbers["labels"] = effective_number(1 - pairwise_disagreement(pred))
    if split.x.is_floating_point():
        few = Split(split.x[:gradients], None if split.y is None else split.y[:gradients])
        numbers["input gradients"] = effective_number(
            gradient_similarity(ensemble, few, pred.likelihood)
        )
    return numbers


def gradient_similarity(ensemble: Ensemble, split: Split, likelihood: Any) -> Tensor:
    """Mean cosine over inputs of the members' input gradients of log p(y | x) [M, M].

    Trinh et al. (2024), arXiv 2306.02775.
    """
    if split.y is None:
        raise DataError("input gradients need targets, but these data have none")
    group = only_group(ensemble)
    x, y = split.x.to(ensemble.device, ensemble.dtype), split.y.to(ensemble.device)
    state = {name: t.detach() for name, t in (group.weights | group.buffers).items()}
    shared = {name: t.detach() for name, t in group.shared.items()}

    def total(x: Tensor, tensors: dict) -> Tensor:
        one = {name: tensor[None] for name, tensor in tensors.items()}
        predicted = MemberRunner("loop")(group.skeleton, one, x, False, shared)[0]
        predicted, targets = as_points(likelihood, predicted[None], y)
        return likelihood.log_prob(predicted, targets).sum()

    with without_fallback_warnings():
        slopes = vmap(grad(total), in_dims=(None, 0))(x, state).flatten(2).double()
    unit = slopes / slopes.norm(dim=-1, keepdim=True).clamp_min(1e-300)
    return torch.einsum("mbd,nbd->mn", unit, unit).cpu() / len(x)


_TRACKS = 3


@registry.register("trajectories", cite=("fort2019deep",))
def trajectories(scene: Scene) -> AnalysisResult:
    """Similarity of weights and of functions along training, within and between members."""
    members = finite_members(scene.run.ensemble)[:_TRACKS]
    paths = tracks(scene.run, members, scene.effort.snapshots)
    points = joined([track.points for track in paths])
    predicted = outputs(points, scene.test.x).cpu()
    pred = scene.predictive(predicted)
    owner = torch.arange(len(members)).repeat_interleave(len(paths[0].epochs))
    far = apart(scene.run.likelihood, pred.members, pred.members)
    other = owner[:, None] != owner
    ends = (torch.arange(len(owner)) + 1) % len(paths[0].epochs) == 0
    late = other & ends & ends[:, None]
    scores = {
        "members": members,
        "epochs": paths[0].epochs,
        "between_ends": float(far[late].mean()) if bool(late.any()) else None,
        "last_snapshots": _last_apart(far, len(paths[0].epochs)),
    }
    tensors = {
        "cosine": cosines(points).float(),
        "apart": far.float(),
        "owner": owner,
        "map": embedded(pred, scene.seed),
    }
    return AnalysisResult(scores, tensors)


def _last_apart(far: torch.Tensor, count: int) -> float | None:
    """Mean disagreement of the last two snapshots of a member."""
    if count < 2:
        return None
    last = torch.arange(count - 1, len(far), count)
    return float(far[last, last - 1].mean())


@registry.register("functions", cite=("friedman2023vendi",))
def functions(scene: Scene) -> AnalysisResult:
    """Effective number of members in every space."""
    pred = scene.predictive(scene.outputs)
    numbers = effective_numbers(scene.ensemble, pred, scene.test)
    return AnalysisResult({"members": scene.ensemble.members, "effective": numbers})

"""Diversity in one number: how many different networks the members amount to, space by space."""

from typing import Any

import torch
from torch import Tensor
from torch.func import grad, vmap

from shoal.analysis.landscape.points import cosines, only_group
from shoal.core.errors import DataError
from shoal.data.dataset import Split
from shoal.inference.ensemble import Ensemble
from shoal.inference.mapping import Mapping
from shoal.prediction.predictive import Predictive
from shoal.prediction.similarity import affinity, effective_number, pairwise_disagreement

__all__ = ["effective_numbers", "gradient_similarity"]


def effective_numbers(
    ensemble: Ensemble, pred: Predictive, split: Split, gradients: int = 200
) -> dict[str, float]:
    """The effective number of members in every space, from 1 (all equal) to M (all apart).

    Each is exp of the entropy of the spectrum of a similarity matrix: of weights the cosine, of
    outputs the Bhattacharyya affinity, of labels the share of inputs with the same label, of input
    gradients the mean cosine over inputs.

    Args:
        ensemble: the members that `pred` is of.
        pred: what they say about `split`.
        split: labelled inputs.
        gradients: how many of the inputs are differentiated by.
    """
    found = {"weights": effective_number(cosines(ensemble))}
    found["outputs"] = effective_number(affinity(pred))
    if pred.likelihood.about.has_classes:
        found["labels"] = effective_number(1 - pairwise_disagreement(pred))
    if split.x.is_floating_point():
        few = Split(split.x[:gradients], None if split.y is None else split.y[:gradients])
        found["input gradients"] = effective_number(
            gradient_similarity(ensemble, few, pred.likelihood)
        )
    return found


def gradient_similarity(ensemble: Ensemble, split: Split, likelihood: Any) -> Tensor:
    """Mean over inputs of the cosine of the members' gradients of log p(y | x) by x [M, M].

    Trinh et al. (2024), arXiv 2306.02775.
    """
    if split.y is None:
        raise DataError("gradients of the log likelihood need targets, but these data have none")
    group = only_group(ensemble)
    x, y = split.x.to(ensemble.device, ensemble.dtype), split.y.to(ensemble.device)
    state = {name: t.detach() for name, t in (group.weights | group.buffers).items()}

    def total(x: Tensor, tensors: dict) -> Tensor:
        one = {name: tensor[None] for name, tensor in tensors.items()}
        found = Mapping("loop")(group.skeleton, one, x, False)[0]
        return likelihood.log_prob(found, y).sum()

    slopes = vmap(grad(total), in_dims=(None, 0))(x, state).flatten(2).double()
    unit = slopes / slopes.norm(dim=-1, keepdim=True).clamp_min(1e-300)
    return torch.einsum("mbd,nbd->mn", unit, unit).cpu() / len(x)

"""Points of weight space as members of an ensemble, so that one batched forward runs them all.

Lines, planes, curves, averages and samples around a solution are all combinations of a few known
networks: coefficients [K, R] times a basis of R members are K new members.
"""

import copy
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from shoal.analysis.landscape.pooling import install_pooling
from shoal.core.errors import ConfigError
from shoal.core.tree import mixed, rows
from shoal.core.types import Tree
from shoal.inference.ensemble import Ensemble
from shoal.inference.group import Group

__all__ = [
    "chosen",
    "combined",
    "cosines",
    "gram",
    "joined",
    "living",
    "only_group",
    "with_weights",
]


def only_group(ensemble: Ensemble) -> Group:
    """The members' one architecture; between different ones there is nothing to look at."""
    if len(ensemble.groups) != 1:
        raise ConfigError(
            f"the landscape lies between networks of one architecture, but this ensemble has "
            f"{len(ensemble.groups)}; train one ensemble for each"
        )
    return ensemble.groups[0]


def with_weights(ensemble: Ensemble, weights: Tree, buffers: Tree | None = None) -> Ensemble:
    """An ensemble of the same architecture with other weights [K, ...].

    Args:
        ensemble: gives the architecture, and the buffers of its first member where none are given.
        weights: what the new members are.
        buffers: running statistics and frozen weights [K, ...].
    """
    group = only_group(ensemble)
    count = len(next(iter(weights.values())))
    if buffers is None:
        buffers = {n: t[:1].expand(count, *t.shape[1:]).clone() for n, t in group.buffers.items()}
    # A skeleton of its own, so that the mode of an ensemble in training stays what it is.
    skeleton = copy.deepcopy(group.skeleton)
    install_pooling(skeleton)
    made = replace(group, weights=weights, buffers=buffers, skeleton=skeleton, prefix="")
    found = Ensemble([made], ensemble.builds)
    found.alive = found.alive.to(ensemble.device)
    return found


def chosen(ensemble: Ensemble, indices: Sequence[int]) -> Ensemble:
    """Copies of some members, in the order given.

    >>> from torch import nn
    >>> chosen(Ensemble.init(lambda: nn.Linear(2, 1), members=3), [2, 0, 2]).members
    3
    """
    group = only_group(ensemble)
    index = torch.as_tensor(list(indices), device=ensemble.device)
    weights = {name: t.detach()[index] for name, t in group.weights.items()}
    return with_weights(ensemble, weights, {name: t[index] for name, t in group.buffers.items()})


def joined(parts: Sequence[Ensemble]) -> Ensemble:
    """The members of several ensembles of one architecture, one after another."""
    groups = [only_group(part) for part in parts]
    weights, buffers = (
        {name: torch.cat([getattr(g, kind)[name].detach() for g in groups]) for name in first}
        for kind, first in (("weights", groups[0].weights), ("buffers", groups[0].buffers))
    )
    return with_weights(parts[0], weights, buffers)


def combined(basis: Ensemble, coefficients: Tensor) -> Ensemble:
    """The members sum_r coefficients_kr basis_r, coefficients [K, R], buffers of the first."""
    weights = {name: tensor.detach() for name, tensor in only_group(basis).weights.items()}
    return with_weights(basis, mixed(coefficients.to(basis.device), weights))


def gram(tree: Tree) -> Tensor:
    """Inner products of all members over all tensors [K, K], in double precision.

    >>> gram({"a": torch.tensor([[3.0], [1.0]]), "b": torch.tensor([4.0, 0.0])})
    tensor([[25.,  3.],
            [ 3.,  1.]], dtype=torch.float64)
    """
    flat = [rows(tensor.detach()) for tensor in tree.values()]
    return torch.stack([(t @ t.T).double() for t in flat]).sum(0)


def cosines(ensemble: Ensemble) -> Tensor:
    """Cosine similarity of the members' weights [K, K], without alignment.

    Fort et al. (2019), arXiv 1912.02757.
    """
    products = gram(only_group(ensemble).weights)
    norms = products.diagonal().clamp_min(1e-300).sqrt()
    return (products / norms / norms[:, None]).clamp(-1, 1).cpu()


def living(ensemble: Ensemble) -> list[int]:
    """Members that training has not given up on."""
    return ensemble.alive.nonzero().flatten().tolist()

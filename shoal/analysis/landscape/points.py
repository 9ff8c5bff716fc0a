"""Points of weight space as members of an ensemble, so that one batched forward runs them all.

Lines, planes, curves, averages and samples around a solution are all combinations of a few known
networks: coefficients [K, R] times a basis of R members are K new members.
"""

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm

from shoal.core.errors import ConfigError
from shoal.core.tree import mixed, rows
from shoal.core.types import Tree
from shoal.engine.group import Group
from shoal.inference.ensemble import Ensemble

__all__ = [
    "Halving",
    "batch_norms",
    "chosen",
    "combined",
    "cosines",
    "gram",
    "install_pooling",
    "joined",
    "living",
    "only_group",
    "refresh",
    "using_batch_statistics",
    "with_weights",
]

_PLAIN = {"padding": 0, "dilation": 1, "ceil_mode": False, "return_indices": False}


class Halving(nn.MaxPool2d):
    """Stands in for `nn.MaxPool2d(2)`; with gradients, or on a GPU, it is the same."""

    def forward(self, input: Tensor) -> Tensor:
        """The largest of four neighbours; a last odd row or column is left out."""
        if torch.is_grad_enabled() or input.device.type != "cpu":
            return F.max_pool2d(input, 2)
        height, width = (size // 2 * 2 for size in input.shape[-2:])
        x = input[..., :height, :width]
        rows = torch.maximum(x[..., ::2, :], x[..., 1::2, :])
        return torch.maximum(rows[..., ::2], rows[..., 1::2])


def install_pooling(module: nn.Module) -> None:
    """Let the layers of `module` that halve an image do so by comparisons, in place."""
    for layer in module.modules():
        if type(layer) is not nn.MaxPool2d:
            continue
        sizes = {layer.kernel_size, layer.stride}
        plain = all(getattr(layer, name) == value for name, value in _PLAIN.items())
        if plain and sizes <= {2, (2, 2)}:
            layer.__class__ = Halving


def batch_norms(ensemble: Ensemble) -> list[nn.Module]:
    """The layers that carry running statistics."""
    layers = only_group(ensemble).skeleton.modules()
    return [m for m in layers if isinstance(m, _BatchNorm) and m.track_running_stats]


@contextmanager
def using_batch_statistics(ensemble: Ensemble) -> Iterator[list[nn.Module]]:
    """Batch normalisation as in training, and everything else, such as dropout, as in use."""
    layers = batch_norms(ensemble)
    before = [(layer.training, layer.momentum) for layer in layers]
    for layer in layers:
        layer.train()
    try:
        yield layers
    finally:
        for layer, (mode, momentum) in zip(layers, before, strict=True):
            layer.train(mode)
            layer.momentum = momentum  # pyright: ignore


def refresh(ensemble: Ensemble, x: Tensor, batch_size: int = 256) -> Ensemble:
    r"""Give every member the statistics of its own activations on `x`, in place.

    Means and variances of the batches are averaged as they come, $m_k = m_{k-1} + (b_k -
    m_{k-1})/k$, so that nothing but the statistics is stored. Without batch normalisation nothing
    happens.
    """
    with torch.no_grad(), using_batch_statistics(ensemble) as layers:
        if not layers:
            return ensemble
        # A last batch of one or two inputs would count as much as a whole one.
        full = max(len(x) // batch_size, 1) * batch_size
        for count, batch in enumerate(x[:full].split(batch_size), start=1):
            for layer in layers:
                layer.momentum = 1 / count  # pyright: ignore
            ensemble(batch.to(ensemble.device, ensemble.dtype))
    return ensemble


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

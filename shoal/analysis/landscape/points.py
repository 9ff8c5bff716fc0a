"""Points of weight space as members of an ensemble, for one batched forward pass.

Lines, planes, curves, averages and samples around a member are combinations of a few known
networks: coefficients [K, R] times a basis of R members give K new members. This file makes,
selects and joins such members (`with_weights`, `chosen`, `joined`, `combined`), and refreshes their
batch normalisation statistics (`refresh`). `gram` and `cosines` compare their weights, and
`install_pooling` makes their pooling layers faster.
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
from shoal.core.opaque import Opaque
from shoal.core.structure import Inputs
from shoal.core.tree import mixed, rows
from shoal.core.types import Tree
from shoal.engine.members.group import Group
from shoal.inference.ensemble import Ensemble

__all__ = [
    "Halving",
    "batch_norms",
    "chosen",
    "combined",
    "cosines",
    "finite_members",
    "gram",
    "install_pooling",
    "joined",
    "only_group",
    "refresh",
    "using_batch_statistics",
    "with_weights",
]

_PLAIN = {"padding": 0, "dilation": 1, "ceil_mode": False, "return_indices": False}


class Halving(nn.MaxPool2d):
    """Replaces `nn.MaxPool2d(2)`; faster on a CPU without gradients, otherwise the same."""

    def forward(self, input: Tensor) -> Tensor:
        """The largest of four neighbours; an odd last row or column is omitted."""
        if torch.is_grad_enabled() or input.device.type != "cpu":
            return F.max_pool2d(input, 2)
        height, width = (size // 2 * 2 for size in input.shape[-2:])
        x = input[..., :height, :width]
        rows = torch.maximum(x[..., ::2, :], x[..., 1::2, :])
        return torch.maximum(rows[..., ::2], rows[..., 1::2])


def install_pooling(module: nn.Module) -> None:
    """Replace the 2 x 2 max pooling layers of `module` by comparisons, in place."""
    for layer in module.modules():
        if type(layer) is not nn.MaxPool2d:
            continue
        sizes = {layer.kernel_size, layer.stride}
        plain = all(getattr(layer, name) == value for name, value in _PLAIN.items())
        if plain and sizes <= {2, (2, 2)}:
            layer.__class__ = Halving


def batch_norms(ensemble: Ensemble) -> list[nn.Module]:
    """The layers with running statistics of each member.

    Statistics that all members share belong to a shared trunk, the same for every point.
    """
    group = only_group(ensemble)
    return [
        layer
        for name, layer in group.skeleton.named_modules()
        if isinstance(layer, _BatchNorm) and layer.track_running_stats
        if f"{name}.running_mean".lstrip(".") not in group.shared
    ]


@contextmanager
def using_batch_statistics(ensemble: Ensemble) -> Iterator[list[nn.Module]]:
    """Batch normalisation in training mode; all other layers, such as dropout, in evaluation."""
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


def refresh(ensemble: Ensemble, x: Inputs, batch_size: int = 256) -> Ensemble:
    r"""Compute the running statistics of every member from its activations on `x`, in place.

    Means and variances of the batches are averaged one by one, $m_k = m_{k-1} + (b_k -
    m_{k-1})/k$, so only the statistics are stored. Networks without batch normalisation do not
    change.
    """
    with torch.no_grad(), using_batch_statistics(ensemble) as layers:
        if not layers:
            return ensemble
        # A last batch of one or two inputs would count as much as a full batch.
        full = max(len(x) // batch_size, 1) * batch_size
        most = x if isinstance(x, Opaque) else x[:full]
        for count, batch in enumerate(most.split(batch_size), start=1):
            for layer in layers:
                layer.momentum = 1 / count  # pyright: ignore
            real = ensemble.dtype if batch.is_floating_point() else None
            ensemble(batch.to(ensemble.device, real))
    return ensemble


def only_group(ensemble: Ensemble) -> Group:
    """The group of an ensemble with one architecture; raises an error for several."""
    if len(ensemble.groups) != 1:
        raise ConfigError(
            f"the landscape needs networks of one architecture, but this ensemble has "
            f"{len(ensemble.groups)}; train one ensemble per architecture"
        )
    return ensemble.groups[0]


def with_weights(ensemble: Ensemble, weights: Tree, buffers: Tree | None = None) -> Ensemble:
    """An ensemble of the same architecture with other weights [K, ...].

    Args:
        ensemble: gives the architecture; its first member gives the default buffers.
        weights: weights of the new members.
        buffers: running statistics and frozen weights [K, ...].
    """
    group = only_group(ensemble)
    count = len(next(iter(weights.values())))
    if buffers is None:
        buffers = {n: t[:1].expand(count, *t.shape[1:]).clone() for n, t in group.buffers.items()}
    # A separate skeleton, so that the mode of an ensemble in training does not change.
    skeleton = copy.deepcopy(group.skeleton)
    install_pooling(skeleton)
    made = replace(group, weights=weights, buffers=buffers, skeleton=skeleton, prefix="")
    new = Ensemble([made], ensemble.builds)
    new.alive = new.alive.to(ensemble.device)
    return new


def chosen(ensemble: Ensemble, indices: Sequence[int]) -> Ensemble:
    """Copies of some members, in the given order.

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
    """Members sum_r coefficients_kr basis_r, coefficients [K, R]; buffers of the first member."""
    weights = {name: tensor.detach() for name, tensor in only_group(basis).weights.items()}
    return with_weights(basis, mixed(coefficients.to(basis.device), weights))


def gram(tree: Tree) -> Tensor:
    """Inner products of all members over all tensors [K, K], in double precision.

    >>> gram({"a": torch.tensor([[3.0], [1.0]]), "b": torch.tensor([4.0, 0.0])})
    tensor([[25.,  3.],
            [ 3.,  1.]], dtype=torch.float64)
    """
    flat = (rows(tensor.detach()).double() for tensor in tree.values())
    return torch.stack([t @ t.T for t in flat]).sum(0)


def cosines(ensemble: Ensemble) -> Tensor:
    """Cosine similarity of the members' weights [K, K], without alignment.

    Fort et al. (2019), arXiv 1912.02757.
    """
    products = gram(only_group(ensemble).weights)
    norms = products.diagonal().clamp_min(1e-300).sqrt()
    return (products / norms / norms[:, None]).clamp(-1, 1).cpu()


def finite_members(ensemble: Ensemble) -> list[int]:
    """Indices of the finite members."""
    return ensemble.alive.nonzero().flatten().tolist()

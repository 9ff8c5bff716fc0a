r"""Second-order expansion of the log-likelihood around a member.

$$ \log L(θ + δ) ≈ \log L(θ) + g^T δ - \tfrac12 δ^T H δ $$

with the generalised Gauss-Newton curvature $H = \sum_n J_n^T Λ_n J_n$, where $J_n$ is the Jacobian
of the outputs and $Λ_n = -∂^2 \log p(y_n | f) / ∂f^2$, its negative eigenvalues set to zero. It is
stored in a basis in which it is diagonal: the weights themselves for `diagonal`, which ignores
interactions of weights, or the eigenvectors of the exact H of the last layer for `last_layer`.
Immer, Korzepa & Bauer (2021), arXiv 2008.08171.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import grad, jacrev, vjp, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_map

from shoal.core.errors import ConfigError
from shoal.core.structure import Inputs, Structured
from shoal.core.types import Tree
from shoal.data.dataset import Split
from shoal.engine.members.member_runner import without_fallback_warnings
from shoal.engine.members.network_call import call_network, member_call, selected_output
from shoal.inference.likelihoods import Likelihood
from shoal.inference.posterior import as_points

__all__ = [
    "Expansion",
    "counted_sites",
    "diagonal",
    "features_of",
    "last_layer",
    "last_linear",
    "output_curvature",
]


def last_linear(module: nn.Module, x: Inputs) -> tuple[str, nn.Linear]:
    """Name and module of the linear layer that gives the outputs of the network."""
    made: dict[str, Any] = {}
    hooks = [
        layer.register_forward_hook(lambda _, __, out, name=name: made.update({name: out}))
        for name, layer in module.named_modules()
        if isinstance(layer, nn.Linear)
    ]
    try:
        with torch.no_grad():
            outputs = member_call(module, x)
    finally:
        for hook in hooks:
            hook.remove()
    for name, out in made.items():
        if out is outputs:
            layer = module.get_submodule(name)
            assert isinstance(layer, nn.Linear)
            tensors = dict(layer.named_parameters())
            # Neither computed from others nor scaled by further parameters.
            if "weight" in tensors and tensors.keys() <= {"weight", "bias"}:
                _check_trained(layer)
                return name or "outputs", layer
    raise ConfigError(
        "a prior on the last layer needs a network that ends with a linear layer; "
        "leave priors on the last layer out"
    )


def _check_trained(layer: nn.Linear) -> None:
    if not layer.weight.requires_grad:
        raise ConfigError(
            "a prior on the last layer needs a last layer that is trained, not a frozen one; "
            "leave priors on the last layer out"
        )


def features_of(module: nn.Module, x: Inputs, batch_size: int = 1024) -> tuple[Tensor, Tensor]:
    """Inputs [B, ..., F] of the last layer, and the outputs of the network [B, ..., C]."""
    _, layer = last_linear(module, x[:1])
    seen: list[Tensor] = []
    hook = layer.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    try:
        with torch.no_grad():
            outputs = [member_call(module, part) for part in x.split(batch_size)]
    finally:
        hook.remove()
    return torch.cat(seen), torch.cat(outputs)


CHUNK = 64

_NUMBERS = 2**24
"""Numbers that the curvature of some data points may take in memory."""


@dataclass(frozen=True)
class Expansion:
    """A quadratic log-likelihood around a member, in a basis of diagonal curvature.

    Attributes:
        module: the member, in double precision.
        log_likelihood: log-likelihood of all data at the member.
        theta: weights of the member [d].
        gradient: g of all data [d]; zero if the member counts as the maximum.
        curvature: diagonal of H [d], at least 0.
        layer: layer of each coordinate [d].
        layers: names of the layers.
        basis: eigenvectors [d, d] of the last layer; None if coordinates are the weights.
        at_mode: treat the member as the maximum of its posterior and ignore the gradient. A
            diagonal curvature has no valid Newton step: every weight would take the whole step.
    """

    module: nn.Module
    log_likelihood: float
    theta: Tensor
    gradient: Tensor
    curvature: Tensor
    layer: Tensor
    layers: tuple[str, ...]
    basis: Tensor | None = None
    at_mode: bool = False

    def outputs(self, x: Inputs, steps: Tensor) -> Tensor:
        """Linearised outputs f(x) + J δ [S, B, ..., C] for steps δ [S, d]."""
        if self.basis is None:
            return _pushed_forward(self.module, x, steps)
        phi, f = features_of(self.module, x)
        moved = steps @ self.basis.mT
        size, flat = f.shape[-1] * phi.shape[-1], phi.flatten(0, -2)
        W = moved[:, :size].reshape(len(steps), f.shape[-1], -1)
        moved_outputs = f.flatten(0, -2) + flat @ W.mT
        moved_outputs = (
            moved_outputs + moved[:, None, size:] if moved.shape[1] > size else moved_outputs
        )
        return moved_outputs.reshape(len(steps), *f.shape)


def diagonal(
    module: nn.Module,
    likelihood: Likelihood,
    data: Split,
    log_likelihood: float,
    rows: Tensor | None = None,
) -> Expansion:
    """Expansion in the trained weights, without interactions.

    Args:
        module: the member.
        likelihood: likelihood of the outputs.
        data: all data, which give the gradient of `last_layer`.
        log_likelihood: log-likelihood of all data at the member.
        rows: data points that give the curvature, scaled to all data; None for all.
    """
    weights = _trained(module)
    assert data.y is not None, "there is no likelihood of data without targets"
    some = data if rows is None else Split(data.x[rows], data.y[rows])
    curvature = _summed_squares(module, weights, likelihood, some)
    names = [name.rpartition(".")[0] or name for name in weights]
    layers = tuple(dict.fromkeys(names))
    sizes = [weight.numel() for weight in weights.values()]
    layer = [torch.full((n,), layers.index(a)) for a, n in zip(names, sizes, strict=True)]
    theta = _flat(weights)
    return Expansion(
        module,
        log_likelihood,
        theta,
        gradient=torch.zeros_like(theta),
        curvature=len(data) / len(some) * _flat(curvature),
        layer=torch.cat(layer),
        layers=layers,
        at_mode=True,
    )


def last_layer(
    module: nn.Module,
    likelihood: Likelihood,
    data: Split,
    log_likelihood: float,
    rows: Tensor | None = None,
) -> Expansion:
    """Expansion in the last layer of a member with its full H = sum_n Λ_n ⊗ φ_n φ_n^T.

    The arguments are those of `diagonal`.
    """
    name, layer = last_linear(module, data.x[:1])
    assert data.y is not None, "there is no likelihood of data without targets"
    phi, f = features_of(module, data.x)
    if layer.bias is not None:
        phi = torch.cat([phi, torch.ones_like(phi[..., :1])], -1)
    (inner,), (outputs,), y = counted_sites(likelihood, phi, f, data.y)
    gradient = _output_gradient(likelihood, outputs, y).mT @ inner
    factor = 1.0
    if rows is not None:
        factor = len(data) / len(rows)
        (inner,), (outputs,), y = counted_sites(likelihood, phi[rows], f[rows], data.y[rows])
    C, F = outputs.shape[1], inner.shape[1]
    H, size = inner.new_zeros(C, F, C, F), max(_NUMBERS // (C * C * F), 1)
    for a, b, c in zip(*(each.split(size) for each in (inner, outputs, y)), strict=True):
        H += torch.einsum("ncd,na,nb->cadb", output_curvature(likelihood, b, c), a, a)
    order = _weights_then_biases(C, F, layer.bias is not None)
    H, flat = H.reshape(C * F, C * F)[order][:, order], gradient.flatten()[order]
    theta = torch.cat([p.detach().flatten() for p in layer.parameters()])
    eigenvalues, Q = torch.linalg.eigh(H)
    return Expansion(
        module,
        log_likelihood,
        theta @ Q,
        gradient=flat @ Q,
        curvature=factor * eigenvalues.clamp_min(0),
        layer=torch.zeros(len(theta), dtype=torch.int64),
        layers=(name,),
        basis=Q,
    )


def counted_sites(
    likelihood: Likelihood, phi: Tensor, f: Tensor, y: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Features [1, P, F], outputs [1, P, C] and targets [P] of every site that counts."""
    outputs, targets = as_points(likelihood, f[None], y)
    return as_points(likelihood, phi[None], y)[0], outputs, targets


def _weights_then_biases(C: int, F: int, biased: bool) -> Tensor:
    """From rows (w_c, b_c) of each output to the order of the layer's parameters."""
    index = torch.arange(C * F).reshape(C, F)
    return torch.cat([index[:, :-1].flatten(), index[:, -1]]) if biased else index.flatten()


def _output_gradient(likelihood: Likelihood, f: Tensor, y: Tensor) -> Tensor:
    """Gradient of the log-likelihood at the outputs [B, C]."""
    return vmap(grad(_log_prob(likelihood)))(f, y)


def output_curvature(likelihood: Likelihood, f: Tensor, y: Tensor) -> Tensor:
    """Curvature of the log-likelihood at the outputs [B, C, C], without negative eigenvalues."""
    eigenvalues, V = torch.linalg.eigh(-vmap(jacrev(grad(_log_prob(likelihood))))(f, y))
    return V * eigenvalues.clamp_min(0).unsqueeze(-2) @ V.mT


def _log_prob(likelihood: Likelihood) -> Callable[[Tensor, Tensor], Tensor]:
    """The log-likelihood of one data point."""
    return lambda outputs, target: likelihood.log_prob(outputs[None], target[None])[0]


def _summed_squares(module: nn.Module, weights: Tree, likelihood: Likelihood, data: Split) -> Tree:
    """The diagonal of H, from the columns of J^T R with R R^T = Λ, point by point."""
    with torch.no_grad():
        if member_call(module, data.x[:1]).ndim > 2:
            raise ConfigError(
                "a prior on all layers needs one target per data point, not tokens or places; "
                "use the priors on the last layer"
            )
    buffers = dict(module.named_buffers())

    def one(x: Any, root: Tensor) -> Tree:
        def outputs(w: Tree) -> Tensor:
            return selected_output(module, call_network(module, {**w, **buffers}, _alone(x, data)))

        _, back, *_ = vjp(lambda w: outputs(w)[0], weights)
        (columns,) = _each(back, root.mT)
        return {name: column.square().sum(0) for name, column in columns.items()}

    squares = {name: torch.zeros_like(weight) for name, weight in weights.items()}
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
        for x, y in data.batches(CHUNK):
            Λ = output_curvature(likelihood, member_call(module, x), y)
            eigenvalues, V = torch.linalg.eigh(Λ)
            root = V * eigenvalues.clamp_min(0).sqrt().unsqueeze(-2)
            each = _each(one, x.tensors if isinstance(x, Structured) else x, root)
            for name, rows in each.items():
                squares[name] += rows.sum(0)
    return squares


def _each(call: Callable[..., Any], *arguments: Any) -> Any:
    """The results of each row of tensors or dicts of tensors, by `vmap` or one after another."""
    try:
        with without_fallback_warnings():
            return vmap(call)(*arguments)
    except RuntimeError:
        rows = range(len(arguments[-1]))
        taken = [[tree_map(lambda t, i=i: t[i], a) for a in arguments] for i in rows]
        return tree_map(lambda *each: torch.stack(each), *(call(*each) for each in taken))


def _alone(x: Any, data: Split) -> Inputs:
    """One input, or the tensors of one, as a batch of one."""
    if isinstance(x, Tensor):
        return x[None]
    return Structured({name: tensor[None] for name, tensor in x.items()}, data.x.form)


def _pushed_forward(module: nn.Module, x: Inputs, steps: Tensor) -> Tensor:
    """f(x) + J δ; J is the pullback of the pullback, which is linear in its cotangent."""
    weights = _trained(module)
    buffers = dict(module.named_buffers())
    sizes = [weight.numel() for weight in weights.values()]

    def outputs(w: Tree) -> Tensor:
        return selected_output(module, call_network(module, {**w, **buffers}, x))

    with sdpa_kernel(SDPBackend.MATH):  # other attention has no second derivative
        f, back, *_ = vjp(outputs, weights)
    _, push, *_ = vjp(lambda cotangent: back(cotangent)[0], torch.zeros_like(f))

    def one(step: Tensor) -> Tensor:
        pieces = zip(weights.items(), step.split(sizes), strict=True)
        return push({name: piece.view_as(weight) for (name, weight), piece in pieces})[0]

    return f + torch.stack([one(step) for step in steps])


def _trained(module: nn.Module) -> Tree:
    """The weights that training changes; a frozen trunk has no posterior."""
    return {name: p.detach() for name, p in module.named_parameters() if p.requires_grad}


def _flat(tree: Tree) -> Tensor:
    return torch.cat([tensor.flatten() for tensor in tree.values()])

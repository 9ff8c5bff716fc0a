"""Sharpness of the minima: eigenvalues and trace of every member's Hessian.

Members share no weights, so the Hessian of the summed losses is block diagonal. One product with a
stack of vectors gives one product per member, and no Hessian is formed.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.func import grad

from shoal.analysis.landscape.points import only_group
from shoal.analysis.landscape.scene import AnalysisResult, Scene, registry
from shoal.core.errors import DataError
from shoal.core.random import key, normal, uniform
from shoal.core.structure import Inputs, parted
from shoal.core.tree import member_norms, per_member, rows
from shoal.core.types import Tree
from shoal.data.dataset import Split
from shoal.engine.members.member_runner import MemberRunner, twice_differentiable
from shoal.inference.ensemble import Ensemble
from shoal.inference.likelihoods import Categorical, Likelihood
from shoal.inference.posterior import as_points

__all__ = ["Trace", "curvature", "hessian_product", "top_eigenvalues", "trace"]

Product = Callable[[Tree], Tree]
"""From a stack of vectors [M, ...] to each member's Hessian times its vector."""


class Trace(NamedTuple):
    """Estimated trace of each member's Hessian and its standard error, both [M]."""

    mean: Tensor
    error: Tensor


def hessian_product(
    ensemble: Ensemble,
    split: Split,
    likelihood: Likelihood | None = None,
    batch_size: int = 500,
) -> Product:
    """H v for the Hessian of each member's mean negative log likelihood on the data.

    The gradient of <grad L, v>, summed over batches.
    """
    if split.y is None:
        raise DataError("curvature of the loss needs targets, but these data have no targets")
    real = ensemble.dtype if split.x.is_floating_point() else None
    split = Split(split.x.to(ensemble.device, real), parted(split.y)[0].to(ensemble.device))
    group, meaning = only_group(ensemble), likelihood or Categorical()
    with torch.no_grad():
        sites = ensemble(split.x[:1]).shape[2:-1]
    counted = meaning.counted(split.y)
    n = len(split) * sites.numel() if counted is None else int(counted.sum())
    weights = {name: tensor.detach() for name, tensor in group.weights.items()}
    runner = MemberRunner("loop" if group.must_loop else "vmap")

    def loss(tree: Tree, x: Inputs, y: Tensor) -> Tensor:
        outputs = runner(group.skeleton, tree | group.buffers, x, False, group.shared)
        outputs, y = as_points(meaning, outputs, y)
        return -meaning.log_prob(outputs, y).sum() / n

    def along(tree: Tree, vectors: Tree, x: Inputs, y: Tensor) -> Tensor:
        slopes = grad(loss)(tree, x, y)
        return torch.stack([(slope * vectors[name]).sum() for name, slope in slopes.items()]).sum()

    def product(vectors: Tree) -> Tree:
        total = {name: torch.zeros_like(tensor) for name, tensor in weights.items()}
        for inputs, targets in split.batches(batch_size):
            with twice_differentiable(runner, False):
                change = grad(along)(weights, vectors, inputs, targets)
            total = {name: tensor + change[name].detach() for name, tensor in total.items()}
        return total

    return product


def trace(product: Product, like: Tree, probes: int = 10, seed: int = 0) -> Trace:
    """Hutchinson's estimate, the mean of v . H v over random signs v.

    Hutchinson (1990). The estimate is exact for a diagonal Hessian.
    """
    estimates = []
    for probe in range(probes):
        signs = {
            name: 2.0 * (uniform(key(seed, f"sign {name}", probe, t.device), t.shape) < 0.5) - 1
            for name, t in like.items()
        }
        vectors = {name: sign.to(like[name].dtype) for name, sign in signs.items()}
        estimates.append(_dot(vectors, product(vectors)))
    values = torch.stack(estimates)
    spread = values.std(0) if probes > 1 else torch.full_like(values[0], torch.nan)
    return Trace(values.mean(0).cpu(), (spread / math.sqrt(probes)).cpu())


def top_eigenvalues(
    product: Product, like: Tree, count: int = 3, steps: int = 30, seed: int = 0
) -> Tensor:
    """The largest eigenvalues of each member's Hessian [M, count], descending.

    Lanczos' method with full orthogonalisation: `steps` products, and `steps` stacks of vectors in
    memory. The largest eigenvalues converge first, so a few more steps than eigenvalues suffice.
    """
    M = len(next(iter(like.values())))
    size = sum(t[0].numel() for t in like.values())
    steps = min(steps, size)
    basis = [
        _unit({n: normal(key(seed, n, 0, t.device), t.shape, t.dtype) for n, t in like.items()})
    ]
    matrix = torch.zeros(M, steps, steps, dtype=torch.float64)
    for k in range(steps):
        image = product(basis[k])
        # Twice, since one pass leaves rounding errors that grow into copies of eigenvalues.
        for _ in range(2):
            for j, vector in enumerate(basis):
                overlap = _dot(vector, image)
                matrix[:, j, k] += overlap.cpu()
                image = {n: t - per_member(overlap.to(t), t) * vector[n] for n, t in image.items()}
        if k + 1 < steps:
            basis.append(_unit(image))
    values = torch.linalg.eigvalsh((matrix + matrix.mT) / 2 if steps == 1 else _tridiagonal(matrix))
    return values.flip(-1)[:, :count]


def _tridiagonal(matrix: Tensor) -> Tensor:
    """The tridiagonal matrix of Lanczos' method, from the diagonal and the vectors' norms."""
    diagonal = torch.diag_embed(matrix.diagonal(dim1=-2, dim2=-1))
    above = torch.diag_embed(matrix.diagonal(1, dim1=-2, dim2=-1), 1)
    return diagonal + above + above.mT


def _unit(tree: Tree) -> Tree:
    norms = member_norms(tree).clamp_min(torch.finfo(torch.float32).tiny)
    return {name: tensor / per_member(norms, tensor) for name, tensor in tree.items()}


def _dot(a: Tree, b: Tree) -> Tensor:
    """Inner product of each member [M], in double precision."""
    parts = [(rows(t) * rows(b[name])).double().sum(1) for name, t in a.items()]
    return torch.stack(parts).sum(0)


@registry.register("curvature")
def curvature(scene: Scene) -> AnalysisResult:
    """Largest eigenvalues and trace of the Hessian of the training loss at every member."""
    product = hessian_product(scene.ensemble, scene.train, scene.run.likelihood)
    weights = {name: tensor.detach() for name, tensor in scene.ensemble.weights.items()}
    values = top_eigenvalues(product, weights, 5, scene.effort.products, scene.seed)
    traces = trace(product, weights, max(scene.effort.products // 3, 2), scene.seed)
    scores = {
        "top": float(values[:, 0].mean()),
        "trace": float(traces.mean.mean()),
        "weights": sum(tensor[0].numel() for tensor in weights.values()),
    }
    return AnalysisResult(
        scores, {"eigenvalues": values.float(), "trace": traces.mean, "error": traces.error}
    )

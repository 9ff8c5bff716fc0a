"""Where kernels of our own serve a stage of a step, and where the compiler's come second.

The kernels (`shoal.engine.kernels`) do with one launch what torch does with a dozen. They know the
usual choices: labels by softmax, members compared by outputs or weights as they are, radial kernels
with one bandwidth. Everything else runs by the formulas of the stages.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from shoal.core.structure import parted
from shoal.core.tree import rows
from shoal.core.types import Tree
from shoal.data.batches.batch import Targets
from shoal.engine.kernels import fused
from shoal.engine.kernels.fused import kernel_supports
from shoal.inference.likelihoods.labels import Categorical
from shoal.inference.posterior import Posterior
from shoal.interaction.cloud import GramAhead, adds_multiples
from shoal.interaction.flows import Stein
from shoal.interaction.repulsion import Repulsion, kernel_choices
from shoal.interaction.spaces import Outputs
from shoal.training.step.others import Others

__all__ = ["gram_ahead", "in_columns", "kernels_first", "reads_weights_once", "takes_outputs"]


def takes_outputs(posterior: Posterior, outputs: Tensor, y: Targets) -> bool:
    """Whether one kernel computes loss and gradient: labels that all count the same, by softmax."""
    likelihood = posterior.likelihood
    if (
        type(likelihood) is not Categorical
        or not isinstance(y, Tensor)
        or not kernel_supports(outputs)
    ):
        return False
    return likelihood.unweighted and fused.likelihood_kernels.takes(outputs, y)


def takes_many_outputs(
    posterior: Posterior, outputs: Tensor, y: Targets, weight: Tensor | None
) -> bool:
    """Whether two kernels compute loss and gradient: labels by softmax, also of tokens or places.

    Args:
        posterior: has the likelihood.
        outputs: [M, B, *S, C].
        y: targets.
        weight: their weights [B, *S]; None if all count 1.
    """
    likelihood = posterior.likelihood
    if type(likelihood) is not Categorical or not kernel_supports(outputs):
        return False
    plain = not likelihood.smoothing and likelihood.temperature is None
    return plain and fused.likelihood_kernels.takes_many(outputs, parted(y)[0], weight)


def reads_weights_once(repulsion: Repulsion | None, velocity: Tree, weights: Tree) -> bool:
    """Whether the kernel that adds the push to the drives can add a normal prior with it."""
    if repulsion is None or repulsion.space.base != "weights":
        return False
    if isinstance(repulsion.flow, Stein):  # it mixes drives that contain the prior
        return False
    if repulsion.placebo:  # its push is measured, not added
        return False
    if isinstance(repulsion.strength, Tensor):  # the kernel takes a number
        return False
    return repulsion.space.isometric and adds_multiples(
        [rows(weights[name]).unsqueeze(1) for name in velocity], list(velocity.values())
    )


def gram_ahead(
    repulsion: Repulsion | None, weights: Tree, alive: Tensor, others: Others | None
) -> GramAhead | None:
    """The Gram matrix of the weights, which a GPU finds beside the passes; None where it cannot."""
    first = next(iter(weights.values()))
    if repulsion is None or others is not None or not kernel_supports(first):
        return None
    if not reads_weights_once(repulsion, weights, weights):
        return None
    known = _has_kernels(repulsion, first, None)
    return GramAhead(repulsion.space(weights), alive) if known else None


def in_columns(repulsion: Repulsion, base: Tree) -> bool:
    """Whether the coordinates are outputs [M, B, C] with the data points next to each other."""
    outputs = base.get("outputs")
    if outputs is None or type(repulsion.space) is not Outputs or not repulsion.space.isometric:
        return False
    in_columns = not outputs.is_contiguous() and outputs.mT.is_contiguous()
    return outputs.ndim == 3 and in_columns and kernel_supports(outputs)


def kernels_first(compiled: Any, plain: Any) -> Any:
    """The compiled stages, except where own kernels need fewer launches than the compiler's.

    Args:
        compiled: the `Stages` through the compiler.
        plain: the `Stages` as they are.
    """
    return compiled._replace(
        output_stage=_unless(_has_output_kernels, plain.output_stage, compiled.output_stage),
        weight_stage=_unless(_has_weight_kernels, plain.weight_stage, compiled.weight_stage),
    )


def _unless(has_kernels: Callable[..., bool], plain: Callable, compiled: Callable) -> Callable:
    return lambda *args: plain(*args) if has_kernels(*args) else compiled(*args)


def _has_output_kernels(
    posterior: Posterior,
    repulsion: Repulsion | None,
    outputs: Tensor,
    y: Targets,
    alive: Tensor,
    weight: float | Tensor,
    prior: Tensor | None,
    others: Others | None = None,
) -> bool:
    if prior is not None or not takes_outputs(posterior, outputs, y):
        return False
    if repulsion is None or repulsion.space.base != "outputs":
        return True
    return _has_kernels(repulsion, outputs, others)


def _has_weight_kernels(
    posterior: Posterior,
    repulsion: Repulsion | None,
    velocity: Tree,
    weights: Tree,
    alive: Tensor,
    annealing: float | Tensor,
    mix: Tensor | None,
    spans: Any,
    others: Others | None = None,
    *rest: Any,
) -> bool:
    if repulsion is None or not reads_weights_once(repulsion, velocity, weights):
        return False
    return _has_kernels(repulsion, next(iter(weights.values())), others)


def _has_kernels(repulsion: Repulsion, base: Tensor, others: Others | None) -> bool:
    members = len(base) + (0 if others is None else others.size())
    choices = kernel_choices(repulsion, base, members)
    return repulsion.space.isometric and choices is not None and choices["flow"] != "laplacian"

"""`forces` returns the velocity of every member: the equation, without optimiser and loop."""

from types import NoneType
from typing import Any

from torch import Tensor

from shoal.core.arguments import anything, checked, instance_of, not_negative
from shoal.core.errors import DataError
from shoal.core.opaque import Opaque
from shoal.core.structure import Structured
from shoal.core.types import Tree
from shoal.core.values import describe_value
from shoal.engine.members.member_runner import MemberRunner
from shoal.inference.ensemble import Ensemble
from shoal.inference.posterior import Posterior
from shoal.interaction.repulsion import Repulsion
from shoal.training.members.processes import members_of
from shoal.training.options.adversarial import Adversarial
from shoal.training.step.drive import Batch, StepContext
from shoal.training.step.results import StepInfo
from shoal.training.step.stages import Stages
from shoal.training.step.velocity import velocity_of

__all__ = ["forces"]


def _annealing(name: str, value: Any) -> float | Tensor:
    return value if isinstance(value, Tensor) and value.ndim == 0 else not_negative(name, value)


def _batch(name: str, value: Any) -> Any:
    kinds = Tensor, Structured, Opaque
    if isinstance(value, tuple | list) and len(value) == 2:
        if all(isinstance(part, kinds) for part in value):
            return value
    raise DataError(f"{name} must be a pair (x, y) of tensors, not {describe_value(value)}")


@checked(
    ensemble=instance_of(Ensemble, "an Ensemble"),
    posterior=instance_of(Posterior, "a Posterior(likelihood, prior, n)"),
    repulsion=instance_of((Repulsion, NoneType), "a Repulsion, or None for a plain ensemble"),
    adversarial=instance_of(Adversarial, "an Adversarial(epsilon)"),
    annealing=_annealing,
    batch=_batch,
    frozen=instance_of(Ensemble, "an Ensemble"),
    step=anything,
)
def forces(
    ensemble: Ensemble,
    posterior: Posterior,
    repulsion: Repulsion | None,
    batch: Batch,
    *,
    annealing: float | Tensor = 1.0,
    adversarial: Adversarial | None = None,
    mapping: MemberRunner = MemberRunner(),  # noqa: B008
    seed: int = 0,
    step: int | Tensor = 0,
    stages: Stages = Stages(),  # noqa: B008
    own_inputs: bool = False,
    frozen: Ensemble | None = None,
) -> tuple[Tree, StepInfo]:
    """The velocity of every member, in the direction of ascent, and the measures of the step.

    Args:
        ensemble: the members, in training or evaluation mode.
        posterior: gives the driving force.
        repulsion: gives the repulsive force; None for a plain ensemble.
        batch: inputs [B, ...] and targets [B, ...]; see `shoal.data.batches.batch`.
        annealing: factor of the driving force (likelihood and prior).
        adversarial: adds adversarial neighbours of the inputs.
        mapping: the member runner.
        seed: fixes dropout masks and the draws of a functional prior, together with `step`.
        step: number of the training step.
        stages: the arithmetic stages, compiled or not.
        own_inputs: the inputs are [M, B, ...], one batch per member.
        frozen: frozen members, in evaluation mode. They repel the members of `ensemble` and come
            first in the kernel.

    Returns:
        Tensors [M, ...] named like the module's parameters, [...] for those that all members train
        together, and a `StepInfo`.
    """
    for each in (ensemble, frozen) if frozen is not None else (ensemble,):
        each.derivatives = posterior.likelihood.derivatives_by
    context = StepContext(
        posterior=posterior, repulsion=repulsion, annealing=annealing, adversarial=adversarial,
        mapping=mapping, seed=seed, step=step, stages=stages, own_inputs=own_inputs,
        members=members_of(frozen),
    )  # fmt: skip
    return velocity_of(context, ensemble, batch)

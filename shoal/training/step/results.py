"""What the stages of a step return, and the measures of a whole step."""

from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from shoal.core.tree import rows
from shoal.core.types import Tree
from shoal.interaction.repulsion import Push

__all__ = ["DelayedPush", "GradientResult", "OutputResult", "StepInfo", "WeightResult"]


class OutputResult(NamedTuple):
    """Result of the output stage.

    Attributes:
        loss: mean negative log-likelihood [M].
        alive: which members are finite [M].
        gradient: gradient of the mean log-likelihood with respect to the outputs [M, B, C].
        cotangent: input of the backward pass at the outputs [M, B, C].
        mix: matrix that mixes the drives [M, M]; None is the identity.
        measures: see `WeightResult`; None if the space is not of outputs.
        push: input of the backward pass at the input gradients, of all rows or some rows
            [M, B, ...], or at the outputs of points other than the batch, or of the batch if a
            placebo replaces it; None without any.
        head: the drive at the last layers; None if drive and push are already measured.
        statistics: what the likelihood learns from; None if it learns nothing.
        driven: norms of the drives at the outputs [M]; None if they are not known.
    """

    loss: Tensor
    alive: Tensor
    gradient: Tensor
    cotangent: Tensor
    mix: Tensor | None
    measures: Tensor | None
    push: Tensor | None = None
    head: Tree | None = None
    statistics: Tensor | None = None
    driven: Tensor | None = None


class GradientResult(NamedTuple):
    """Result of the gradient stage or point stage; the fields are those of `OutputResult`."""

    alive: Tensor
    cotangent: Tensor
    mix: Tensor | None
    measures: Tensor
    push: Tensor | None


class DelayedPush(NamedTuple):
    """A push on weights that is added to the drives where an optimiser moves the weights.

    Attributes:
        push: the push.
        scale: its factor.
        multiples: of the weights that belong to the drives, see `Push.added_to`.
    """

    push: Push
    scale: float
    multiples: list[float] | None

    def move(self, drive: Tree, update: Any) -> Tensor:
        """Move the weights by a step of an optimiser; returns the norms of the drives [M]."""
        given = [rows(tensor) for tensor in drive.values()]
        cloud = self.push.interaction.cloud
        return cloud.move(given, self.push.B, self.scale, self.multiples, update)


class WeightResult(NamedTuple):
    """Result of the weight stage: the velocity of the members.

    Attributes:
        velocity: tensors [M, ...] like the weights.
        alive: which members are finite [M].
        measures: drive, push, squared bandwidth and effective members, in the base of the space;
            None if the space is not of weights.
        pushed: norms of the pushes [M], which the velocity lacks; None unless a placebo replaces
            them.
        delayed: the push, which the velocity lacks; None unless it is delayed.
    """

    velocity: Tree
    alive: Tensor
    measures: Tensor | None
    pushed: Tensor | None = None
    delayed: DelayedPush | None = None


@dataclass(frozen=True, repr=False)
class StepInfo:
    """Measures of a step; all tensors stay on the device.

    Attributes:
        loss: mean negative log-likelihood of each member [M].
        alive: which members are finite [M].
        measures: drive, push, h2 and effective [4]. Drive and push are measured in the base of the
            space; for input gradients, on the weights of the last layer.
        statistics: what the likelihood learns from; None if it learns nothing.
        count: number of finite members of all processes; None for those of `alive`.
        delayed: a push that the velocity lacks; the measures then have no values.
    """

    loss: Tensor
    alive: Tensor
    measures: Tensor
    statistics: Tensor | None = None
    count: Tensor | None = None
    delayed: DelayedPush | None = None

    def __repr__(self) -> str:
        names = ("drive", "push", "ratio", "h2", "effective")
        numbers = {name: f"{float(getattr(self, name)):.4g}" for name in names}
        loss = ", ".join(f"{value:.4g}" for value in self.loss.tolist())
        finite = f"{int(self.alive.sum())} of {len(self.alive)}"
        values = {"loss": f"[{loss}]", **numbers, "finite_members": finite}
        return f"StepInfo({', '.join(f'{name}={value}' for name, value in values.items())})"

    @property
    def drive(self) -> Tensor:
        """Root mean square, over members, of the driving force's norm in the base of the space."""
        return self.measures[0]

    @property
    def push(self) -> Tensor:
        """Root mean square norm of the repulsive force, scaled as it enters the velocity."""
        return self.measures[1]

    @property
    def ratio(self) -> Tensor:
        """Force ratio, push / drive."""
        return self.push / self.drive

    @property
    def h2(self) -> Tensor:
        """Squared bandwidth, mean over the sites."""
        return self.measures[2]

    @property
    def effective(self) -> Tensor:
        """Effective number of members under the kernel, from 1 to M."""
        return self.measures[3]

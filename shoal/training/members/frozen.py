"""Frozen members: they repel the trained members and do not move."""

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from shoal.core.structure import Inputs, MemberWeighted, parted
from shoal.core.types import Tree
from shoal.inference.ensemble import Ensemble, parts_on_device
from shoal.inference.network_pass import PassResult
from shoal.interaction.repulsion import Interaction, Push, Repulsion, repel, weighted_space
from shoal.training.step.drive import Around, Batch, Drive, StepContext
from shoal.training.step.others import Others, mixed_finite
from shoal.training.step.probabilities import forces_act_at, likelihood_gradient
from shoal.training.step.velocity import velocity_of

__all__ = ["FrozenState", "WithFrozen"]


class FrozenState(NamedTuple):
    """Frozen members as the interaction sees them; they come before the trained members.

    Attributes:
        base: their tensors in the base of the space [F, ...].
        alive: which frozen members are finite [F].
        drive: their driving forces, for flows in which members share drives; None for others.
    """

    base: Tree
    alive: Tensor
    drive: Tree | None

    def size(self) -> int:
        """See `Others`."""
        return len(self.alive)

    def is_complete(self) -> bool:
        """See `Others`."""
        return True

    def repel(
        self, repulsion: Repulsion, base: Tree, alive: Tensor, weight: Tensor | None
    ) -> tuple[Push, slice]:
        """See `Others`."""
        mine = slice(len(self.alive), len(self.alive) + len(alive))
        frozen = iter(weighted_space(repulsion, weight)(self.base))
        everyone = torch.cat([self.alive, alive])
        gather = lambda leaf: torch.cat([next(frozen).to(leaf), leaf])  # noqa: E731
        return repel(repulsion, base, everyone, gather, mine, weight), mine

    def mixed(self, interaction: Interaction, drive: Tree, mine: slice) -> Tree:
        """See `Others`."""
        assert interaction.mix is not None
        return mixed_finite(interaction.mix[mine], self.before(drive), interaction.cloud.alive)

    def before(self, drive: Tree) -> Tree:
        """The drives of all members, frozen members first."""
        if self.drive is None:
            return drive
        return {name: torch.cat([self.drive[name].to(t), t]) for name, t in drive.items()}


@dataclass(frozen=True)
class WithFrozen(Around):
    """Trained members beside frozen ones.

    Attributes:
        of: where the trained members live.
        frozen: the frozen members, in evaluation mode.
    """

    frozen: Ensemble

    def others(self, passes: Drive, x: Inputs) -> Others | None:
        """See `Members`."""
        context, base = passes.context, passes.context.base
        if base is None or base == "weights":
            return None
        # Weights [M, B] are those of the members that train.
        y = passes.y.y if isinstance(passes.y, MemberWeighted) else passes.y
        if context.own_inputs:  # frozen members have no batch: they are seen at the first one
            x, y = x[0], y[0]
        plain = passes.within(y, adversarial=None, own_inputs=False, own_targets=False)
        if passes.rows is not None:  # evaluation mode: rows do not depend on the rest of the batch
            plain, x = replace(plain, rows=None, y=y[passes.rows]), x[passes.rows]
        if passes.points is not None and not context.shares_drives:  # the batch is not needed
            at_points = parted(y)[0][passes.points.rows]
            plain, x = replace(plain, points=None, y=at_points), passes.points.x
        with torch.set_grad_enabled(base == "gradients"):
            passed = PassResult.joined(
                [plain.forward(p, x, live=False).detached() for p in parts_on_device(self.frozen)]
            )
        compared = [passed.gradients, passed.at_points, passed.outputs]
        repelling = next(tensor for tensor in compared if tensor is not None)
        squashed = passes.on_probabilities
        repelling = forces_act_at(repelling, squashed)
        if not context.shares_drives:
            return FrozenState({base: repelling}, self.frozen.alive, None)
        _, alive, gradient = likelihood_gradient(
            context.posterior,
            forces_act_at(passed.outputs, squashed),
            y,
            self.frozen.alive,
            squashed,
        )
        return FrozenState({base: repelling}, alive, {"outputs": context.weight * gradient})

    def others_by_weights(
        self, context: StepContext, ensemble: Ensemble, batch: Batch
    ) -> Others | None:
        """See `Members`."""
        if context.base != "weights":
            return None
        weights = {name: tensor.detach() for name, tensor in self.frozen.weights.items()}
        drive = None
        if context.shares_drives:
            alone = StepContext(
                posterior=context.posterior, repulsion=None, annealing=context.annealing
            )
            drive, _ = velocity_of(alone, self.frozen, batch)
        return FrozenState(weights, self.frozen.alive, drive)

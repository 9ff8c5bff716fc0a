"""The driving force: forward and backward pass of members for one batch.

    x --forward--> outputs, input gradients --cotangents--> c --pull_back--> J^T c at the weights

`Members` puts the three together for all members of the step. It is the one place where the
equation meets where members live: it runs both passes, shows the other members that the interaction
must see, and adds up what is summed over all trained members. `OnDevice` is the plain answer;
`training.members` has the other answers, which are compositions.

Points other than the batch join the batch in one forward pass. With batch normalisation in training
mode they have a pass of their own, normalised by their own statistics, so that neither the batch
nor the running statistics depend on them. One backward pass carries drive and push in both cases.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from shoal.core.differentiate import pull_back
from shoal.core.structure import Inputs, MemberWeighted, joined, points_in
from shoal.core.tree import add_scaled, member_norms, mixed, per_member
from shoal.core.types import Tree
from shoal.data.batches.batch import Targets
from shoal.engine.members.member_runner import MemberInputs, MemberRunner
from shoal.engine.members.precision import rough_products
from shoal.engine.resources.plan import has_batch_norm
from shoal.inference.ensemble import Ensemble
from shoal.inference.network_pass import (
    BatchRows,
    PassContext,
    PassResult,
    forward_with_gradients,
)
from shoal.inference.posterior import (
    Posterior,
    functional_score,
    point_weights,
    target_weights,
)
from shoal.inference.priors import FunctionalPrior
from shoal.interaction.flows import Stein
from shoal.interaction.points import Drawn
from shoal.interaction.repulsion import Repulsion
from shoal.training.options.adversarial import Adversarial
from shoal.training.step.others import Others
from shoal.training.step.placebo import with_placebo
from shoal.training.step.probabilities import (
    act_on_probabilities,
    at_outputs,
    forces_act_at,
    likelihood_gradient,
)
from shoal.training.step.results import OutputResult
from shoal.training.step.stages import Stages

__all__ = ["Around", "Batch", "Drive", "Members", "OnDevice", "StepContext"]


Batch = tuple[Inputs, Targets]


class Members(Protocol):
    """The trained members of a step, wherever they live, and those that they see."""

    def run(self, passes: "Drive", ensemble: Ensemble, x: Inputs) -> tuple[OutputResult, Tree]:
        """Both passes: what the outputs give, and J^T times the cotangents at the weights."""
        ...

    def run_at_once(self, context: "StepContext") -> bool:
        """Whether all members run in one pass, which may then see the batch in two parts."""
        ...

    def others(self, passes: "Drive", x: Inputs) -> Others | None:
        """The other members by their outputs or input gradients; None if there are none."""
        ...

    def others_by_weights(
        self, context: "StepContext", ensemble: Ensemble, batch: Batch
    ) -> Others | None:
        """The other members by their weights, if the repulsion acts on weights."""
        ...

    def everyone(self, tree: Tree) -> Tree:
        """Tensors of all trained members, from those of the members here."""
        ...

    def total(self, tensors: Sequence[Tensor], kind: str) -> list[Tensor]:
        """Sums over all trained members, from the sums over the members here."""
        ...

    def all_finite(self, ensemble: Ensemble, finite: Tensor) -> Tensor:
        """Whether the tensors that all members train together are finite everywhere."""
        ...


@dataclass(frozen=True)
class OnDevice:
    """All members are on the device and train here; there are no others."""

    def run(self, passes: "Drive", ensemble: Ensemble, x: Inputs) -> tuple[OutputResult, Tree]:
        """See `Members`."""
        passed = passes.forward(ensemble, x)
        others = passes.context.members.others(passes, x)
        result = passes.cotangents(ensemble, x, passed.detached(), others)
        velocity, head = passes.pull_back(ensemble, passed, result)
        return result._replace(head=head), velocity

    def run_at_once(self, context: "StepContext") -> bool:
        """See `Members`."""
        return True

    def others(self, passes: "Drive", x: Inputs) -> Others | None:
        """See `Members`."""
        return None

    def others_by_weights(
        self, context: "StepContext", ensemble: Ensemble, batch: Batch
    ) -> Others | None:
        """See `Members`."""
        return None

    def everyone(self, tree: Tree) -> Tree:
        """See `Members`."""
        return tree

    def total(self, tensors: Sequence[Tensor], kind: str) -> list[Tensor]:
        """See `Members`."""
        return list(tensors)

    def all_finite(self, ensemble: Ensemble, finite: Tensor) -> Tensor:
        """See `Members`."""
        return finite


@dataclass(frozen=True)
class Around:
    """Members that live as `of` says, but for what a composition changes."""

    of: Members

    def run(self, passes: "Drive", ensemble: Ensemble, x: Inputs) -> tuple[OutputResult, Tree]:
        """See `Members`."""
        return self.of.run(passes, ensemble, x)

    def run_at_once(self, context: "StepContext") -> bool:
        """See `Members`."""
        return self.of.run_at_once(context)

    def others(self, passes: "Drive", x: Inputs) -> Others | None:
        """See `Members`."""
        return self.of.others(passes, x)

    def others_by_weights(
        self, context: "StepContext", ensemble: Ensemble, batch: Batch
    ) -> Others | None:
        """See `Members`."""
        return self.of.others_by_weights(context, ensemble, batch)

    def everyone(self, tree: Tree) -> Tree:
        """See `Members`."""
        return self.of.everyone(tree)

    def total(self, tensors: Sequence[Tensor], kind: str) -> list[Tensor]:
        """See `Members`."""
        return self.of.total(tensors, kind)

    def all_finite(self, ensemble: Ensemble, finite: Tensor) -> Tensor:
        """See `Members`."""
        return self.of.all_finite(ensemble, finite)


@dataclass(frozen=True, kw_only=True, eq=False)
class StepContext(PassContext):
    """The inputs of a step.

    Attributes:
        posterior: gives the driving force.
        repulsion: gives the repulsive force; None for a plain ensemble.
        annealing: factor of the driving force (likelihood and prior).
        ramped: the factor of a step is that of the repulsive force instead.
        adversarial: adds adversarial neighbours of the inputs.
        stages: the arithmetic stages, compiled or not.
        own_inputs: every member has its own inputs [M, B, ...].
        own_targets: every member has its own targets [M, B, ...].
        common: number of points at the head of own batches at which outputs are compared.
        members: the members of the step, wherever they live.
        delays: a push on weights may be left to the optimiser, see `WeightResult.delayed`.
    """

    posterior: Posterior
    repulsion: Repulsion | None
    annealing: float | Tensor = 1.0
    ramped: bool = False
    adversarial: Adversarial | None = None
    stages: Stages = Stages()
    own_inputs: bool = False
    own_targets: bool = False
    common: int = 0
    members: Members = OnDevice()
    delays: bool = False

    def delaying(self) -> "StepContext":
        """The context of a step whose push on weights may be left to the optimiser."""
        other = object.__new__(StepContext)
        other.__dict__.update(self.__dict__, delays=True)
        return other

    def at(
        self, step: int | Tensor, annealing: float | Tensor, mapping: MemberRunner
    ) -> "StepContext":
        """The context of one step of training, with its factor of the drive or of the push.

        `dataclasses.replace` does the same but takes one percent of a small step.
        """
        other = object.__new__(StepContext)
        other.__dict__.update(self.__dict__, step=step, annealing=annealing, mapping=mapping)
        if self.ramped and self.repulsion is not None:
            scaled = self.repulsion.in_step(strength=annealing * self.repulsion.strength)
            other.__dict__.update(repulsion=scaled, annealing=1.0, ramped=False)
        return other

    @property
    def base(self) -> str | None:
        """What the repulsion acts on: "weights", "outputs" or "gradients"; None without any."""
        return None if self.repulsion is None else self.repulsion.space.base

    @property
    def shares_drives(self) -> bool:
        """Whether the flow mixes the drives of members, as a Stein flow does."""
        return self.repulsion is not None and isinstance(self.repulsion.flow, Stein)

    @property
    def weight(self) -> float | Tensor:
        """Factor of the likelihood's gradient at the clean inputs."""
        return self.annealing if self.adversarial is None else 0.5 * self.annealing

    @property
    def at_outputs(self) -> bool:
        """Whether repulsion or a functional prior acts on the outputs."""
        return self.base == "outputs" or isinstance(self.posterior.prior, FunctionalPrior)

    @property
    def compares_passes(self) -> bool:
        """Whether the backward pass of a member needs the forward passes of all members."""
        return self.at_outputs or self.base == "gradients"

    @property
    def needs_all_at_once(self) -> bool:
        """Whether one pass must hold all members: they share adversarial neighbours."""
        adversarial = self.adversarial
        return adversarial is not None and (adversarial.shared or self.shares_drives)


@dataclass(frozen=True, eq=False)
class Drive:
    """Forward and backward pass for one batch, with input gradients where the method needs them.

    Attributes:
        context: the settings of the step. Its repulsion acts here if its space is of outputs or of
            input gradients.
        y: targets of the batch.
        rows: rows of the batch whose input gradients are compared, a slice for the first rows; None
            for all rows.
        shares: weight of each member's drive in the velocity of tensors that all members train
            together [M]; None for equal weights.
        points: where members are compared; None for the batch.
    """

    context: StepContext
    y: Targets
    rows: Tensor | slice | None = None
    shares: Tensor | None = None
    points: Drawn | None = None

    def __call__(self, ensemble: Ensemble, x: Inputs) -> tuple[OutputResult, Tree]:
        """The cotangents at the outputs, and J^T times them at the weights."""
        return self.context.members.run(self, ensemble, x)

    def within(self, y: Targets | None = None, **changes: Any) -> "Drive":
        """The same batch, or other targets, in a context with these changes."""
        y = self.y if y is None else y
        return replace(self, y=y, context=replace(self.context, **changes))

    def of_members(self, members: slice) -> "Drive":
        """The same for some members, with their targets, weights of targets and shares."""
        y = self.y
        if self.context.own_targets:
            y = y[members]
        elif isinstance(y, MemberWeighted):
            y = MemberWeighted.of_pair(y.y, y.weight[members])
        return replace(self, y=y, shares=None if self.shares is None else self.shares[members])

    @property
    def on_probabilities(self) -> bool:
        """Whether all forces act on the probabilities."""
        return act_on_probabilities(self.context.posterior, self.context.repulsion)

    def forward(self, ensemble: Ensemble, x: Inputs, live: bool = True) -> PassResult:
        """Outputs of the members, and their input gradients where the repulsion acts on these."""
        context, repulsion = self.context, self.context.repulsion
        if repulsion is None or context.base != "gradients":
            return self._forward_outputs(ensemble, x)
        rows = self.rows if self.points is None else self.points.rows
        part = None if rows is None else BatchRows(self._member_inputs(ensemble, x), rows)
        points = None if self.points is None else self.points.x
        likelihood, batch = context.posterior.likelihood, (x, self.y)
        return forward_with_gradients(
            ensemble, batch, likelihood, repulsion.space, context, live=live, part=part,
            points=points, own=context.own_targets,
        )  # fmt: skip

    def _forward_outputs(self, ensemble: Ensemble, x: Inputs) -> PassResult:
        """Outputs of the members at the batch and, if there are any, at the other points."""
        context, points = self.context, self.points
        how = context.seed, context.step
        shown, apart = self._member_inputs(ensemble, x)
        if points is None or points.leading:
            outputs = ensemble(shown, context.mapping, apart, *how)
            at_points = None if points is None else outputs[:, : len(points.rows)]
            return PassResult(shown, outputs, at_points=at_points)
        whole = None if apart or _normalises(ensemble) else joined([x, points.x])
        if isinstance(whole, type(x)):
            outputs = ensemble(whole, context.mapping, False, *how)
            at_batch, at_points = outputs[:, : len(x)], outputs[:, len(x) :]
        else:
            at_batch = ensemble(shown, context.mapping, apart, *how)
            at_points = ensemble.without_side_effects()(points.x, context.mapping, False, *how)
        return PassResult(shown, at_batch, at_points=at_points)

    def _member_inputs(self, ensemble: Ensemble, x: Inputs) -> MemberInputs:
        if self.context.adversarial is None:
            return MemberInputs(x, self.context.own_inputs)
        return MemberInputs(self.context.adversarial.watch(x, ensemble.members), own=True)

    def cotangents(
        self,
        ensemble: Ensemble,
        x: Inputs,
        passed: PassResult,
        others: Others | None = None,
    ) -> OutputResult:
        """The cotangents at the outputs, and at the input gradients if there are any."""
        context, outputs = self.context, passed.outputs
        posterior, repulsion = context.posterior, context.repulsion
        how = context.seed, context.step, self.on_probabilities
        prior = functional_score(ensemble, posterior, outputs, x, *how)
        prior = None if prior is None else context.annealing * prior
        here = repulsion if passed.at_points is None else None
        result = context.stages.output_stage(
            posterior, here, outputs, self.y, ensemble.alive, context.weight, prior, others,
        )  # fmt: skip
        drive = posterior, repulsion, result.alive, result.cotangent
        if passed.at_points is not None:
            counted = self._targets_counted(outputs)
            leading = self.points is not None and self.points.leading
            pushed = context.stages.point_stage(
                *drive, passed.at_points, others, counted, result.driven, leading
            )
            return result._replace(**pushed._asdict())
        if passed.gradients is None:
            return result
        with rough_products(ensemble.compute):
            weight, counted = point_weights(self.y), None
            if self.points is not None:
                count = points_in(self.y, context.own_targets)
                weight, counted = None, count if weight is None else weight.sum()
            if weight is not None and self.rows is not None:
                weight = weight[self.rows]
            pushed = context.stages.gradient_stage(
                *drive, passed.gradients, others, weight, counted
            )
        # A named tuple replaced inside a compiled stage lost fields (torch 2.11).
        return result._replace(**pushed._asdict())

    def _targets_counted(self, outputs: Tensor) -> float | Tensor:
        """Number of targets in the batch, or their total weight."""
        weight = target_weights(self.context.posterior.likelihood, self.y, outputs.shape[1:-1])
        if weight is None:
            return outputs[0, ..., 0].numel()
        return weight.mean(0).sum() if weight.ndim == outputs.ndim - 1 else weight.sum()

    def pull_back(
        self, ensemble: Ensemble, passed: PassResult, result: OutputResult
    ) -> tuple[Tree, Tree | None]:
        """J^T at the weights; for input gradients also the drive alone at the last layer.

        At tensors that all members train together it is the sum over members.
        """
        context = self.context
        weights = ensemble.weights | ensemble.trained_shared
        values, cotangents, head = [passed.outputs], [self._weighed(result.cotangent)], None
        pushed = None
        if passed.gradients is not None and result.push is not None:
            last = {name: weights[name] for name in ensemble.heads}
            head = pull_back(passed.outputs, result.cotangent, last, keep_graph=True)
        if result.push is not None:
            compared = (passed.gradients, passed.at_points, passed.outputs)
            at = next(tensor for tensor in compared if tensor is not None)
            if context.repulsion is not None and context.repulsion.placebo:
                push = pull_back(at, result.push, ensemble.weights, keep_graph=True)
                pushed = member_norms(push, ensemble.spans)
            else:
                values, cotangents = [*values, at], [*cotangents, result.push]
        if context.adversarial is None:
            velocity = pull_back(values, cotangents, weights)
        else:
            assert isinstance(passed.inputs, Tensor), "adversarial inputs are real"
            data = result.gradient if context.at_outputs or head is not None else None
            velocity, at_inputs = context.adversarial.pull_back(
                values, cotangents, data, weights, passed.inputs
            )
            more = self._at_neighbours(ensemble, passed, result, at_inputs)
            head = None if head is None else add_scaled(head, more, context.weight)
            velocity = add_scaled(velocity, more, context.weight)
        if pushed is not None:
            velocity = with_placebo(ensemble, velocity, pushed, context.seed, context.step)
        return self._unweighed(velocity, ensemble), head

    def _at_neighbours(
        self, ensemble: Ensemble, passed: PassResult, result: OutputResult, at_inputs: Tensor
    ) -> Tree:
        """The drive at the adversarial neighbours of the inputs, J^T at the weights."""
        context, adversarial, x = self.context, self.context.adversarial, passed.inputs
        assert adversarial is not None and isinstance(x, Tensor)
        worst = adversarial.neighbours(x, at_inputs, result.alive, context.members.total)
        apart = not adversarial.shared
        outputs = ensemble(worst, context.mapping, apart, context.seed, context.step)
        squashed = self.on_probabilities
        at = forces_act_at(outputs.detach(), squashed)
        gradient = likelihood_gradient(context.posterior, at, self.y, result.alive, squashed)[2]
        if result.mix is not None:
            gradient = mixed(result.mix, context.members.everyone({"": gradient}))[""]
        gradient = at_outputs(at, gradient) if squashed else gradient
        weights = ensemble.weights | ensemble.trained_shared
        return pull_back(outputs, self._weighed(gradient), weights)

    def _weighed(self, cotangent: Tensor) -> Tensor:
        """The cotangents times the members' shares, so that sums over members are weighted."""
        if self.shares is None:
            return cotangent
        return cotangent * per_member(self.shares, cotangent)

    def _unweighed(self, velocity: Tree, ensemble: Ensemble) -> Tree:
        """The same tree with private tensors divided by the shares again."""
        if self.shares is None:
            return velocity
        factor = torch.where(self.shares > 0, 1 / self.shares, 0.0)
        private = {n: velocity[n] * per_member(factor, velocity[n]) for n in ensemble.weights}
        return velocity | private


def _normalises(ensemble: Ensemble) -> bool:
    """Whether the outputs at a row may depend on the other rows of its batch."""
    return ensemble.training and (has_batch_norm(ensemble.groups) or bool(ensemble.buffers))

"""The driving force: forward and backward pass of all members for one batch.

Members run all together, or in chunks, so that only the activations of one chunk exist at a time.
If the repulsion acts on outputs or input gradients, the backward pass of a chunk needs those of all
members. They are then computed first. The first chunk keeps its activations, and the other chunks
repeat their forward pass.

Points other than the batch join the batch in one forward pass. With batch normalisation in training
mode they have a pass of their own, normalised by their own statistics, so that neither the batch
nor the running statistics depend on them. One backward pass carries drive and push in both cases.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from shoal.core.differentiate import pull_back
from shoal.core.structure import Inputs, MemberWeighted, joined, parted
from shoal.core.tree import add_scaled, mixed, per_member
from shoal.core.types import Tree
from shoal.data.batches.batch import Targets
from shoal.engine.derivatives.replicas import Division, divided_batch
from shoal.engine.members.member_runner import MemberInputs
from shoal.engine.members.precision import rough_products
from shoal.engine.resources.divisible import treats_rows_alone
from shoal.engine.resources.plan import has_batch_norm
from shoal.inference.ensemble import Ensemble, parts_on_device
from shoal.inference.network_pass import BatchRows, PassResult, forward_with_gradients
from shoal.inference.posterior import functional_score, point_weights, target_weights
from shoal.interaction.points import Drawn
from shoal.training.members.mesh_cloud import gathered_drives
from shoal.training.members.parts import Chunks, Parts, places_of
from shoal.training.step.context import StepContext
from shoal.training.step.probabilities import (
    act_on_probabilities,
    at_outputs,
    forces_act_at,
    likelihood_gradient,
)
from shoal.training.step.stages import FrozenState, OutputResult

__all__ = ["Drive"]


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
        parts: the members part by part, for members that are not all on the device.
    """

    context: StepContext
    y: Targets
    rows: Tensor | slice | None = None
    shares: Tensor | None = None
    points: Drawn | None = None
    parts: Parts | None = None

    def __call__(self, ensemble: Ensemble, x: Inputs) -> tuple[OutputResult, Tree]:
        """The cotangents at the outputs, and J^T times them at the weights."""
        chunk = self.context.in_chunks
        if self.parts is not None:
            return self._in_parts(ensemble, x, self.parts)
        if chunk is not None and chunk < ensemble.members:
            return self._in_parts(ensemble, x, Chunks(ensemble, chunk))
        if self._is_divided(ensemble, x):
            return self._on_own_rows(ensemble, x)
        passed = self._forward(ensemble, x)
        result = self._output_result(ensemble, x, passed.detached(), self._frozen_state(x))
        velocity, head = self._back(ensemble, passed, result)
        return result._replace(head=head), velocity

    def within(self, y: Targets | None = None, **changes: Any) -> "Drive":
        """The same batch, or other targets, in a context with these changes."""
        own = self.y if y is None else y
        return replace(self, y=own, context=replace(self.context, **changes))

    def _is_divided(self, ensemble: Ensemble, x: Inputs) -> bool:
        """Whether replicas divide the batch: networks that treat each row by itself.

        Batch normalisation and dropout know of the other replicas. Otherwise every replica runs the
        whole batch, which gives the same velocity.
        """
        context, mesh = self.context, self.context.mesh
        if mesh is None or not mesh.replicated or len(x) < mesh.grid[1]:
            return False
        plain = context.adversarial is None and self.points is None and not context.own_inputs
        if not plain or self.rows is not None or context.mapping.recompute:
            return False
        return isinstance(x, Tensor) and treats_rows_alone(ensemble.groups, x)

    def _on_own_rows(self, ensemble: Ensemble, x: Inputs) -> tuple[OutputResult, Tree]:
        """The same for the rows of this replica; passes are gathered, velocities summed."""
        mesh = self.context.mesh
        assert mesh is not None
        points, rows = len(x), mesh.batch_rows(len(x))
        division = Division(rows, lambda own: mesh.add([own], "statistics", "data")[0])
        with divided_batch(division):
            passed = replace(self, y=self.y[rows])._forward(ensemble, x[rows])
        whole = PassResult(x, mesh.gather_rows(passed.outputs, points))
        if passed.gradients is not None:
            whole = whole._replace(gradients=mesh.gather_rows(passed.gradients, points))
        result = self._output_result(ensemble, x, whole, self._frozen_state(x))
        mine = result._replace(cotangent=result.cotangent[:, rows].contiguous())
        if result.push is not None and passed.gradients is not None:
            mine = mine._replace(push=result.push[:, rows].contiguous())
        velocity, head = self._back(ensemble, passed, mine)
        shards = ensemble.groups[0].shards
        summed = {} if shards is None else {n: t for n, t in velocity.items() if n in shards.shapes}
        velocity = {name: t for name, t in velocity.items() if name not in summed}
        sums = mesh.add([*velocity.values(), *(head or {}).values()], "velocity", "data")
        if head is not None:
            head = dict(zip(head, sums[len(velocity) :], strict=True))
        velocity = dict(zip(velocity, sums[: len(velocity)], strict=True))
        return result._replace(head=head), velocity | summed

    def _in_parts(self, ensemble: Ensemble, x: Inputs, parts: Parts) -> tuple[OutputResult, Tree]:
        context = self.context
        whole = self.within(mapping=replace(context.mapping, chunk=None))
        others, frozen = [], None
        if context.compares_passes:
            others, frozen = whole._other_passes(ensemble, parts, x), self._frozen_state(x)
        result, passes, heads = None, [], []
        for part in parts.changed():
            mine = places_of(part, ensemble)
            drive = whole._of_members(mine)
            passed = drive._forward(part, x[mine] if context.own_inputs else x)
            passes.append(passed.detached())
            if context.compares_passes and result is None:
                together = PassResult.joined([passes[0], *others])
                result = whole._output_result(ensemble, x, together, frozen)
            own = drive._output_result(part, x, passes[-1]) if result is None else _of(result, mine)
            velocity, head = drive._back(part, passed, own)
            parts.add(part, velocity, own._replace(head=head))
            heads.append(head)
        if result is None:
            result = whole._output_result(ensemble, x, PassResult.joined(passes))
        head = None if heads[0] is None else _concatenated(heads, ensemble.heads)
        return result._replace(head=head), parts.tree()

    def _of_members(self, members: slice) -> "Drive":
        """The same for some members, with their own targets, weights of targets and shares."""
        y = self.y
        if self.context.own_targets:
            y = y[members]
        elif isinstance(y, MemberWeighted):
            y = MemberWeighted.of_pair(y.y, y.weight[members])
        return replace(self, y=y, shares=None if self.shares is None else self.shares[members])

    @property
    def _squashed(self) -> bool:
        """Whether all forces act on the probabilities."""
        return act_on_probabilities(self.context.posterior, self.context.repulsion)

    def _forward(self, ensemble: Ensemble, x: Inputs, live: bool = True) -> PassResult:
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
            points=points,
        )  # fmt: skip

    def _forward_outputs(self, ensemble: Ensemble, x: Inputs) -> PassResult:
        """Outputs of the members at the batch and, if there are any, at the other points."""
        context, points = self.context, self.points
        how = context.seed, context.step
        shown, own = self._member_inputs(ensemble, x)
        if points is None:
            return PassResult(shown, ensemble(shown, context.mapping, own, *how))
        whole = None if own or _normalises(ensemble) else joined([x, points.x])
        if isinstance(whole, type(x)):
            outputs = ensemble(whole, context.mapping, False, *how)
            at_batch, at_points = outputs[:, : len(x)], outputs[:, len(x) :]
        else:
            at_batch = ensemble(shown, context.mapping, own, *how)
            at_points = ensemble.without_side_effects()(points.x, context.mapping, False, *how)
        return PassResult(shown, at_batch, at_points=at_points)

    def _member_inputs(self, ensemble: Ensemble, x: Inputs) -> MemberInputs:
        if self.context.adversarial is None:
            return MemberInputs(x, self.context.own_inputs)
        return MemberInputs(self.context.adversarial.watch(x, ensemble.members), own=True)

    def _other_passes(self, ensemble: Ensemble, parts: Parts, x: Inputs) -> list[PassResult]:
        """The outputs of all parts but the first, which keep no activations and change nothing."""
        plain, passes = self.within(adversarial=None), []
        with torch.set_grad_enabled(self.context.base == "gradients"):
            for part in parts.others():
                own = plain._of_members(places_of(part, ensemble))
                passes.append(own._forward(part.without_side_effects(), x, live=False).detached())
        return passes

    def _output_result(
        self,
        ensemble: Ensemble,
        x: Inputs,
        passed: PassResult,
        frozen: FrozenState | None = None,
    ) -> OutputResult:
        """The cotangents at the outputs, and at the input gradients if there are any."""
        context, outputs = self.context, passed.outputs
        posterior, repulsion = context.posterior, context.repulsion
        how = context.seed, context.step, self._squashed
        prior = functional_score(ensemble, posterior, outputs, x, *how)
        prior = None if prior is None else context.annealing * prior
        here = repulsion if passed.at_points is None else None
        result = context.stages.output_stage(
            posterior, here, outputs, self.y, ensemble.alive, context.weight, prior, frozen,
            **context.others,
        )  # fmt: skip
        drive = posterior, repulsion, result.alive, result.cotangent
        if passed.at_points is not None:
            counted = self._targets_counted(outputs)
            pushed = context.stages.point_stage(
                *drive, passed.at_points, frozen, counted, **context.others
            )
            return result._replace(**pushed._asdict())
        if passed.gradients is None:
            return result
        with rough_products(ensemble.compute):
            own, counted = point_weights(self.y), None
            if self.points is not None:
                own, counted = None, len(self.y) if own is None else own.sum()
            own = own if own is None or self.rows is None else own[self.rows]
            pushed = context.stages.gradient_stage(
                *drive, passed.gradients, frozen, own, counted, **context.others
            )
        # A named tuple replaced inside a compiled stage lost fields (torch 2.11).
        return result._replace(**pushed._asdict())

    def _targets_counted(self, outputs: Tensor) -> float | Tensor:
        """Number of targets in the batch, or their total weight."""
        weight = target_weights(self.context.posterior.likelihood, self.y, outputs.shape[1:-1])
        if weight is None:
            return outputs[0, ..., 0].numel()
        return weight.mean(0).sum() if weight.ndim == outputs.ndim - 1 else weight.sum()

    def _frozen_state(self, x: Inputs) -> FrozenState | None:
        """Outputs or input gradients of the frozen members, if the repulsion acts on them."""
        context, frozen, base = self.context, self.context.frozen, self.context.base
        if frozen is None or base is None or base == "weights":
            return None
        # Weights [M, B] are those of the members that train.
        y = self.y.y if isinstance(self.y, MemberWeighted) else self.y
        plain = self.within(y, adversarial=None)
        if self.rows is not None:  # evaluation mode: rows do not depend on the rest of the batch
            plain, x = replace(plain, rows=None, y=y[self.rows]), x[self.rows]
        if self.points is not None and not context.shares_drives:  # the batch is not needed
            plain, x = replace(plain, points=None, y=parted(y)[0][self.points.rows]), self.points.x
        with torch.set_grad_enabled(base == "gradients"):
            looks = [plain._forward(p, x, live=False).detached() for p in parts_on_device(frozen)]
        passed = PassResult.joined(looks)
        compared = [passed.gradients, passed.at_points, passed.outputs]
        repelled = next(tensor for tensor in compared if tensor is not None)
        squashed = self._squashed
        repelled = forces_act_at(repelled, squashed)
        if not context.shares_drives:
            return FrozenState({base: repelled}, frozen.alive, None)
        at = forces_act_at(passed.outputs, squashed)
        _, alive, gradient = likelihood_gradient(context.posterior, at, y, frozen.alive, squashed)
        return FrozenState({base: repelled}, alive, {"outputs": context.weight * gradient})

    def _back(
        self, ensemble: Ensemble, passed: PassResult, result: OutputResult
    ) -> tuple[Tree, Tree | None]:
        """J^T at the weights; for input gradients also the drive alone at the last layer.

        At tensors that all members train together it is the sum over members.
        """
        context, adversarial = self.context, self.context.adversarial
        weights = ensemble.weights | ensemble.trained_shared
        values, cotangents, head = [passed.outputs], [self._weighed(result.cotangent)], None
        if passed.gradients is not None and result.push is not None:
            last = {name: weights[name] for name in ensemble.heads}
            head = pull_back(passed.outputs, result.cotangent, last, keep_graph=True)
            values, cotangents = [*values, passed.gradients], [*cotangents, result.push]
        if passed.at_points is not None and result.push is not None:
            values, cotangents = [*values, passed.at_points], [*cotangents, result.push]
        at_inputs, x = None, passed.inputs
        if adversarial is not None:
            assert isinstance(x, Tensor)
            more = context.at_outputs or head is not None
            data = result.gradient if more else None
            velocity, at_inputs = adversarial.pull_back(values, cotangents, data, weights, x)
        else:
            velocity = pull_back(values, cotangents, weights)
        if adversarial is None or at_inputs is None or not isinstance(x, Tensor):
            return self._unweighed(velocity, ensemble), head
        worst = adversarial.neighbours(x, at_inputs, result.alive, context.mesh)
        own = not adversarial.shared
        again = ensemble(worst, context.mapping, own, context.seed, context.step)
        squashed = self._squashed
        at = forces_act_at(again.detach(), squashed)
        gradient = likelihood_gradient(context.posterior, at, self.y, result.alive, squashed)[2]
        if context.mesh is not None and result.mix is not None:
            gradient = gathered_drives(context.mesh, {"": gradient})[""]
        gradient = mixed(result.mix, {"": gradient})[""]
        gradient = at_outputs(at, gradient) if squashed else gradient
        more = pull_back(again, self._weighed(gradient), weights)
        head = None if head is None else add_scaled(head, more, context.weight)
        return self._unweighed(add_scaled(velocity, more, context.weight), ensemble), head

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
        own = {n: velocity[n] * per_member(factor, velocity[n]) for n in ensemble.weights}
        return velocity | own


def _normalises(ensemble: Ensemble) -> bool:
    """Whether the outputs at a row may depend on the other rows of its batch."""
    return ensemble.training and (has_batch_norm(ensemble.groups) or bool(ensemble.buffers))


def _concatenated(parts: list, names: Iterable[str]) -> Tree:
    return {name: torch.cat([part[name] for part in parts if name in part]) for name in names}


def _of(result: OutputResult, rows: slice) -> OutputResult:
    loss, alive, gradient, cotangent = (tensor[rows] for tensor in result[:4])
    push = None if result.push is None else result.push[rows]
    return OutputResult(loss, alive, gradient, cotangent, result.mix, result.measures, push)

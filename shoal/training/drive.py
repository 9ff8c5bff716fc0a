"""The drive: what the data ask of every member, brought back through the networks.

Members go through the networks all together, or in chunks, forward and back, so that the
activations of one chunk exist at a time. Where the repulsion lives on outputs or input gradients, a
chunk needs those of all members before it can go back: they are computed first, and each chunk runs
forward again.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from shoal.core.differentiate import pull_back
from shoal.core.tree import add_scaled, mixed
from shoal.core.types import Tree
from shoal.engine.member_runner import MemberInputs
from shoal.engine.precision import rough_products
from shoal.inference.ensemble import Ensemble
from shoal.inference.network_pass import BatchRows, PassResult, looked_at
from shoal.inference.posterior import functional_score
from shoal.training.context import StepContext
from shoal.training.stages import FrozenState, OutputResult, judge

__all__ = ["Drive"]


@dataclass(frozen=True, eq=False)
class Drive:
    """One batch, shown to the members; a part of it once more where input gradients need that.

    Attributes:
        context: what the step is computed with; its repulsion acts here if its space lives on
            outputs or on input gradients.
        y: targets of the batch.
        rows: of the batch, those at which input gradients are compared; None for all.
    """

    context: StepContext
    y: Tensor
    rows: Tensor | None = None

    def __call__(self, ensemble: Ensemble, x: Tensor) -> tuple[OutputResult, Tree]:
        """What the outputs ask for, and J^T of it at the weights."""
        chunk = self.context.in_chunks
        if chunk is not None and chunk < ensemble.members:
            return self._in_chunks(ensemble, x, chunk)
        look = self._forward(ensemble, x)
        answer = self._answer(ensemble, x, look.still())
        velocity, head = self._back(ensemble, look, answer)
        return answer._replace(head=head), velocity

    def within(self, y: Tensor | None = None, **changes: Any) -> "Drive":
        """The same batch, or other targets, in a context with these changes."""
        own = self.y if y is None else y
        return replace(self, y=own, context=replace(self.context, **changes))

    def _in_chunks(self, ensemble: Ensemble, x: Tensor, chunk: int) -> tuple[OutputResult, Tree]:
        context = self.context
        whole = self.within(mapping=replace(context.mapping, chunk=None))
        starts = range(0, ensemble.members, chunk)
        parts = [ensemble.slice_members(s, min(s + chunk, ensemble.members)) for s in starts]
        needs_all = context.at_outputs or context.base == "gradients"
        answer = whole._answer(ensemble, x, whole._peek(parts, x)) if needs_all else None
        looks, velocities, heads = [], [], []
        for part in parts:
            first = part.first - ensemble.first
            mine = slice(first, first + part.members)
            look = whole._forward(part, x[mine] if context.own_inputs else x)
            looks.append(look.still())
            own = whole._answer(part, x, looks[-1]) if answer is None else _of(answer, mine)
            velocity, head = whole._back(part, look, own)
            velocities.append(velocity)
            heads.append(head)
        if answer is None:
            answer = whole._answer(ensemble, x, PassResult.joined(looks))
        head = None if heads[0] is None else _concatenated(heads, ensemble.heads)
        return answer._replace(head=head), _concatenated(velocities, ensemble.weights)

    def _forward(self, ensemble: Ensemble, x: Tensor, live: bool = True) -> PassResult:
        """Outputs of the members, and their input gradients where the repulsion acts on these."""
        context, repulsion = self.context, self.context.repulsion
        if repulsion is None or context.base != "gradients":
            x, own = self._shown(ensemble, x)
            return PassResult(x, ensemble(x, context.mapping, own, context.seed, context.step))
        part = None if self.rows is None else BatchRows(self._shown(ensemble, x), self.rows)
        likelihood, batch = context.posterior.likelihood, (x, self.y)
        return looked_at(
            ensemble, batch, likelihood, repulsion.space, context, live=live, part=part
        )

    def _shown(self, ensemble: Ensemble, x: Tensor) -> MemberInputs:
        if self.context.adversarial is None:
            return MemberInputs(x, self.context.own_inputs)
        return MemberInputs(self.context.adversarial.watch(x, ensemble.members), own=True)

    def _peek(self, parts: list[Ensemble], x: Tensor) -> PassResult:
        """What all members say, with running statistics left as they are."""
        plain = self.within(adversarial=None)
        with torch.set_grad_enabled(self.context.base == "gradients"):
            looks = [plain._forward(part.aside(), x, live=False).still() for part in parts]
        return PassResult.joined(looks)

    def _answer(self, ensemble: Ensemble, x: Tensor, look: PassResult) -> OutputResult:
        """What the outputs ask for, and the input gradients if there are any."""
        context, outputs = self.context, look.outputs
        posterior, repulsion = context.posterior, context.repulsion
        prior = functional_score(ensemble, posterior, outputs, x, context.seed, context.step)
        prior = None if prior is None else context.annealing * prior
        company = self._company(x)
        answer = context.stages.output_stage(
            posterior, repulsion, outputs, self.y, ensemble.alive, context.weight, prior, company
        )
        if look.gradients is None:
            return answer
        with rough_products(ensemble.compute):
            apart = context.stages.gradient_stage(
                posterior, repulsion, answer.alive, answer.cotangent, look.gradients, company
            )
        # A named tuple replaced inside a compiled stage came back too short (torch 2.11).
        return answer._replace(**apart._asdict())

    def _company(self, x: Tensor) -> FrozenState | None:
        """What the frozen members make of the batch, where this is what repels."""
        context, frozen, base = self.context, self.context.frozen, self.context.base
        if frozen is None or base is None or base == "weights":
            return None
        plain = self.within(adversarial=None)
        if self.rows is not None:  # they are in evaluation mode, and see a part for itself
            plain, x = replace(plain, rows=None, y=self.y[self.rows]), x[self.rows]
        with torch.set_grad_enabled(base == "gradients"):
            look = plain._forward(frozen, x, live=False).still()
        shown = look.outputs if look.gradients is None else look.gradients
        if not context.shares_drives:
            return FrozenState({base: shown}, frozen.alive, None)
        _, alive, gradient = judge(context.posterior, look.outputs, self.y, frozen.alive)
        return FrozenState({base: shown}, alive, {"outputs": context.weight * gradient})

    def _back(
        self, ensemble: Ensemble, look: PassResult, answer: OutputResult
    ) -> tuple[Tree, Tree | None]:
        """J^T at the weights; and where the push comes back with it, the drive's at the head."""
        context, weights, adversarial = self.context, ensemble.weights, self.context.adversarial
        values, cotangents, head = [look.outputs], [answer.cotangent], None
        if look.gradients is not None and answer.push is not None:
            last = {name: weights[name] for name in ensemble.heads}
            head = pull_back(look.outputs, answer.cotangent, last, keep_graph=True)
            values, cotangents = [*values, look.gradients], [*cotangents, answer.push]
        at_inputs = None
        if adversarial is not None:
            more = context.at_outputs or head is not None
            data = answer.gradient if more else None
            velocity, at_inputs = adversarial.pull_back(
                values, cotangents, data, weights, look.inputs
            )
        else:
            velocity = pull_back(values, cotangents, weights)
        if adversarial is None or at_inputs is None:
            return velocity, head
        worst = adversarial.neighbours(look.inputs, at_inputs, answer.alive)
        own = not adversarial.shared
        again = ensemble(worst, context.mapping, own, context.seed, context.step)
        gradient = judge(context.posterior, again.detach(), self.y, answer.alive)[2]
        gradient = mixed(answer.mix, {"": gradient})[""]
        more = pull_back(again, gradient, weights)
        head = None if head is None else add_scaled(head, more, context.weight)
        return add_scaled(velocity, more, context.weight), head


def _concatenated(parts: list, names: Iterable[str]) -> Tree:
    return {name: torch.cat([part[name] for part in parts if name in part]) for name in names}


def _of(answer: OutputResult, rows: slice) -> OutputResult:
    loss, alive, gradient, cotangent = (tensor[rows] for tensor in answer[:4])
    push = None if answer.push is None else answer.push[rows]
    return OutputResult(loss, alive, gradient, cotangent, answer.mix, answer.measures, push)

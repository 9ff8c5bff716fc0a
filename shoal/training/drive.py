"""The drive: what the data ask of every member, brought back through the networks.

Members go through the networks all together, or in chunks, forward and back, so that the
activations of one chunk exist at a time. Where the repulsion lives on outputs or input gradients, a
chunk needs those of all members before it can go back: they are computed first, and each chunk runs
forward again.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from shoal.core.tree import add_scaled, mixed
from shoal.core.types import Tree
from shoal.inference.ensemble import Ensemble
from shoal.inference.mapping import Mapping, Shown
from shoal.inference.numerics import rough_products
from shoal.inference.posterior import Posterior
from shoal.inference.priors import FunctionalPrior
from shoal.interaction.flows import Stein
from shoal.interaction.repulsion import Repulsion
from shoal.training.adversarial import Adversarial
from shoal.training.backward import pull_back
from shoal.training.functional_prior import functional_score
from shoal.training.look import Look, Part, looked_at
from shoal.training.stages import Answer, Company, Stages, judge

__all__ = ["Drive"]


@dataclass(frozen=True)
class Drive:
    """One batch, shown to the members; a part of it once more where input gradients need that.

    Attributes:
        posterior: what drives them.
        repulsion: acts here if its space lives on outputs or on input gradients.
        y: targets of the batch.
        annealing: factor of the drive.
        adversarial: trains on worst-case neighbours of the inputs as well.
        mapping: how the members run.
        seed: of dropout and of a functional prior's draws.
        step: of the same.
        stages: the arithmetic between the networks.
        own_inputs: every member has inputs of its own [M, B, ...].
        frozen: members that push the others and stay where they are, in evaluation mode.
        rows: of the batch, those at which input gradients are compared; None for all.
    """

    posterior: Posterior
    repulsion: Repulsion | None
    y: Tensor
    annealing: float | Tensor
    adversarial: Adversarial | None
    mapping: Mapping
    seed: int
    step: int | Tensor
    stages: Stages
    own_inputs: bool = False
    frozen: Ensemble | None = None
    rows: Tensor | None = None

    @property
    def weight(self) -> float | Tensor:
        """Factor of the likelihood's gradient at the inputs that are shown."""
        return self.annealing if self.adversarial is None else 0.5 * self.annealing

    @property
    def at_outputs(self) -> bool:
        """More than the likelihood acts on the outputs."""
        repelled = self.repulsion is not None and self.repulsion.space.base == "outputs"
        return repelled or isinstance(self.posterior.prior, FunctionalPrior)

    @property
    def at_gradients(self) -> bool:
        """The repulsion acts on the input gradients."""
        return self.repulsion is not None and self.repulsion.space.base == "gradients"

    @property
    def _separable(self) -> bool:
        """Members can go back in chunks: no neighbour of the inputs is made by all of them."""
        mixing = self.repulsion is not None and isinstance(self.repulsion.flow, Stein)
        return self.adversarial is None or not (self.adversarial.shared or mixing)

    def __call__(self, ensemble: Ensemble, x: Tensor) -> tuple[Answer, Tree]:
        """What the outputs ask for, and J^T of it at the weights."""
        chunk = self.mapping.chunk
        if chunk is not None and chunk < ensemble.members and self._separable:
            return self._in_chunks(ensemble, x, chunk)
        look = self._forward(ensemble, x)
        answer = self._answer(ensemble, x, look.still())
        velocity, head = self._back(ensemble, look, answer)
        return answer._replace(head=head), velocity

    def _in_chunks(self, ensemble: Ensemble, x: Tensor, chunk: int) -> tuple[Answer, Tree]:
        whole = replace(self, mapping=replace(self.mapping, chunk=None))
        starts = range(0, ensemble.members, chunk)
        parts = [ensemble.part(s, min(s + chunk, ensemble.members)) for s in starts]
        needs_all = self.at_outputs or self.at_gradients
        answer = whole._answer(ensemble, x, whole._peek(parts, x)) if needs_all else None
        looks, velocities, heads = [], [], []
        for part in parts:
            first = part.first - ensemble.first
            mine = slice(first, first + part.members)
            look = whole._forward(part, x[mine] if self.own_inputs else x)
            looks.append(look.still())
            own = whole._answer(part, x, looks[-1]) if answer is None else _of(answer, mine)
            velocity, head = whole._back(part, look, own)
            velocities.append(velocity)
            heads.append(head)
        if answer is None:
            answer = whole._answer(ensemble, x, Look.joined(looks))
        head = None if heads[0] is None else _concatenated(heads, ensemble.heads)
        return answer._replace(head=head), _concatenated(velocities, ensemble.weights)

    def _forward(self, ensemble: Ensemble, x: Tensor, live: bool = True) -> Look:
        if self.repulsion is None or not self.at_gradients:
            shown = self._shown(ensemble, x)
            return Look(shown.x, self._run(ensemble, *shown))
        likelihood, space = self.posterior.likelihood, self.repulsion.space
        context = ensemble, x, self.y, likelihood, space, self.mapping, self.seed, self.step, live
        part = None if self.rows is None else Part(self._shown(ensemble, x), self.rows)
        return looked_at(*context, part)

    def _shown(self, ensemble: Ensemble, x: Tensor) -> Shown:
        if self.adversarial is None:
            return Shown(x, self.own_inputs)
        return Shown(self.adversarial.watch(x, ensemble.members), own=True)

    def _run(self, ensemble: Ensemble, x: Tensor, own_inputs: bool) -> Tensor:
        return ensemble(x, self.mapping, own_inputs, self.seed, self.step)

    def _peek(self, parts: list[Ensemble], x: Tensor) -> Look:
        """What all members say, with running statistics left as they are."""
        plain = replace(self, adversarial=None)
        with torch.set_grad_enabled(self.at_gradients):
            looks = [plain._forward(part.aside(), x, live=False).still() for part in parts]
        return Look.joined(looks)

    def _answer(self, ensemble: Ensemble, x: Tensor, look: Look) -> Answer:
        outputs = look.outputs
        prior = functional_score(ensemble, self.posterior, outputs, x, self.seed, self.step)
        prior = None if prior is None else self.annealing * prior
        context = self.posterior, self.repulsion
        company = self._company(x)
        here = outputs, self.y, ensemble.alive, self.weight, prior, company
        answer = self.stages.respond(*context, *here)
        if look.gradients is None:
            return answer
        here = answer.alive, answer.cotangent, look.gradients, company
        with rough_products(ensemble.compute):
            apart = self.stages.part(*context, *here)
        # A named tuple replaced inside a compiled stage came back too short (torch 2.11).
        return answer._replace(**apart._asdict())

    def _company(self, x: Tensor) -> Company | None:
        """What the frozen members make of the batch, where this is what repels."""
        if self.frozen is None or self.repulsion is None:
            return None
        base = self.repulsion.space.base
        if base == "weights":
            return None
        plain = replace(self, adversarial=None)
        if self.rows is not None:  # they are in evaluation mode, and see a part for itself
            plain, x = replace(plain, rows=None, y=self.y[self.rows]), x[self.rows]
        with torch.set_grad_enabled(self.at_gradients):
            look = plain._forward(self.frozen, x, live=False).still()
        shown = look.outputs if look.gradients is None else look.gradients
        if not isinstance(self.repulsion.flow, Stein):
            return Company({base: shown}, self.frozen.alive, None)
        _, alive, gradient = judge(self.posterior, look.outputs, self.y, self.frozen.alive)
        return Company({base: shown}, alive, {"outputs": self.weight * gradient})

    def _back(self, ensemble: Ensemble, look: Look, answer: Answer) -> tuple[Tree, Tree | None]:
        """J^T at the weights; and where the push comes back with it, the drive's at the head."""
        weights, adversarial = ensemble.weights, self.adversarial
        values, cotangents, head = [look.outputs], [answer.cotangent], None
        if look.gradients is not None and answer.push is not None:
            last = {name: weights[name] for name in ensemble.heads}
            head = pull_back(look.outputs, answer.cotangent, last, keep_graph=True)
            values, cotangents = [*values, look.gradients], [*cotangents, answer.push]
        at_inputs = None
        if adversarial is not None:
            more = self.at_outputs or head is not None
            data = answer.gradient if more else None
            velocity, at_inputs = adversarial.pull_back(
                values, cotangents, data, weights, look.inputs
            )
        else:
            velocity = pull_back(values, cotangents, weights)
        if adversarial is None or at_inputs is None:
            return velocity, head
        worst = adversarial.neighbours(look.inputs, at_inputs, answer.alive)
        again = self._run(ensemble, worst, not adversarial.shared)
        gradient = judge(self.posterior, again.detach(), self.y, answer.alive)[2]
        gradient = mixed(answer.mix, {"": gradient})[""]
        more = pull_back(again, gradient, weights)
        head = None if head is None else add_scaled(head, more, self.weight)
        return add_scaled(velocity, more, self.weight), head


def _concatenated(parts: list, names: Iterable[str]) -> Tree:
    return {name: torch.cat([part[name] for part in parts if name in part]) for name in names}


def _of(answer: Answer, rows: slice) -> Answer:
    loss, alive, gradient, cotangent = (tensor[rows] for tensor in answer[:4])
    push = None if answer.push is None else answer.push[rows]
    return Answer(loss, alive, gradient, cotangent, answer.mix, answer.measures, push)

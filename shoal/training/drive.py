"""The drive: what the data ask of every member, brought back through the networks.

Members go through the networks all together, or in chunks, forward and back, so that the
activations of one chunk exist at a time. Where the repulsion lives on outputs, a chunk needs the
outputs of all members before it can go back: they are computed first, and each chunk runs forward
again.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from shoal.core.tree import add_scaled, mixed
from shoal.core.types import Tree
from shoal.inference.ensemble import Ensemble
from shoal.inference.mapping import Mapping
from shoal.inference.posterior import Posterior
from shoal.inference.priors import FunctionalPrior
from shoal.interaction.flows import Stein
from shoal.interaction.repulsion import Repulsion
from shoal.training.adversarial import Adversarial
from shoal.training.backward import pull_back
from shoal.training.functional_prior import functional_score
from shoal.training.stages import Answer, Stages, judge

__all__ = ["Drive"]


@dataclass(frozen=True)
class Drive:
    """One batch, shown to the members once.

    Attributes:
        posterior: what drives them.
        repulsion: acts here if its space lives on outputs.
        y: targets of the batch.
        annealing: factor of the drive.
        adversarial: trains on worst-case neighbours of the inputs as well.
        mapping: how the members run.
        seed: of dropout and of a functional prior's draws.
        step: of the same.
        stages: the arithmetic between the networks.
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
    def _separable(self) -> bool:
        """Members can go back in chunks: no neighbour of the inputs is made by all of them."""
        mixing = self.repulsion is not None and isinstance(self.repulsion.flow, Stein)
        return self.adversarial is None or not (self.adversarial.shared or mixing)

    def __call__(self, ensemble: Ensemble, x: Tensor) -> tuple[Answer, Tree]:
        """What the outputs ask for, and J^T of it at the weights."""
        chunk = self.mapping.chunk
        if chunk is not None and chunk < ensemble.members and self._separable:
            return self._in_chunks(ensemble, x, chunk)
        shown, outputs = self._forward(ensemble, x)
        answer = self._answer(ensemble, x, outputs.detach())
        return answer, self._back(ensemble, shown, outputs, answer)

    def _in_chunks(self, ensemble: Ensemble, x: Tensor, chunk: int) -> tuple[Answer, Tree]:
        whole = replace(self, mapping=replace(self.mapping, chunk=None))
        starts = range(0, ensemble.members, chunk)
        parts = [ensemble.part(s, min(s + chunk, ensemble.members)) for s in starts]
        answer = whole._answer(ensemble, x, whole._peek(parts, x)) if self.at_outputs else None
        outputs, velocities = [], []
        for part in parts:
            shown, live = whole._forward(part, x)
            outputs.append(live.detach())
            mine = whole._answer(part, x, outputs[-1]) if answer is None else _of(part, answer)
            velocities.append(whole._back(part, shown, live, mine))
        if answer is None:
            answer = whole._answer(ensemble, x, torch.cat(outputs))
        joined = {
            name: torch.cat([velocity[name] for velocity in velocities if name in velocity])
            for name in ensemble.weights
        }
        return answer, joined

    def _forward(self, ensemble: Ensemble, x: Tensor) -> tuple[Tensor, Tensor]:
        own = self.adversarial is not None
        shown = self.adversarial.watch(x, ensemble.members) if self.adversarial else x
        return shown, self._run(ensemble, shown, own)

    def _run(self, ensemble: Ensemble, x: Tensor, own_inputs: bool) -> Tensor:
        return ensemble(x, self.mapping, own_inputs, self.seed, self.step)

    def _peek(self, parts: list[Ensemble], x: Tensor) -> Tensor:
        """Outputs of all members, with running statistics left as they are."""
        outputs = []
        with torch.no_grad():
            for part in parts:
                kept = {name: tensor.clone() for name, tensor in part.buffers.items()}
                outputs.append(self._run(part, x, False))
                for name, tensor in part.buffers.items():
                    tensor.copy_(kept[name])
        return torch.cat(outputs)

    def _answer(self, ensemble: Ensemble, x: Tensor, outputs: Tensor) -> Answer:
        prior = functional_score(ensemble, self.posterior, outputs, x, self.seed, self.step)
        prior = None if prior is None else self.annealing * prior
        context = self.posterior, self.repulsion
        return self.stages.respond(*context, outputs, self.y, ensemble.alive, self.weight, prior)

    def _back(self, ensemble: Ensemble, shown: Tensor, outputs: Tensor, answer: Answer) -> Tree:
        weights, adversarial = ensemble.weights, self.adversarial
        if adversarial is None:
            return pull_back(outputs, answer.cotangent, weights)
        data = answer.gradient if self.at_outputs else None
        velocity, at_inputs = adversarial.pull_back(outputs, answer.cotangent, data, weights, shown)
        worst = adversarial.neighbours(shown, at_inputs, answer.alive)
        again = self._run(ensemble, worst, not adversarial.shared)
        gradient = judge(self.posterior, again.detach(), self.y, answer.alive)[2]
        drive = mixed(answer.mix, {"": gradient})[""]
        return add_scaled(velocity, pull_back(again, drive, weights), self.weight)


def _of(part: Ensemble, answer: Answer) -> Answer:
    rows = slice(part.first, part.first + part.members)
    loss, alive, gradient, cotangent = (tensor[rows] for tensor in answer[:4])
    return Answer(loss, alive, gradient, cotangent, answer.mix, answer.measures)

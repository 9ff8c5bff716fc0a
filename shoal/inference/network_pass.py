"""One pass of the networks over a batch: outputs, and their derivatives in the inputs."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from shoal.core.errors import DataError
from shoal.core.random import key, uniform
from shoal.core.types import Tree
from shoal.engine.member_runner import MemberInputs, MemberRunner, twice_differentiable
from shoal.engine.plan import has_batch_norm, has_convolutions
from shoal.inference.ensemble import Ensemble
from shoal.inference.likelihoods import Likelihood
from shoal.interaction.space import Space
from shoal.interaction.spaces import innermost

__all__ = ["BatchRows", "PassContext", "PassResult", "TrackedInputs", "looked_at", "random_rows"]


@dataclass(frozen=True, kw_only=True, eq=False)
class PassContext:
    """How members go through the networks.

    Attributes:
        mapping: how the members run.
        seed: of dropout, and of whatever else a step draws.
        step: of training, which with the seed decides what is drawn.
    """

    mapping: MemberRunner = MemberRunner()
    seed: int = 0
    step: int | Tensor = 0


@dataclass(frozen=True)
class TrackedInputs:
    """A batch for every member, with the tensors at which gradients are recorded.

    Attributes:
        x: inputs [M, B, ...], or [B, ...] for all when they are tokens.
        probes: what is added to the embeddings of each architecture, when they are tokens.
    """

    x: Tensor
    probes: list[Tree] | None = None

    @classmethod
    def of(cls, ensemble: Ensemble, x: Tensor) -> "TrackedInputs":
        """Real inputs as they are, tokens at the embedding that they go through first."""
        if x.is_floating_point():
            return cls(x.expand(ensemble.members, *x.shape).detach().requires_grad_())
        probes = []
        for group in ensemble.groups:
            found = group.embedded(x)
            if found is None:
                raise DataError(
                    "the inputs are whole numbers and the network has no nn.Embedding that takes "
                    "them first, so they have no gradient; convert them to float, or use a method "
                    "such as 'f-kde'"
                )
            name, shape = found
            zeros = torch.zeros(group.members, *shape, device=x.device, dtype=ensemble.dtype)
            probes.append({name: zeros.requires_grad_()})
        shapes = {next(iter(probe.values())).shape[1:] for probe in probes}
        if len(shapes) > 1:
            raise DataError(
                "the architectures embed tokens in different shapes, so that their input "
                "gradients cannot be compared; give the embeddings one size"
            )
        return cls(x, probes)

    @property
    def leaves(self) -> list[Tensor]:
        """Where gradients are recorded."""
        return [self.x] if self.probes is None else [t for p in self.probes for t in p.values()]

    def run(self, ensemble: Ensemble, context: PassContext) -> Tensor:
        """Outputs [M, B, C]."""
        own = self.probes is None
        with twice_differentiable(context.mapping, self.x.is_cuda) as mapping:
            return ensemble(self.x, mapping, own, context.seed, context.step, self.probes)

    def run_in(
        self, batch: MemberInputs, alone: bool, ensemble: Ensemble, context: PassContext
    ) -> tuple[Tensor, Tensor]:
        """Outputs for a whole batch, and for the part of it that is watched.

        Args:
            batch: the inputs.
            alone: the part is normalised by its own statistics, and not as the batch is. So are
                tokens: what is recorded of them is added to their embeddings.
            ensemble: the members.
            context: how they run.
        """
        seed, step = context.seed, context.step
        # Without convolutions and statistics there is nothing to share, and a batch that goes for
        # itself need not be differentiable twice.
        apart = not (has_convolutions(ensemble.groups) or has_batch_norm(ensemble.groups))
        if alone or apart or self.probes is not None:
            whole = ensemble(batch.x, context.mapping, batch.own, seed, step)
            return whole, self.run(ensemble.aside(), context)
        with twice_differentiable(context.mapping, self.x.is_cuda) as mapping:
            whole, part = ensemble.with_part(batch, self.x, mapping, seed, step)
        return whole, part

    def gradients(self, scores: Tensor, live: bool) -> Tensor:
        """Gradient of each member's scores, summed over the batch [M, B, ...].

        Args:
            scores: [M, B]; member i's depend on member i's inputs alone.
            live: they will be differentiated again.
        """
        leaves = self.leaves
        found = torch.autograd.grad(
            scores.sum(), leaves, create_graph=live, retain_graph=live, allow_unused=True
        )
        gradients = [gradient for gradient in found if gradient is not None]
        if len(gradients) < len(leaves):
            raise DataError(
                "the outputs of the network do not depend on its inputs in a way that can be "
                "differentiated; use a method such as 'f-kde'"
            )
        return torch.cat(gradients) if len(gradients) > 1 else gradients[0]


class PassResult(NamedTuple):
    """What came out of the networks for one batch.

    Attributes:
        inputs: what was shown, [B, ...] or [M, B, ...].
        outputs: [M, B, C].
        gradients: of each member's scores with respect to the inputs, or to some of them,
            [M, B, ...], where wanted.
    """

    inputs: Tensor
    outputs: Tensor
    gradients: Tensor | None = None

    def still(self) -> "PassResult":
        """The numbers alone."""
        gradients = None if self.gradients is None else self.gradients.detach()
        return PassResult(self.inputs.detach(), self.outputs.detach(), gradients)

    @classmethod
    def joined(cls, looks: Sequence["PassResult"]) -> "PassResult":
        """Of several parts of an ensemble."""
        gradients = [look.gradients for look in looks if look.gradients is not None]
        outputs = torch.cat([look.outputs for look in looks])
        return cls(looks[0].inputs, outputs, torch.cat(gradients) if gradients else None)


class BatchRows(NamedTuple):
    """Some points of a batch.

    Attributes:
        batch: as it is shown to the members.
        rows: which of its points.
    """

    batch: MemberInputs
    rows: Tensor


def looked_at(
    ensemble: Ensemble,
    batch: tuple[Tensor, Tensor],
    likelihood: Likelihood,
    space: Space,
    context: PassContext,
    *,
    live: bool,
    part: BatchRows | None = None,
) -> PassResult:
    """Outputs of every member, and input gradients, all or of a part.

    Args:
        ensemble: the members.
        batch: inputs [B, ...] and targets.
        likelihood: what they are scored by.
        space: of the input gradients.
        context: how the members run.
        live: the gradients can be differentiated again.
        part: where gradients are wanted, if not everywhere.
    """
    x, y = batch
    if part is None:
        watched = TrackedInputs.of(ensemble, x)
        shown, outputs = watched.x, watched.run(ensemble, context)
        judged = outputs
    else:
        watched, shown, y = TrackedInputs.of(ensemble, x[part.rows]), part.batch.x, y[part.rows]
        alone = innermost(space).own_statistics
        outputs, judged = watched.run_in(part.batch, alone, ensemble, context)
    scores = _scores(innermost(space).target, likelihood, judged, y)
    return PassResult(shown, outputs, watched.gradients(scores, live))


def random_rows(
    share: float, batch: int, seed: int, step: int | Tensor, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Rows of a random part of a batch, at least two where there are two, and the other rows."""
    count = min(max(math.ceil(share * batch), 2), batch)
    order = uniform(key(seed, "fraction", step, device), (batch,)).argsort(descending=True)
    return order[:count], order[count:]


def _scores(target: str, likelihood: Likelihood, outputs: Tensor, y: Tensor) -> Tensor:
    """What each member's gradient is taken of, for every point [M, B]."""
    if target == "log-probability":
        return likelihood.log_prob(outputs, y)
    return likelihood.score(outputs, y)

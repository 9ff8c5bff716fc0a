"""One look at a batch: what the members say, and what in the inputs makes them say it.

For a space of input gradients z is itself a derivative of the network, so that its J^T needs the
second derivative: the first is taken with a graph of its own, and one backward pass through both
carries drive and push together.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from shoal.core.random import key, uniform
from shoal.inference.ensemble import Ensemble
from shoal.inference.likelihoods import Likelihood
from shoal.inference.mapping import Shown
from shoal.inference.watched import PassContext, Watched
from shoal.interaction.space import Space
from shoal.interaction.spaces import innermost

__all__ = ["Look", "Part", "looked_at", "some_of"]


class Look(NamedTuple):
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

    def still(self) -> "Look":
        """The numbers alone."""
        gradients = None if self.gradients is None else self.gradients.detach()
        return Look(self.inputs.detach(), self.outputs.detach(), gradients)

    @classmethod
    def joined(cls, looks: Sequence["Look"]) -> "Look":
        """Of several parts of an ensemble."""
        gradients = [look.gradients for look in looks if look.gradients is not None]
        outputs = torch.cat([look.outputs for look in looks])
        return cls(looks[0].inputs, outputs, torch.cat(gradients) if gradients else None)


class Part(NamedTuple):
    """Some points of a batch.

    Attributes:
        batch: as it is shown to the members.
        rows: which of its points.
    """

    batch: Shown
    rows: Tensor


def looked_at(
    ensemble: Ensemble,
    batch: tuple[Tensor, Tensor],
    likelihood: Likelihood,
    space: Space,
    context: PassContext,
    *,
    live: bool,
    part: Part | None = None,
) -> Look:
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
        watched = Watched.of(ensemble, x)
        shown, outputs = watched.x, watched.run(ensemble, context)
        judged = outputs
    else:
        watched, shown, y = Watched.of(ensemble, x[part.rows]), part.batch.x, y[part.rows]
        alone = innermost(space).own_statistics
        outputs, judged = watched.run_in(part.batch, alone, ensemble, context)
    scores = _scores(innermost(space).target, likelihood, judged, y)
    return Look(shown, outputs, watched.gradients(scores, live))


def some_of(
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

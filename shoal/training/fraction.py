"""Repulsion of input gradients on a random part of each batch.

* Batch normalisation couples the points of a batch, so that the drive needs the whole of it. The
  part goes through the networks once more, normalised as the batch is (`with_part`) or by its own
  statistics, and its push comes back together with the drive.
* Where every point goes through the networks for itself, a CPU divides the batch: the part is
  driven and repelled, the rest is only driven. A GPU takes as long for two small batches as it
  takes to show the part twice.

The kernel is a mean over sites, so that the part needs no factor of its own; repulsion that is
counted per batch is still counted against the whole batch.
"""

from dataclasses import replace

from torch import Tensor

from shoal.core.tree import add_scaled
from shoal.core.types import Tree
from shoal.inference.ensemble import Ensemble
from shoal.inference.priors import FunctionalPrior
from shoal.inference.suited import has_batch_norm
from shoal.interaction.repulsion import Repulsion
from shoal.interaction.spaces import innermost
from shoal.training.drive import Drive
from shoal.training.look import some_of
from shoal.training.stages import Answer

__all__ = ["share_of", "with_part_repelled"]


def share_of(repulsion: Repulsion) -> float:
    """Share of each batch on which the members are compared."""
    return getattr(innermost(repulsion.space), "fraction", 1.0)


def with_part_repelled(drive: Drive, ensemble: Ensemble, x: Tensor) -> tuple[Answer, Tree]:
    """The drive of the whole batch, and the push of a part of it."""
    context, repulsion = drive.context, drive.context.repulsion
    assert repulsion is not None, "without repulsion there is no part"
    rows, rest = some_of(share_of(repulsion), len(x), context.seed, context.step, x.device)
    share = len(rows) / len(x)
    counted = share if repulsion.per == "batch" else 1.0
    repulsion = replace(repulsion, strength=counted * repulsion.strength)
    drive = drive.within(repulsion=repulsion)
    if len(rest) == 0:
        return drive(ensemble, x)
    if not _divisible(drive, ensemble):
        return replace(drive, rows=rows)(ensemble, x)
    part = drive.within(y=drive.y[rows], annealing=share * context.annealing)
    left = drive.within(y=drive.y[rest], annealing=(1 - share) * context.annealing, repulsion=None)
    pushed, velocity = part(ensemble, x[rows])
    answer, driven = left(ensemble, x[rest])
    loss = share * pushed.loss + (1 - share) * answer.loss
    head = None if pushed.head is None else {n: t + driven[n] for n, t in pushed.head.items()}
    pushed = pushed._replace(loss=loss, alive=answer.alive & pushed.alive, head=head)
    if pushed.statistics is not None and answer.statistics is not None:
        both = share * pushed.statistics + (1 - share) * answer.statistics
        pushed = pushed._replace(statistics=both)
    return pushed, add_scaled(velocity, driven, 1.0)


def _divisible(drive: Drive, ensemble: Ensemble) -> bool:
    """Every point is driven by itself: no layer and no prior on functions looks at several at once.

    Adversarial training and chunks of members take batches whole.
    """
    context = drive.context
    if drive.y.is_cuda or context.adversarial is not None or context.mapping.chunk is not None:
        return False
    prior = context.posterior.prior
    coupled = has_batch_norm(ensemble.groups) or isinstance(prior, FunctionalPrior)
    return not (coupled or ensemble.buffers)

"""Repulsion of input gradients on a random part of each batch.

The part goes through the networks by itself:

* On a CPU, where every point goes through the networks for itself, the batch is divided: the part
  is driven and repelled, the rest is only driven.
* Batch normalisation couples the points of a batch, so that the drive needs the whole of it. The
  part is then only repelled, and normalised by its own statistics, or if that is asked for by the
  running ones. Those are numbers: the push ends where the input gradient ends and does not go back
  through the forward pass.
* On a GPU the part is always only repelled. It is too little work to keep the device busy, so that
  the drive goes beside it; by the times of its convolutions, to drive it as well would not pay.

The kernel is a mean over sites, so that the part needs no factor of its own; repulsion that is
counted per batch is still counted against the whole batch. Running statistics follow the whole
batch alone.
"""

from contextlib import nullcontext
from dataclasses import replace

from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from shoal.core.tree import add_scaled
from shoal.core.types import Tree
from shoal.inference.ensemble import Ensemble
from shoal.inference.priors import Flat, FunctionalPrior
from shoal.inference.statistics import running_statistics
from shoal.inference.streams import Branch
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
    repulsion = drive.repulsion
    assert repulsion is not None, "without repulsion there is no part"
    rows, rest = some_of(share_of(repulsion), len(x), drive.seed, drive.step, x.device)
    share = len(rows) / len(x)
    counted = share if repulsion.per == "batch" else 1.0
    repulsion = replace(repulsion, strength=counted * repulsion.strength)
    divided = len(rest) > 0 and x.device.type != "cuda" and _divisible(drive, ensemble)
    driving, left = (share, 1 - share) if divided else (0.0, 1.0)
    shown = rest if divided else slice(None)
    posterior = replace(drive.posterior, prior=Flat())  # a functional prior acts with the others
    part = replace(drive, posterior=posterior, repulsion=repulsion, y=drive.y[rows])
    part = replace(part, annealing=driving * drive.annealing, adversarial=None, driven=divided)
    others = replace(drive, repulsion=None, y=drive.y[shown], annealing=left * drive.annealing)
    # The part reads running statistics that the drive beside it moves: it gets its own before.
    aside, branch = ensemble.aside(), Branch(x.device)
    with branch, running_statistics(ensemble) if _by_running(repulsion) else nullcontext():
        pushed, push = part(aside, x[rows])
    answer, driven = others(ensemble, x[shown])
    branch.join()
    head = {name: driven[name] for name in ensemble.heads}
    head = head if pushed.head is None else add_scaled(pushed.head, head, 1.0)
    loss = driving * pushed.loss + left * answer.loss
    pushed = pushed._replace(loss=loss, alive=answer.alive & pushed.alive, head=head)
    return pushed, add_scaled(push, driven, 1.0)


def _by_running(repulsion: Repulsion) -> bool:
    return getattr(innermost(repulsion.space), "running", False)


def _divisible(drive: Drive, ensemble: Ensemble) -> bool:
    """Every point is driven by itself: no layer and no prior on functions looks at several at once.

    Adversarial training and chunks of members take batches whole.
    """
    if drive.adversarial is not None or drive.mapping.chunk is not None:
        return False
    layers = [layer for group in ensemble.groups for layer in group.skeleton.modules()]
    coupled = any(isinstance(layer, _BatchNorm) for layer in layers)
    return not (coupled or ensemble.buffers or isinstance(drive.posterior.prior, FunctionalPrior))

"""Repulsion of input gradients on a random part of each batch.

Where every point goes through the networks for itself, the batch is divided: the part is driven and
repelled, the rest is only driven. Batch normalisation couples the points of a batch, so that the
drive needs the whole of it: there the part goes through the networks once more by itself, and what
it pushes is added. Running statistics follow the whole batch alone.

The kernel is a mean over sites, so that the part needs no factor of its own; repulsion that is
counted per batch is still counted against the whole batch.
"""

from dataclasses import replace

from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from shoal.core.tree import add_scaled
from shoal.core.types import Tree
from shoal.inference.ensemble import Ensemble
from shoal.inference.priors import Flat, FunctionalPrior
from shoal.inference.streams import Branch
from shoal.interaction.repulsion import Repulsion
from shoal.interaction.spaces import innermost
from shoal.training.drive import Drive
from shoal.training.look import head_lengths, some_of
from shoal.training.stages import Answer, measured

__all__ = ["share_of", "with_part_repelled"]


def share_of(repulsion: Repulsion) -> float:
    """Share of each batch on which the members are compared."""
    return getattr(innermost(repulsion.space), "fraction", 1.0)


def with_part_repelled(drive: Drive, ensemble: Ensemble, x: Tensor) -> tuple[Answer, Tree]:
    """The drive of the whole batch, and the push of a part of it."""
    repulsion = drive.repulsion
    assert repulsion is not None, "without repulsion there is no part"
    rows, rest = some_of(share_of(repulsion), len(x), drive.seed, drive.step, x.device)
    counted = len(rows) / len(x) if repulsion.per == "batch" else 1.0
    repulsion = replace(repulsion, strength=counted * repulsion.strength)
    part = replace(drive, repulsion=repulsion, y=drive.y[rows])
    whole = drive.adversarial is None and drive.mapping.chunk is None
    if len(rest) and whole and _points_are_separate(drive, ensemble):
        return _divided(drive, part, ensemble, x, rows, rest)
    alone = replace(part, posterior=replace(drive.posterior, prior=Flat()), annealing=0.0)
    # The part alone is too little work to keep a GPU busy, so the whole batch goes beside it.
    branch = Branch(x.device)
    with branch:
        pushed, push = replace(alone, adversarial=None)(ensemble.aside(), x[rows])
    answer, velocity = replace(drive, repulsion=None)(ensemble, x)
    branch.join()
    alive = answer.alive & pushed.alive
    head = {name: velocity[name] for name in ensemble.heads}
    whole = add_scaled(velocity, push, 1.0)
    lengths = head_lengths(ensemble, head, whole)
    assert pushed.measures is not None, "input gradients are measured"
    measures = measured(lengths[0], lengths[1], alive, pushed.measures[2:])
    return answer._replace(alive=alive, measures=measures), whole


def _divided(
    drive: Drive, part: Drive, ensemble: Ensemble, x: Tensor, rows: Tensor, rest: Tensor
) -> tuple[Answer, Tree]:
    """Drive and push of the part, and the drive of the rest, each weighed by its points."""
    share = len(rows) / len(x)
    left = (1 - share) * drive.annealing
    others = replace(drive, repulsion=None, y=drive.y[rest], annealing=left)
    answer, driven = others(ensemble, x[rest])
    head = {name: driven[name] for name in ensemble.heads}
    part = replace(part, annealing=share * drive.annealing, elsewhere=head)
    pushed, velocity = part(ensemble, x[rows])
    loss = share * pushed.loss + (1 - share) * answer.loss
    whole = add_scaled(velocity, driven, 1.0)
    return pushed._replace(loss=loss, alive=answer.alive & pushed.alive), whole


def _points_are_separate(drive: Drive, ensemble: Ensemble) -> bool:
    """No layer, and no prior on functions, looks at several points at once."""
    layers = [layer for group in ensemble.groups for layer in group.skeleton.modules()]
    coupled = any(isinstance(layer, _BatchNorm) for layer in layers)
    return not (coupled or ensemble.buffers or isinstance(drive.posterior.prior, FunctionalPrior))

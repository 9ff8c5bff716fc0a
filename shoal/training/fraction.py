"""Repulsion of input gradients on a random part of each batch.

The part goes through the networks by itself, forward, to its input gradients and back, and what it
pushes is added to the drive of the whole batch. Batch normalisation couples the points of a batch,
so that a part of the whole batch's gradients would save nothing. Running statistics follow the
whole batch alone.

The kernel is a mean over sites, so that the part needs no factor of its own; repulsion that is
counted per batch is still counted against the whole batch.
"""

from dataclasses import replace

from torch import Tensor

from shoal.core.tree import add_scaled
from shoal.core.types import Tree
from shoal.inference.ensemble import Ensemble
from shoal.inference.priors import Flat
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
    rows = some_of(share_of(repulsion), len(x), drive.seed, drive.step, x.device)
    counted = len(rows) / len(x) if repulsion.per == "batch" else 1.0
    part = replace(
        drive,
        repulsion=replace(repulsion, strength=counted * repulsion.strength),
        posterior=replace(drive.posterior, prior=Flat()),
        y=drive.y[rows],
        annealing=0.0,
        adversarial=None,
    )
    pushed, push = part(ensemble.aside(), x[rows])
    answer, velocity = replace(drive, repulsion=None)(ensemble, x)
    alive = answer.alive & pushed.alive
    head = {name: velocity[name] for name in ensemble.heads}
    whole = add_scaled(velocity, push, 1.0)
    lengths = head_lengths(ensemble, head, whole)
    assert pushed.measures is not None, "input gradients are measured"
    measures = measured(lengths[0], lengths[1], alive, pushed.measures[2:])
    return answer._replace(alive=alive, measures=measures), whole

"""Members that are already trained: they push the others and stay where they are."""

import copy
from dataclasses import replace

from shoal.core.errors import ConfigError
from shoal.inference.ensemble import Ensemble

__all__ = ["check_count", "divided"]


def check_count(count: int, members: int) -> None:
    """Refuse to freeze all members."""
    if count >= members:
        raise ConfigError(f"{count} frozen members leave none of {members} to train; freeze fewer")


def divided(ensemble: Ensemble, count: int) -> tuple[Ensemble, Ensemble | None]:
    """The members that move, and the first `count`, which do not, both on the memory of the whole.

    The frozen ones run as in prediction, so that neither batch statistics nor dropout move them;
    they have networks of their own for it, since the others run as in training.
    """
    if count == 0:
        return ensemble, None
    check_count(count, ensemble.members)
    frozen = ensemble.part(0, count)
    frozen.groups = [replace(g, skeleton=copy.deepcopy(g.skeleton).eval()) for g in frozen.groups]
    frozen.training = False
    return ensemble.part(count, ensemble.members), frozen

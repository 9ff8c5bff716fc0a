"""Members that are already trained: they push the others and stay where they are."""

import copy
from dataclasses import replace
from typing import TYPE_CHECKING

from shoal.core.errors import ConfigError
from shoal.data.augment import is_per_member
from shoal.inference.ensemble import Ensemble
from shoal.interaction.flows import Stein

if TYPE_CHECKING:
    from shoal.training.settings import Settings

__all__ = ["divided"]


def divided(ensemble: Ensemble, settings: "Settings") -> tuple[Ensemble, Ensemble | None]:
    """The members that move and those that do not, both on the memory of the whole.

    The frozen ones run as in prediction, so that neither batch statistics nor dropout move them;
    they have networks of their own for it, since the others run as in training.
    """
    count = settings.frozen
    if count == 0:
        return ensemble, None
    if count >= ensemble.members:
        raise ConfigError(
            f"{count} frozen members leave none of {ensemble.members} to train; freeze fewer"
        )
    repulsion = settings.method.repulsion
    shared = repulsion is not None and isinstance(repulsion.flow, Stein)
    if shared and settings.adversarial is not None:
        raise ConfigError(
            "in a Stein flow members share their drives, which adversarial training does not know "
            "of frozen members; grow with a Wasserstein flow such as 'f-kde'"
        )
    if shared and is_per_member(settings.augment):
        raise ConfigError(
            "in a Stein flow members share their drives, which frozen members would take from "
            "crops that are not theirs; leave per_member out, or grow with a Wasserstein flow"
        )
    frozen = ensemble.part(0, count)
    frozen.groups = [replace(g, skeleton=copy.deepcopy(g.skeleton).eval()) for g in frozen.groups]
    frozen.training = False
    return ensemble.part(count, ensemble.members), frozen

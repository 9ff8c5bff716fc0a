"""Trajectories of members: the snapshots of `fit(keep_every=k)` as points of weight space."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shoal.analysis.landscape.points import only_group, with_weights
from shoal.core.errors import ConfigError
from shoal.core.optional import require
from shoal.core.random import derive
from shoal.inference.ensemble import Ensemble
from shoal.prediction.predictive import Predictive
from shoal.training.folder.run import is_adopted
from shoal.training.folder.trajectory import Trajectory

__all__ = ["Track", "embedded", "tracks"]


class Track(NamedTuple):
    """One member along training.

    Attributes:
        member: index of the member.
        epochs: epochs of the snapshots; 0 is the initialisation.
        points: the snapshots as members of an ensemble.
    """

    member: int
    epochs: list[int]
    points: Ensemble

    def last(self, count: int) -> Ensemble:
        """The last `count` snapshots."""
        return self.points.slice_members(max(len(self.epochs) - count, 0), len(self.epochs))


def tracks(run: Any, members: Sequence[int], most: int | None = None) -> list[Track]:
    """The trajectories of some members of a run.

    Args:
        run: a run with a folder, trained with `keep_every`.
        members: indices of the members.
        most: largest number of snapshots per member, evenly spaced, with the first and the last.
    """
    if run.ensemble.trained_shared:
        # A point of weight space has the shared tensors of the end, not those of its snapshot.
        raise ConfigError(
            "trajectories need members with weights of their own, but all members train "
            f"'{next(iter(run.ensemble.trained_shared))}' together; leave trajectories out"
        )
    kept = None if run.folder is None else Trajectory(run.folder)
    known = [] if kept is None else kept.epochs(until=len(run.history))
    if is_adopted(run.config):
        raise ConfigError("adopted networks have no snapshots of their training")
    if kept is None or not known:
        raise ConfigError("this run has no snapshots; train it with keep_every=1 and out=FOLDER")
    epochs = _spread(known, most)
    only_group(run.ensemble)
    states = [kept.state(epoch) for epoch in epochs]
    return [_track(run.ensemble, states, epochs, member) for member in members]


def _track(ensemble: Ensemble, states: list[dict], epochs: list[int], member: int) -> Track:
    weights, buffers = (
        {
            name.removeprefix(kind): torch.stack([state[name][member] for state in states])
            for name in states[0]
            if name.startswith(kind)
        }
        for kind in ("weights/", "buffers/")
    )
    weights = {name: t.to(ensemble.device, ensemble.dtype) for name, t in weights.items()}
    buffers = {name: t.to(ensemble.device) for name, t in buffers.items()}
    return Track(member, epochs, with_weights(ensemble, weights, buffers))


def _spread(known: list[int], most: int | None) -> list[int]:
    """
    >>> _spread([0, 1, 2, 3, 4, 5, 6], 3)
    [0, 3, 6]
    """
    if most is None or len(known) <= most:
        return known
    places = torch.linspace(0, len(known) - 1, most).round().long()
    return [known[int(place)] for place in places]


def embedded(pred: Predictive, seed: int = 0) -> Tensor:
    """Functions as points in the plane [K, 2]; similar functions are close.

    t-SNE of the predicted probabilities (in regression, of the means) on all inputs. Van der Maaten
    & Hinton (2008); Fort et al. (2019), arXiv 1912.02757.
    """
    if pred.size < 4:
        raise ConfigError(f"a map of functions needs at least 4 functions, not {pred.size}")
    values = pred.likelihood.mean(pred.members)
    manifold = require("sklearn.manifold", extra="report")
    perplexity = min(30.0, (pred.size - 1) / 3)
    tsne = manifold.TSNE(
        2, perplexity=perplexity, init="pca", random_state=derive(seed, "t-SNE") % 2**32
    )
    return torch.from_numpy(tsne.fit_transform(values.flatten(1).double().cpu().numpy())).float()

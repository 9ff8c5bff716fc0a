"""Along training, and at its end: how alike the functions are."""

import torch

from shoal.analysis.landscape.effective import effective_numbers
from shoal.analysis.landscape.points import cosines, joined, living
from shoal.analysis.landscape.study import Part, Scene, registry
from shoal.analysis.landscape.survey import apart, outputs
from shoal.analysis.landscape.trajectories import embedded, tracks
from shoal.prediction.predictive import Predictive

__all__ = ["functions", "trajectories"]

_TRACKS = 3


@registry.register("trajectories", cite=("fort2019deep",))
def trajectories(scene: Scene) -> Part:
    """Similarity of weights and of functions along training, within and between members."""
    members = living(scene.run.ensemble)[:_TRACKS]
    found = tracks(scene.run, members, scene.effort.snapshots)
    points = joined([track.points for track in found])
    said = outputs(points, scene.test.x).cpu()
    pred = Predictive(said, scene.run.likelihood)
    owner = torch.arange(len(members)).repeat_interleave(len(found[0].epochs))
    far = apart(scene.run.likelihood, said, said)
    other = owner[:, None] != owner
    ends = (torch.arange(len(owner)) + 1) % len(found[0].epochs) == 0
    late = other & ends & ends[:, None]
    scores = {
        "members": members,
        "epochs": found[0].epochs,
        "between_ends": float(far[late].mean()) if bool(late.any()) else None,
        "last_snapshots": _last_apart(far, len(found[0].epochs)),
    }
    tensors = {
        "cosine": cosines(points).float(),
        "apart": far.float(),
        "owner": owner,
        "map": embedded(pred, scene.seed),
    }
    return Part(scores, tensors)


def _last_apart(far: torch.Tensor, count: int) -> float | None:
    """Mean difference of the last two snapshots of a member."""
    if count < 2:
        return None
    last = torch.arange(count - 1, len(far), count)
    return float(far[last, last - 1].mean())


@registry.register("functions", cite=("friedman2023vendi",))
def functions(scene: Scene) -> Part:
    """How many different networks the members amount to, in every space."""
    pred = Predictive(scene.outputs, scene.run.likelihood)
    numbers = effective_numbers(scene.ensemble, pred, scene.test)
    return Part({"members": scene.ensemble.members, "effective": numbers})

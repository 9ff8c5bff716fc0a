"""Between solutions: the straight line, planes, and curves along which the loss stays low."""

from typing import Any

import torch
from torch import Tensor

from shoal.analysis.landscape import curves
from shoal.analysis.landscape.connect import align, connect
from shoal.analysis.landscape.planes import (
    Plane,
    levelled,
    line,
    plane_through_origin,
    plane_through_three,
    with_midpoints,
)
from shoal.analysis.landscape.scene import AnalysisResult, Scene, registry
from shoal.analysis.landscape.survey import Survey, survey
from shoal.core.errors import ConfigError
from shoal.inference.ensemble import Ensemble

__all__ = ["lines", "origin_plane", "three_plane", "tunnel"]

_PLACES = 41


@registry.register("line", cite=("fort2019deep", "ainsworth2022git"))
def lines(scene: Scene) -> AnalysisResult:
    """The straight line between two members, as they are and with their units matched."""
    found = {"straight": _profile(scene, scene.first(2), line(_PLACES))}
    matched, notes = _matched(scene)
    if not notes:
        found["aligned"] = _profile(scene, matched, line(_PLACES))
    return _profiles(found, notes)


@registry.register("tunnel", cite=("fort2019large", "garipov2018loss", "ainsworth2022git"))
def tunnel(scene: Scene) -> AnalysisResult:
    """Curves between two members along which the loss stays low while the function changes.

    The tunnel is a valley across the straight line, raised to the level of its ends; the Bezier
    curve goes as low as it can. The way is shorter when the units of the second stand in the order
    of the first's, which makes no other function of it; networks in which units cannot be matched
    are taken as they are.
    """
    (pair, notes), found = _matched(scene), {}
    t = torch.linspace(0, 1, _PLACES, dtype=torch.float64)
    for name in ("tunnel", "bezier"):
        curve = curves.registry.make(name)
        pivots = connect(
            pair,
            curve,
            scene.data.train,
            likelihood=scene.run.likelihood,
            steps=scene.effort.steps,
            seed=scene.seed,
            tick=scene.tick,
        )
        path = curve.coefficients(t)
        if curve.constrained:
            here = scene.train, scene.run.likelihood, scene.statistics, scene.tick
            # Half way between the places that were made level it shows whether the path is.
            path = with_midpoints(levelled(pivots, path, *here))
        found[name] = _profile(scene, pivots, path)
    return _profiles(found, notes)


@registry.register("origin-plane", cite=("fort2019deep",))
def origin_plane(scene: Scene) -> AnalysisResult:
    """Loss, accuracy and difference on the plane through the origin and two members."""
    pair = scene.first(2)
    return _surface(scene, pair, plane_through_origin(pair, scene.effort.points))


@registry.register("three-plane", cite=("garipov2018loss",))
def three_plane(scene: Scene) -> AnalysisResult:
    """Loss, accuracy and difference on the plane through three members."""
    three = scene.first(3)
    return _surface(scene, three, plane_through_three(three, scene.effort.points))


def _matched(scene: Scene) -> tuple[Ensemble, dict[str, str]]:
    """Two members, the units of the second in the order of the first's; or why they are not."""
    pair = scene.first(2)
    try:
        return align(pair), {}
    except ConfigError as error:
        return pair, {"aligned": str(error)}


def _profile(scene: Scene, basis: Ensemble, coefficients: Tensor) -> tuple[Survey, Survey]:
    """On the training data, whose loss a curve minimises, and on the test data."""
    meaning, statistics = scene.run.likelihood, scene.statistics
    ends = scene.outputs[:2]
    trained = survey(basis, coefficients, scene.train, meaning, train=statistics, tick=scene.tick)
    tested = survey(basis, coefficients, scene.test, meaning, ends, statistics, scene.tick)
    return trained, tested


def _profiles(found: dict[str, tuple[Survey, Survey]], notes: dict[str, str]) -> AnalysisResult:
    scores: dict[str, Any] = {"paths": {}, "notes": notes}
    tensors = {}
    for name, (train, test) in found.items():
        t = torch.linspace(0, 1, len(train.loss), dtype=torch.float64)
        level = line(len(t)) @ train.loss[[0, -1]]
        scores["paths"][name] = {
            "barrier": float((train.loss - level).max()),
            # A density can make the loss negative: how far it is off counts by its size.
            "uneven": float(((train.loss - level) / level.abs().clamp_min(1e-12)).abs().max()),
            "ends": [float(train.loss[0]), float(train.loss[-1])],
            "apart": float(test.apart[0, -1]),
            "most_apart": float(test.apart[0].max()),
        }
        tensors |= {f"{name}/t": t, f"{name}/loss": train.loss, f"{name}/test_loss": test.loss}
        tensors |= {f"{name}/accuracy": test.accuracy, f"{name}/apart": test.apart}
    return AnalysisResult(scores, tensors)


def _surface(scene: Scene, basis: Ensemble, plane: Plane) -> AnalysisResult:
    found = survey(
        basis,
        plane.coefficients,
        scene.test,
        scene.run.likelihood,
        scene.outputs[: basis.members],
        scene.statistics,
        scene.tick,
    )
    tensors = {"across": plane.across, "up": plane.up, "marks": plane.marks.contiguous()}
    tensors |= {name: plane.image(values).float() for name, values in found._asdict().items()}
    return AnalysisResult({"points": len(plane.up), "inputs": len(scene.test)}, tensors)

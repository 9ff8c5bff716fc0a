"""Between members: the straight line, planes, and curves of low loss."""

from typing import Any

import torch
from torch import Tensor

from shoal.analysis.landscape import curves
from shoal.analysis.landscape.curves import align, connect
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
    """The straight line between two members, with and without matched units."""
    profiles = {"straight": _profile(scene, scene.first(2), line(_PLACES))}
    matched, notes = _matched(scene)
    if not notes:
        profiles["aligned"] = _profile(scene, matched, line(_PLACES))
    return _profiles(profiles, notes)


@registry.register("tunnel", cite=("fort2019large", "garipov2018loss", "ainsworth2022git"))
def tunnel(scene: Scene) -> AnalysisResult:
    """Curves of low loss between two members along which the function changes.

    The low-loss tunnel is a valley beside the straight line, raised to the loss of its ends. The
    Bezier curve minimises the loss. Matching the units of the second member to the first shortens
    the path and keeps the function; networks whose units cannot be matched do not change.
    """
    (pair, notes), profiles = _matched(scene), {}
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
            level = levelled(
                pivots, path, scene.train, scene.run.likelihood, scene.statistics, scene.tick
            )
            # The midpoints show whether the loss is level between the levelled points.
            path = with_midpoints(level)
        profiles[name] = _profile(scene, pivots, path)
    return _profiles(profiles, notes)


@registry.register("origin-plane", cite=("fort2019deep",))
def origin_plane(scene: Scene) -> AnalysisResult:
    """Loss, accuracy and disagreement on the plane through the origin and two members."""
    pair = scene.first(2)
    return _surface(scene, pair, plane_through_origin(pair, scene.effort.points))


@registry.register("three-plane", cite=("garipov2018loss",))
def three_plane(scene: Scene) -> AnalysisResult:
    """Loss, accuracy and disagreement on the plane through three members."""
    three = scene.first(3)
    return _surface(scene, three, plane_through_three(three, scene.effort.points))


def _matched(scene: Scene) -> tuple[Ensemble, dict[str, str]]:
    """Two members with matched units; or the unmatched members and the reason."""
    pair = scene.first(2)
    try:
        return align(pair), {}
    except ConfigError as error:
        return pair, {"aligned": str(error)}


def _profile(scene: Scene, basis: Ensemble, coefficients: Tensor) -> tuple[Survey, Survey]:
    """Surveys on the training data, whose loss a curve minimises, and on the test data."""
    meaning, statistics = scene.run.likelihood, scene.statistics
    ends = scene.outputs[:2]
    trained = survey(basis, coefficients, scene.train, meaning, train=statistics, tick=scene.tick)
    tested = survey(basis, coefficients, scene.test, meaning, ends, statistics, scene.tick)
    return trained, tested


def _profiles(profiles: dict[str, tuple[Survey, Survey]], notes: dict[str, str]) -> AnalysisResult:
    scores: dict[str, Any] = {"paths": {}, "notes": notes}
    tensors = {}
    for name, (train, test) in profiles.items():
        t = torch.linspace(0, 1, len(train.loss), dtype=torch.float64)
        level = line(len(t)) @ train.loss[[0, -1]]
        scores["paths"][name] = {
            "barrier": float((train.loss - level).max()),
            # A density can make the loss negative: deviations are relative to its absolute value.
            "uneven": float(((train.loss - level) / level.abs().clamp_min(1e-12)).abs().max()),
            "ends": [float(train.loss[0]), float(train.loss[-1])],
            "apart": float(test.apart[0, -1]),
            "most_apart": float(test.apart[0].max()),
        }
        tensors |= {f"{name}/t": t, f"{name}/loss": train.loss, f"{name}/test_loss": test.loss}
        tensors |= {f"{name}/accuracy": test.accuracy, f"{name}/apart": test.apart}
    return AnalysisResult(scores, tensors)


def _surface(scene: Scene, basis: Ensemble, plane: Plane) -> AnalysisResult:
    surveyed = survey(
        basis,
        plane.coefficients,
        scene.test,
        scene.run.likelihood,
        scene.outputs[: basis.members],
        scene.statistics,
        scene.tick,
    )
    tensors = {"across": plane.across, "up": plane.up, "marks": plane.marks.contiguous()}
    tensors |= {name: plane.image(values).float() for name, values in surveyed._asdict().items()}
    return AnalysisResult({"points": len(plane.up), "inputs": len(scene.test)}, tensors)

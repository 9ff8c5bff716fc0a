"""Around the members: subspace samplers, weight averages, and both combined with more modes."""

import torch
from torch import Tensor

from shoal.analysis.diversity import diversity as ratio
from shoal.analysis.landscape import subspace
from shoal.analysis.landscape.averaging import averaged, combine, ema, mc_dropout, multiswag
from shoal.analysis.landscape.points import joined, refresh
from shoal.analysis.landscape.scene import AnalysisResult, Scene, registry
from shoal.analysis.landscape.subspace import Mode, sample_mode
from shoal.analysis.landscape.survey import Survey, evaluated, outputs
from shoal.core.errors import ConfigError
from shoal.core.random import generator
from shoal.core.structure import Inputs
from shoal.inference.ensemble import Ensemble
from shoal.training.folder.run import is_adopted

__all__ = ["averaging", "diversity"]

_NEAR = 0.02
_SAMPLES = (2, 5, 10)


@registry.register("diversity", cite=("fort2019deep",))
def diversity(scene: Scene) -> AnalysisResult:
    """Diversity against accuracy: members, averages, and samples around the first member."""
    if not scene.run.likelihood.about.has_classes:
        raise ConfigError(
            f"diversity against accuracy needs class labels, not {scene.run.likelihood.task}"
        )
    reference = scene.outputs[:1]
    surveys = {"members": evaluated(scene.outputs[1:], scene.test, scene.run.likelihood, reference)}
    mode = scene.modes[0]
    reach = torch.rand(scene.effort.samples, generator=generator(scene.seed, "reach"))
    for name in subspace.registry:
        if mode.path is None and name not in ("random", "dropout"):
            continue
        sampled = _samples(scene, name, mode, reach)
        surveys[name] = evaluated(sampled, scene.test, scene.run.likelihood, reference)
        scene.tick(len(reach))
    if mode.path is not None:
        average = outputs(averaged([mode.path], scene.statistics), scene.test.x).cpu()
        surveys["swa"] = evaluated(average, scene.test, scene.run.likelihood, reference)
    right = float(evaluated(reference, scene.test, scene.run.likelihood).accuracy[0])
    scores = {
        "reference": right,
        "classes": scene.run.likelihood.probs(scene.outputs[:1, :1]).shape[-1],
        "inputs": len(scene.test),
        "at_equal_accuracy": _at_equal_accuracy(surveys),
    }
    parts = {f"{name}/accuracy": s.accuracy for name, s in surveys.items()}
    return AnalysisResult(
        scores, parts | {f"{name}/apart": s.apart[0] for name, s in surveys.items()}
    )


def _samples(scene: Scene, name: str, mode: Mode, reach: Tensor) -> Tensor:
    return sample_mode(
        subspace.registry.make(name),
        mode,
        reach,
        scene.test.x,
        likelihood=scene.run.likelihood,
        train=scene.statistics,
        seed=scene.seed,
    ).members


def _at_equal_accuracy(surveys: dict[str, Survey]) -> dict[str, float | None]:
    """Mean diversity of points whose accuracy is within 2 % of the members' accuracy."""
    usual = (
        float(surveys["members"].accuracy.mean()) if len(surveys["members"].loss) else float("nan")
    )
    scores: dict[str, float | None] = {}
    for name, survey in surveys.items():
        near = (survey.accuracy - usual).abs() <= _NEAR
        values = ratio(survey.apart[0], survey.accuracy)[near]
        values = values[values.isfinite()]
        scores[name] = float(values.mean()) if len(values) else None
    return scores


@registry.register("averaging", cite=("fort2019deep", "maddox2019simple"))
def averaging(scene: Scene) -> AnalysisResult:
    """Averages and samples within modes, for 1 to all modes, on test and shift sets."""
    paths = [mode.path for mode in scene.modes if mode.path is not None and mode.path.members > 1]
    if len(paths) < len(scene.modes):
        adopted = is_adopted(scene.run.config)
        advice = ", which adopted networks have not" if adopted else "; train with keep_every=1"
        raise ConfigError(f"averages within a mode need snapshots{advice}")
    solutions = {
        "solution": scene.ensemble,
        "swa": averaged(paths, scene.statistics),
        "ema": _refreshed(joined([ema(path) for path in paths]), scene.statistics),
    }
    scores = {}
    for name, split in {"test": scene.test, **scene.shifts}.items():
        treated = {key: outputs(e, split.x).cpu()[:, None] for key, e in solutions.items()}
        treated |= _sampled(scene, split.x)
        if split.y is not None:
            rows = combine(treated, split.y, scene.run.likelihood)
            scores[name] = {row.treatment: row._asdict() for row in rows}
        scene.tick(1)
    return AnalysisResult({"parts": scores, "members": len(paths)})


def _refreshed(ensemble: Ensemble, x: Inputs | None) -> Ensemble:
    return ensemble if x is None else refresh(ensemble, x)


def _sampled(scene: Scene, x: Inputs) -> dict[str, Tensor]:
    """SWAG in each mode, and MC dropout if networks have dropout [modes, samples, B, C]."""
    most = max(_SAMPLES)
    swag = multiswag(
        scene.modes, x, most,
        likelihood=scene.run.likelihood, train=scene.statistics, seed=scene.seed,
    ).members.unflatten(0, (-1, most))  # fmt: skip
    samples = {f"swag x {count}": swag[:, :count] for count in _SAMPLES}
    if scene.ensemble.groups[0].keys:
        dropped = mc_dropout(scene.ensemble, x, most, likelihood=scene.run.likelihood)
        samples[f"dropout x {most}"] = dropped.members.unflatten(0, (-1, most))
    return samples

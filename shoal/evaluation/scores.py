"""Scores of a run on test set, shifts and OOD sets, computed once for all pages."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from shoal.core.errors import DataError
from shoal.data.corruptions import SEVERITIES, parse_shift, registry
from shoal.data.dataset import Dataset, Scaling, Split
from shoal.evaluation.evaluation import Evaluation, keep_evaluation, load_evaluation, made_from
from shoal.evaluation.inspection import attention_samples, gradient_samples
from shoal.prediction import Predictive, evaluate, metrics, predict
from shoal.prediction.regression import in_units

__all__ = ["Evaluation", "corrupted_means", "evaluate_run", "load_evaluation", "recognised"]

Scores = Mapping[str, float]


def corrupted_means(shifts: Mapping[str, Scores]) -> dict[str, dict[str, float]]:
    """The mean of every metric over the corruptions among the shifts.

    `all` is over every corruption and severity, `standard` over those that published means are
    taken over (when there are others, too), `severity-3` over the corruptions of that severity.

    >>> corrupted_means({"fog-1": {"nll": 1.0}, "fog-5": {"nll": 3.0}, "rotated-5": {"nll": 9.0}})
    {'all': {'nll': 2.0}, 'severity-1': {'nll': 1.0}, 'severity-5': {'nll': 3.0}}

    Args:
        shifts: metrics by the name of the shift, such as `fog-3`.
    """
    found = [(pair, scores) for name, scores in shifts.items() if (pair := parse_shift(name))]
    groups = {"all": [scores for _, scores in found]}
    standard = [scores for (name, _), scores in found if registry[name].standard]
    if 0 < len(standard) < len(found):
        groups["standard"] = standard
    for severity in SEVERITIES:
        groups[f"severity-{severity}"] = [scores for (_, s), scores in found if s == severity]
    return {name: _mean(group) for name, group in groups.items() if group}


def _mean(group: Sequence[Scores]) -> dict[str, float]:
    keys = [key for key in group[0] if all(key in scores for scores in group)]
    return {key: sum(scores[key] for scores in group) / len(group) for key in keys}


MEASURES = ("disagreement", "entropy", "confidence")
"""What the images of a gallery are sorted by."""

AT_ONCE = {"cuda": 4096}
"""Inputs that go through the members at a time: enough that a GPU does not wait for launches."""

GRID = 80

SHOWN = 2000

KEPT = 10_000
"""Inputs of all shifts together whose own numbers are kept; scores and curves are of all inputs."""


def evaluate_run(
    run: Any,
    dataset: Dataset,
    *,
    gallery: int = 12,
    after: Callable[[str], None] = lambda part: None,
    keep: bool = True,
) -> Evaluation:
    """Scores and per-input numbers on the test data, every shift and every foreign set.

    They are written into the folder of the run; a run without one has them in its `results`. Shifts
    are looked at once, one after the other; where they are many, the numbers of every k-th of their
    inputs are kept.

    Args:
        run: what `fit` returned, or anything with `ensemble`, `likelihood` and `folder`.
        dataset: its test part is needed, shifts and foreign data are used when there.
        gallery: how many images to keep at each end of disagreement, entropy and confidence.
        after: called with the name of each part that has been judged.
        keep: False leaves folder and run as they are.
    """
    scaling = dataset.scaling
    known = None if dataset.test is None else _in_units(dataset.test, scaling)
    if known is None or known.y is None:
        raise DataError(
            f"the data set '{dataset.name}' has no labelled test part to judge by; "
            f"give Dataset(..., test=Split(x, y))"
        )
    test = _answer(run, known, scaling)
    scores: dict[str, Any] = {"test": evaluate(test, known.y), "shifts": {}, "ood": {}}
    samples = _samples("test", test, known, gallery) | _members(test, known.y)
    counts = {"test": len(test)}
    for name, split in dataset.shifts.items():
        split = _in_units(split, scaling)
        part, pred = f"shift:{name}", _answer(run, split, scaling)
        counts[part] = len(pred)
        scores["shifts"][name] = {} if split.y is None else evaluate(pred, split.y)
        samples |= _thinned(_samples(part, pred, split, 0), KEPT // len(dataset.shifts))
        after(part)
    for name, split in dataset.ood.items():
        part, pred = f"ood:{name}", _answer(run, split, scaling)
        counts[part] = len(pred)
        scores["ood"][name] = _told(test, pred)
        samples |= _samples(part, pred, Split(split.x), gallery)
        samples |= _pooled(name, test, known.y, pred)
        after(part)
    samples |= _training_points(dataset) | _plane(run, dataset)
    samples |= gradient_samples(run, known) | attention_samples(run, known)
    means = corrupted_means(scores["shifts"])
    scores |= {"corrupted": means} if means else {}
    samples = {name: tensor.cpu() for name, tensor in samples.items()}
    facts = _described(dataset, test, counts) | made_from(run, dataset)
    found = Evaluation({"data": facts, **scores}, samples)
    if keep:
        keep_evaluation(run, found)
    return found


def _answer(run: Any, split: Split, scaling: Scaling | None) -> Predictive:
    """What the run says about a part, in the units of the targets, where it was computed."""
    at_once = AT_ONCE.get(run.ensemble.device.type, 1024)
    return in_units(predict(run, split, batch_size=at_once, keep=True), scaling)


def _in_units(split: Split, scaling: Scaling | None) -> Split:
    """The part with its targets in their own units."""
    if scaling is None or split.y is None:
        return split
    return replace(split, y=scaling.original(split.y))


def recognised(test: Tensor, ood: Tensor, alarms: float = 0.05) -> float:
    """Share of foreign inputs above the uncertainty that only a share `alarms` of the test exceeds.

    >>> recognised(torch.arange(100.0), torch.tensor([10.0, 94.0, 95.0, 200.0]))
    0.5
    """
    allowed = math.floor(alarms * len(test))
    threshold = test.sort(descending=True).values[allowed]
    return float((ood > threshold).double().mean())


def _told(test: Predictive, ood: Predictive) -> dict[str, float]:
    """The metrics of foreign data, their mean uncertainty, and how much of them is recognised."""
    registry = metrics.registry
    fitting = [name for name in registry if registry[name].fits(test)]
    found = {name: registry[name](test, ood) for name in fitting if registry[name].ood}
    kind = test.likelihood.about.uncertainty
    known, foreign = (metrics.scores(pred)[kind] for pred in (test, ood))
    means = {name: float(values.double().mean()) for name, values in _uncertainty(ood).items()}
    means["effective_functions"] = metrics.effective_functions(ood)
    return {"recognised": recognised(known, foreign), **means, **found}


def _uncertainty(pred: Predictive) -> dict[str, Tensor]:
    if not pred.likelihood.about.has_classes:
        return {"disagreement": pred.disagreement(), "stddev": pred.stddev.mean(-1)}
    return {
        "entropy": pred.entropy(),
        "mutual_information": pred.mutual_information(),
        "disagreement": pred.disagreement(),
        "confidence": pred.confidence(),
    }


def _samples(part: str, pred: Predictive, split: Split, gallery: int) -> dict[str, Tensor]:
    found = {name: values.float() for name, values in _uncertainty(pred).items()}
    if not pred.likelihood.about.has_classes:
        found |= _numbers(pred, split)
    else:
        found["prediction"] = pred.labels()
        if split.y is not None:
            found |= _labelled(pred, pred.check(split.y))
        found |= _gallery(split.x, found, gallery)
    return {f"{part}/{name}": tensor.contiguous() for name, tensor in found.items()}


def _thinned(samples: dict[str, Tensor], room: int) -> dict[str, Tensor]:
    """Numbers of inputs evenly spaced over the part, at most `room`; curves stay as they are."""
    curves = ("/reliability/", "/above/")
    return {
        name: values if any(curve in name for curve in curves) else _spaced(values, max(room, 1))
        for name, values in samples.items()
    }


def _spaced(values: Tensor, room: int) -> Tensor:
    return values[:: math.ceil(len(values) / room)].contiguous()


def _numbers(pred: Predictive, split: Split) -> dict[str, Tensor]:
    found = {"mean": _column(pred.mean), "stddev": _column(pred.stddev)}
    if split.x[0].numel() == 1:
        found["x"] = split.x.flatten().float()
    if split.y is not None:
        found["y"] = _column(pred.check(split.y))
        if "gaussian" in pred.likelihood.about.kinds:
            found["pit"] = _column(metrics.pit(pred, split.y))
    return found


def _column(values: Tensor) -> Tensor:
    return values.squeeze(-1).float() if values.shape[-1] == 1 else values.float()


def _labelled(pred: Predictive, y: Tensor) -> dict[str, Tensor]:
    bins, above = metrics.reliability(pred, y), metrics.accuracy_confidence(pred, y)
    curves = {f"reliability/{name}": getattr(bins, name) for name in bins.__dataclass_fields__}
    curves |= {f"above/{name}": values for name, values in above._asdict().items()}
    return {"label": y, **{name: values.float() for name, values in curves.items()}}


def _pooled(name: str, test: Predictive, y: Tensor, ood: Predictive) -> dict[str, Tensor]:
    """Accuracy of the sure answers when foreign data, of which none is right, are among them."""
    if not test.likelihood.about.has_classes:
        return {}
    above = metrics.accuracy_confidence(test, y, ood=ood)
    return {f"pooled:{name}/above/{key}": v.float() for key, v in above._asdict().items()}


def _gallery(x: Tensor, found: dict[str, Tensor], count: int) -> dict[str, Tensor]:
    """The images at both ends of each measure, as bytes, and where they stand in the part."""
    if count < 1 or x.ndim != 4 or x.shape[1] not in (1, 3):
        return {}
    kept: dict[str, Tensor] = {}
    low, high = (float(end) for end in x.aminmax())
    for measure in MEASURES:
        order = found[measure].argsort(stable=True).to(x.device)
        for end, index in (("low", order[:count]), ("high", order.flip(0)[:count])):
            pixels = (x[index].float() - low) / max(high - low, 1e-12)
            kept[f"gallery/{measure}/{end}"] = (255 * pixels).round().to(torch.uint8)
            kept[f"gallery/{measure}/{end}/index"] = index
    return kept


def _members(pred: Predictive, y: Tensor) -> dict[str, Tensor]:
    """What tells the members apart: accuracy of each, different labels of each pair."""
    if not pred.likelihood.about.has_classes:
        return {"test/affinity": metrics.affinity(pred).float()}
    right = pred.member_probs().argmax(-1) == pred.check(y)
    return {
        "test/pairwise": metrics.pairwise_disagreement(pred).float(),
        "test/member_accuracy": right.double().mean(-1).float(),
    }


def _training_points(dataset: Dataset) -> dict[str, Tensor]:
    """The training data themselves, when they can be drawn."""
    x, y = dataset.train.x, dataset.train.y
    flat = x.ndim <= 2 and x.shape[1:].numel() <= 2
    if not flat or y is None or len(x) == 0 or (y.ndim > 1 and y.shape[-1] > 1):
        return {}
    y = y.flatten()[:SHOWN]
    y = y if dataset.scaling is None else dataset.scaling.original(y)
    points = x.reshape(len(x), -1)[:SHOWN].float()
    return {"train/x": points, "train/y": y.float() if y.is_floating_point() else y.long()}


def _plane(run: Any, dataset: Dataset) -> dict[str, Tensor]:
    """Entropy on a grid around the data, for classes in the plane."""
    if not run.likelihood.about.has_classes or dataset.input_shape != (2,):
        return {}
    known, points = dataset.train, {}
    if not len(known) and dataset.test is not None and dataset.test.y is not None:
        known = dataset.test  # nobody said what was trained on
        points = {"plane/x": known.x[:SHOWN].float(), "plane/y": dataset.test.y[:SHOWN]}
    across, up = _around(known.x)
    grid = torch.stack(torch.meshgrid(across, up, indexing="xy"), -1).reshape(-1, 2)
    entropy = predict(run, grid.to(known.x.dtype)).entropy()
    return points | {
        "plane/across": across,
        "plane/up": up,
        "plane/entropy": entropy.reshape(GRID, GRID).float(),
    }


def _around(x: Tensor) -> Iterator[Tensor]:
    low, high = x.float().amin(0), x.float().amax(0)
    margin = 0.75 * (high - low)
    for start, end in zip((low - margin).tolist(), (high + margin).tolist(), strict=True):
        yield torch.linspace(start, end, GRID)


def _described(dataset: Dataset, pred: Predictive, counts: Mapping[str, int]) -> dict[str, Any]:
    classes = None if dataset.classes is None else list(dataset.classes)
    image = len(dataset.input_shape) == 3 and dataset.input_shape[0] in (1, 3)
    return {
        "name": dataset.name,
        "task": pred.task,
        "about": pred.likelihood.about.plain,
        "classes": classes,
        "inputs": "images" if image else "inputs",
        "counts": dict(counts),
    }

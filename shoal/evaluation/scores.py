"""Scores of a run on the test set, shifts and OOD sets, computed once for all reports."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from shoal.core.errors import DataError
from shoal.core.structure import Weighted, parted
from shoal.data.corruptions import SEVERITIES, parse_shift, registry
from shoal.data.dataset import Dataset, Scaling, Split
from shoal.engine.members.precision import full_precision
from shoal.evaluation.evaluation import Evaluation, keep_evaluation, load_evaluation, made_from
from shoal.evaluation.inspection import attention_samples, gradient_samples, is_image
from shoal.inference.likelihoods import Task
from shoal.prediction import Predictive, evaluate, metrics, predict
from shoal.prediction.metrics.regression import in_units

__all__ = ["Evaluation", "corrupted_means", "detected_share", "evaluate_run", "load_evaluation"]

Scores = Mapping[str, float]


def corrupted_means(shifts: Mapping[str, Scores]) -> dict[str, dict[str, float]]:
    """The mean of every metric over the corruptions among the shifts.

    `all` is over every corruption and severity. `standard` is over the corruptions of published
    means, if there are other corruptions too. `severity-3` is over corruptions of severity 3.

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
"""The quantities by which the images of a gallery are sorted."""

AT_ONCE = {"cuda": 4096}
"""Inputs per forward pass: enough that a GPU does not wait for launches."""

GRID = 80

SHOWN = 2000

KEPT = 10_000
"""Inputs of all shifts together whose quantities are kept; scores and curves use all inputs."""


@full_precision()
def evaluate_run(
    run: Any,
    dataset: Dataset,
    *,
    gallery: int = 12,
    after: Callable[[str], None] = lambda split: None,
    keep: bool = True,
) -> Evaluation:
    """Evaluate a run on the test set, every shift and every OOD set.

    The evaluation is written into the folder of the run, or into its `results` if it has no folder.
    Shifts are computed once, one after the other. If they are many, the quantities of every k-th
    input are kept.

    Args:
        run: a run, or an object with `ensemble`, `likelihood` and `folder`.
        dataset: a data set with a test set; shifts and OOD sets are optional.
        gallery: number of images to keep at each end of disagreement, entropy and confidence.
        after: called with the name of each evaluated split.
        keep: store the evaluation in the folder or the run.
    """
    scaling = dataset.scaling
    labelled = None if dataset.test is None else _in_units(dataset.test, scaling)
    if labelled is None or labelled.y is None:
        raise DataError(
            f"the data set '{dataset.name}' has no labelled test set; "
            f"give Dataset(..., test=Split(x, y))"
        )
    test, counted, found = _predicted(run, labelled, scaling)
    y: Any = counted.y
    scores: dict[str, Any] = {"test": found, "shifts": {}, "ood": {}}
    samples = _samples("test", test, counted, gallery) | _members(test, y)
    counts = {"test": len(test)}
    for name, split in dataset.shifts.items():
        split = _in_units(split, scaling)
        key, (pred, split, found) = f"shift:{name}", _predicted(run, split, scaling)
        counts[key] = len(pred)
        scores["shifts"][name] = found
        samples |= _thinned(_samples(key, pred, split, 0), KEPT // len(dataset.shifts))
        after(key)
    for name, split in dataset.ood.items():
        key, (pred, _, _) = f"ood:{name}", _predicted(run, Split(split.x), scaling)
        counts[key] = len(pred)
        scores["ood"][name] = _ood_scores(test, pred)
        samples |= _samples(key, pred, Split(split.x), gallery)
        samples |= _pooled(name, test, y, pred)
        after(key)
    samples |= _training_points(dataset, test.likelihood.about) | _plane(run, dataset)
    samples |= gradient_samples(run, labelled) | attention_samples(run, labelled)
    means = corrupted_means(scores["shifts"])
    scores |= {"corrupted": means} if means else {}
    samples = {name: tensor.cpu() for name, tensor in samples.items()}
    facts = _described(dataset, test, counts) | made_from(run, dataset)
    found = Evaluation({"data": facts, **scores}, samples)
    if keep:
        keep_evaluation(run, found)
    return found


def _predicted(
    run: Any, split: Split, scaling: Scaling | None
) -> tuple[Predictive, Split, dict[str, float]]:
    """Prediction of a run for a split, in the units of the targets, and its scores.

    Every site is a data point, and ignored targets are left out: of the prediction and the split.
    """
    at_once = AT_ONCE.get(run.ensemble.device.type, 1024)
    pred = in_units(predict(run, split, batch_size=at_once, keep=True), scaling)
    targets, weight = parted(split.y)
    scores = {} if targets is None else evaluate(pred, targets, sample_weight=weight)
    points, y = pred.points(targets)
    same = points is pred and weight is None
    return points, split if same else replace(split, y=y), scores


def _in_units(split: Split, scaling: Scaling | None) -> Split:
    """The split with its targets in their original units."""
    if scaling is None or split.y is None:
        return split
    y, weight = parted(split.y)
    original = scaling.original(y)
    weighted = original if weight is None else Weighted.of_pair(original, weight)
    return replace(split, y=weighted)


def detected_share(test: Tensor, ood: Tensor, alarms: float = 0.05) -> float:
    """Share of OOD inputs detected at a false-positive rate `alarms` on the test set.

    An input is detected if its uncertainty exceeds the threshold of that rate.

    >>> detected_share(torch.arange(100.0), torch.tensor([10.0, 94.0, 95.0, 200.0]))
    0.5
    """
    allowed = math.floor(alarms * len(test))
    threshold = test.sort(descending=True).values[allowed]
    return float((ood > threshold).double().mean())


def _ood_scores(test: Predictive, ood: Predictive) -> dict[str, float]:
    """OOD detection metrics, mean uncertainty and detected share of an OOD set."""
    registry = metrics.registry
    fitting = [name for name in registry if registry[name].fits(test)]
    found = {name: registry[name](test, ood) for name in fitting if registry[name].ood}
    kind = test.likelihood.about.uncertainty
    share = detected_share(metrics.scores(test)[kind], metrics.scores(ood)[kind])
    means = {name: float(values.double().mean()) for name, values in _uncertainty(ood).items()}
    means["effective_functions"] = metrics.effective_functions(ood)
    return {"recognised": share, **means, **found}


def _uncertainty(pred: Predictive) -> dict[str, Tensor]:
    about = pred.likelihood.about
    if not about.has_classes:
        spread = {"stddev": pred.stddev.mean(-1)} if "numbers" in about.kinds else {}
        return {"disagreement": pred.disagreement(), **spread}
    return {
        "entropy": pred.entropy(),
        "mutual_information": pred.mutual_information(),
        "disagreement": pred.disagreement(),
        "confidence": pred.confidence().flatten(),
    }


def _samples(key: str, pred: Predictive, split: Split, gallery: int) -> dict[str, Tensor]:
    found = {name: values.float() for name, values in _uncertainty(pred).items()}
    if not pred.likelihood.about.has_classes:
        found |= _numbers(pred, split) if "numbers" in pred.likelihood.about.kinds else {}
    else:
        found["prediction"] = pred.labels().flatten()
        if split.y is not None:
            found |= _labelled(pred, pred.check(split.y))
        alone = len(split.x) == len(found["prediction"])  # an image has one label
        found |= _gallery(split.x, found, gallery if alone else 0)
    return {f"{key}/{name}": tensor.contiguous() for name, tensor in found.items()}


def _thinned(samples: dict[str, Tensor], room: int) -> dict[str, Tensor]:
    """Quantities of at most `room` inputs, evenly spaced over the split; curves stay complete."""
    curves = ("/reliability/", "/above/")
    return {
        name: values if any(curve in name for curve in curves) else _spaced(values, max(room, 1))
        for name, values in samples.items()
    }


def _spaced(values: Tensor, room: int) -> Tensor:
    return values[:: math.ceil(len(values) / room)].contiguous()


def _numbers(pred: Predictive, split: Split) -> dict[str, Tensor]:
    found = {"mean": _column(pred.mean), "stddev": _column(pred.stddev)}
    single = isinstance(split.x, Tensor) and split.x[0].numel() == 1
    if single and len(split.x) == len(pred):
        found["x"] = split.x.flatten().float()
    if split.y is not None:
        found["y"] = _column(pred.check(split.y))
        if {"gaussian", "intervals"} & {*pred.likelihood.about.kinds}:
            found["pit"] = _column(metrics.pit(pred, split.y))
    return found


def _column(values: Tensor) -> Tensor:
    return values.squeeze(-1).float() if values.shape[-1] == 1 else values.float()


def _labelled(pred: Predictive, y: Tensor) -> dict[str, Tensor]:
    bins, above = metrics.reliability(pred, y), metrics.accuracy_confidence(pred, y)
    curves = {f"reliability/{name}": getattr(bins, name) for name in bins.__dataclass_fields__}
    curves |= {f"above/{name}": values for name, values in above._asdict().items()}
    label = pred.likelihood.labels(y).flatten()
    return {"label": label, **{name: values.float() for name, values in curves.items()}}


def _pooled(name: str, test: Predictive, y: Tensor, ood: Predictive) -> dict[str, Tensor]:
    """Accuracy above each confidence, where every OOD prediction counts as wrong."""
    if not test.likelihood.about.has_classes:
        return {}
    above = metrics.accuracy_confidence(test, y, ood=ood)
    return {f"pooled:{name}/above/{key}": v.float() for key, v in above._asdict().items()}


def _gallery(x: Tensor, found: dict[str, Tensor], count: int) -> dict[str, Tensor]:
    """The images at both ends of each quantity, as bytes, with their indices in the split."""
    if count < 1 or not is_image(x):
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
    """Differences between members: accuracy of each, disagreement of each pair."""
    if not pred.likelihood.about.has_classes:
        return {"test/affinity": metrics.affinity(pred).float()}
    correct = pred.member_labels() == pred.likelihood.labels(pred.check(y))
    return {
        "test/pairwise": metrics.pairwise_disagreement(pred).float(),
        "test/member_accuracy": correct.double().flatten(1).mean(-1).float(),
    }


def _training_points(dataset: Dataset, about: Task) -> dict[str, Tensor]:
    """The training data, if they have at most two dimensions."""
    x, y = dataset.train.x, dataset.train.y
    flat = isinstance(x, Tensor) and x.ndim <= 2 and x.shape[1:].numel() <= 2
    if not flat or y is None or len(x) == 0 or (y.ndim > 1 and y.shape[-1] > 1):
        return {}
    y = y.flatten()[:SHOWN]
    y = y if dataset.scaling is None else dataset.scaling.original(y)
    points = x.reshape(len(x), -1)[:SHOWN].float()
    return {"train/x": points, "train/y": y.long() if about.has_classes else y.float()}


def _plane(run: Any, dataset: Dataset) -> dict[str, Tensor]:
    """Predictive entropy on a grid around the data, for two-dimensional inputs with classes."""
    flat = isinstance(dataset.train.x, Tensor) and dataset.input_shape == (2,)
    if not run.likelihood.about.has_classes or not flat:
        return {}
    known, points = dataset.train, {}
    if not len(known) and dataset.test is not None and dataset.test.y is not None:
        known = dataset.test  # the training data are not given
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
    image = is_image(dataset.train.x)
    return {
        "name": dataset.name,
        "task": pred.task,
        "about": pred.likelihood.about.plain,
        "classes": classes,
        "inputs": "images" if image else "inputs",
        "counts": dict(counts),
    }

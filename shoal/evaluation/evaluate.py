"""`shoal.evaluate`: metrics of one prediction, or the full evaluation of a run.

An `Evaluation` has scores by split and quantities of every input. It is computed once, stored with
the run, and read by every report.
"""

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, overload

import torch
from torch import Tensor

from shoal.analysis.chains import diagnose, is_drawn
from shoal.analysis.stored_results import kept_result
from shoal.core.arguments import checked, list_of, text, whole_from, whole_or_zero
from shoal.core.arguments import device as usable
from shoal.core.display.notebook import facts_html
from shoal.core.display.progress import Ticker
from shoal.core.errors import CheckpointCorrupt, ConfigError, DataError
from shoal.core.storage.disk import checked_path
from shoal.core.storage.files import (
    read_sealed,
    read_tensors,
    sealed,
    sha256,
    write_json,
    write_tensors,
)
from shoal.core.structure import Weighted, parted
from shoal.data.batches.arrays import inputs_digest
from shoal.data.corruptions import SEVERITIES, parse_shift, registry
from shoal.data.dataset import Dataset, Scaling, Split
from shoal.engine.members.precision import full_precision
from shoal.evaluation.data_arguments import (
    Inputs,
    Labelled,
    Shifts,
    evaluation_data,
    opened,
    placed,
)
from shoal.evaluation.inspection import attention_samples, gradient_samples, is_image
from shoal.inference.likelihoods import Task, task_of
from shoal.prediction import metrics, predict
from shoal.prediction.metrics.calibration import AccuracyConfidence, Reliability
from shoal.prediction.metrics.regression import in_units
from shoal.prediction.metrics.similarity import compared_members
from shoal.prediction.predictive import ArrayLike, Predictive
from shoal.prediction.worth import SizeCurve, can_tell, detection_curve, size_curves
from shoal.training.folder.own_data import again
from shoal.training.folder.run import Run
from shoal.training.folder.run_folder import DRAWS

__all__ = [
    "SAMPLES",
    "SCORES",
    "Evaluation",
    "corrupted_means",
    "detected_share",
    "draws_of",
    "evaluate",
    "evaluate_run",
    "is_current",
    "keep_evaluation",
    "kept_evaluation",
    "labelled_test",
    "load_evaluation",
    "made_from",
    "split_prediction",
    "splits_ticker",
    "stored_curves",
]


SCORES = "scores.json"
SAMPLES = "samples.safetensors"


@dataclass(frozen=True, eq=False, repr=False)
class Evaluation:
    """The evaluation of a run: scores by split, and samples for the figures of the report.

    A split is called "test", "shift:NAME" or "ood:NAME".

    Attributes:
        scores: "test" has the metrics, "shifts" and "ood" have them by name of the split. "data"
            describes the evaluated data: name, task, classes, number of inputs and digest of each
            split, and the number of epochs. If shifts are corruptions, "corrupted" has the means
            over "all", over the "standard" corruptions and over each severity.
        samples: tensors named "SPLIT/QUANTITY", such as "test/entropy" or "ood:letters/confidence".
    """

    scores: dict[str, Any]
    samples: dict[str, Tensor] = field(default_factory=dict)

    def __repr__(self) -> str:
        shown = ("accuracy", "rmse", "nll", "ece", "coverage_90")
        metrics = [f"{key} {self.test[key]:.4g}" for key in shown if key in self.test]
        sets = [f"{len(sets)} {name}" for name, sets in self._sets() if sets]
        return f"Evaluation({', '.join([repr(self.scores['data'].get('name')), *metrics, *sets])})"

    def _repr_html_(self) -> str:
        title = f"Evaluation on {self.scores['data'].get('name')}"
        rows = {name: f"{value:.4g}" for name, value in self.test.items()}
        return facts_html(
            title, rows | {name: ", ".join(sets) or None for name, sets in self._sets()}
        )

    def _sets(self) -> list[tuple[str, dict[str, dict[str, float]]]]:
        return [("shifts", self.shifts), ("OOD sets", self.ood)]

    @property
    def task(self) -> str:
        """Name of the likelihood's task, such as "classification"."""
        return self.scores["data"]["task"]

    @property
    def about(self) -> Task:
        """The task of the run's likelihood; old runs keep its name only."""
        data = self.scores["data"]
        return task_of(data.get("about") or data["task"])

    @property
    def test(self) -> dict[str, float]:
        """Metrics on the test set."""
        return self.scores["test"]

    @property
    def shifts(self) -> dict[str, dict[str, float]]:
        """Metrics under each shift."""
        return self.scores["shifts"]

    @property
    def ood(self) -> dict[str, dict[str, float]]:
        """OOD detection metrics of each OOD set."""
        return self.scores["ood"]

    @property
    def corrupted(self) -> dict[str, dict[str, float]]:
        """Means of the metrics over corruptions; empty if no shift is a corruption."""
        return self.scores.get("corrupted", {})

    def split_samples(self, name: str) -> dict[str, Tensor]:
        """Quantities of one split, by name; empty if there is no such split."""
        start = text("name", name) + "/"
        return {
            key.removeprefix(start): tensor
            for key, tensor in self.samples.items()
            if key.startswith(start)
        }

    def reliability(self, split: str) -> Reliability | None:
        """Confidence and accuracy in bins; None for a split without labels."""
        names = ("edges", "count", "confidence", "accuracy")
        parts = [self.samples.get(f"{split}/reliability/{name}") for name in names]
        return None if None in parts else Reliability(*parts)  # pyright: ignore

    def accuracy_confidence(self, split: str) -> AccuracyConfidence | None:
        """Accuracy and share of the predictions above each confidence; None without labels."""
        names = AccuracyConfidence._fields
        parts = [self.samples.get(f"{split}/above/{name}") for name in names]
        return None if None in parts else AccuracyConfidence(*parts)  # pyright: ignore

    def save(self, folder: Path | str) -> None:
        """Write both files into the folder of the run; the scores last, as a sign of completion."""
        folder = checked_path(folder, "folder")
        samples = folder / SAMPLES
        write_tensors(samples, self.samples)
        write_json(folder / SCORES, sealed({**self.scores, SAMPLES: sha256(samples)}))


def keep_evaluation(run: Any, evaluation: Evaluation) -> None:
    """Store an evaluation in the folder of the run, or in its `results` if it has no folder."""
    if getattr(run, "folder", None) is not None:
        evaluation.save(run.folder)
    elif hasattr(run, "results"):
        run.results["evaluation"] = evaluation


def kept_evaluation(run: Any) -> Evaluation | None:
    """The evaluation that `keep_evaluation` stored; None if there is none."""
    return kept_result(run, "evaluation", load_evaluation)


def made_from(run: Any, dataset: Dataset) -> dict[str, Any]:
    """The inputs of an evaluation: number of epochs, digests of the splits, and a calibration.

    Shifts that are computed on access depend on the test set and have an empty digest.
    """
    splits = {} if dataset.test is None else {"test": dataset.test}
    splits |= {f"ood:{name}": split for name, split in dataset.ood.items()}
    if isinstance(dataset.shifts, dict):
        splits |= {f"shift:{name}": split for name, split in dataset.shifts.items()}
    digests = {f"shift:{name}": "" for name in dataset.shifts}
    for name, split in splits.items():
        tensors = [split.x] if split.y is None else [split.x, split.y]
        digests[name] = "-".join(inputs_digest(tensor)[:16] for tensor in tensors)
    calibrated = run.likelihood if run.likelihood.calibration else None
    return {
        "epochs": len(getattr(run, "history", ())),
        "digests": digests,
        "calibrated": None if calibrated is None else str(calibrated),
    }


def is_current(evaluation: Evaluation | None, run: Any, dataset: Dataset) -> bool:
    """Whether an evaluation belongs to these data and weights, and suffices for a report."""
    if evaluation is None or not evaluation.samples:
        return False
    facts, wanted = evaluation.scores["data"], made_from(run, dataset)
    return all(facts.get(key) == value for key, value in wanted.items())


def load_evaluation(folder: Path | str) -> Evaluation | None:
    """The evaluation in the folder of a run; None if there is none.

    Samples are large and may be absent, for example left on another machine; then the evaluation
    has scores only.
    """
    scores, samples = Path(folder) / SCORES, Path(folder) / SAMPLES
    if not scores.exists():
        return None
    try:
        stored = read_sealed(scores)
        if samples.exists() and stored.get(SAMPLES) not in (None, sha256(samples)):
            raise CheckpointCorrupt(f"{samples} is not what was saved: its SHA-256 differs")
        tensors = read_tensors(samples) if samples.exists() else {}
    except CheckpointCorrupt as error:
        raise CheckpointCorrupt(f"{error}; type: {again('evaluate', scores.parent)}") from None
    return Evaluation(_checked(stored, scores), tensors)


def _checked(stored: Any, path: Path) -> dict[str, Any]:
    wanted = {"data", "test", "shifts", "ood"}
    sound = isinstance(stored, dict) and wanted <= stored.keys()
    wanted |= {"corrupted"} & stored.keys() if sound else set()
    if not sound or not all(isinstance(stored[key], dict) for key in wanted):
        raise CheckpointCorrupt(
            f"{path} is not what `shoal evaluate` writes; type: {again('evaluate', path.parent)}"
        )
    if not isinstance(stored["data"].get("task"), str):
        raise CheckpointCorrupt(f"{path} does not name its task; evaluate the run again")
    counts, classes = stored["data"].get("counts") or {}, stored["data"].get("classes") or []
    numbers: dict[str, Any] = {}
    try:
        sound = all(type(count) is int for count in counts.values())
        sound = sound and all(isinstance(name, str) for name in classes)
        numbers = {key: _as_floats(stored[key]) for key in wanted - {"data"}}
    except (AttributeError, OverflowError, TypeError, ValueError):
        sound = False
    if not sound or stored.keys() - {*wanted, SAMPLES}:
        raise CheckpointCorrupt(f"{path} holds values that are not scores; evaluate the run again")
    return {"data": stored["data"], **numbers}


def _as_floats(value: Any) -> Any:
    """Numbers as floats; null becomes NaN, since it stands for a number that is not finite."""
    if isinstance(value, Mapping):
        return {key: _as_floats(inner) for key, inner in value.items()}
    return math.nan if value is None else float(value)


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
    corrupted = [(pair, scores) for name, scores in shifts.items() if (pair := parse_shift(name))]
    groups = {"all": [scores for _, scores in corrupted]}
    standard = [scores for (name, _), scores in corrupted if registry[name].standard]
    if 0 < len(standard) < len(corrupted):
        groups["standard"] = standard
    for severity in SEVERITIES:
        groups[f"severity-{severity}"] = [scores for (_, s), scores in corrupted if s == severity]
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
    labelled = labelled_test(dataset)
    whole = split_prediction(run, labelled, scaling)
    test, counted, test_scores, slopes = _scored(whole, labelled)
    y: Any = counted.y
    scores: dict[str, Any] = {"test": test_scores, "shifts": {}, "ood": {}}
    samples = _samples("test", test, counted, gallery) | _members(test, y)
    counts, draws = {"test": len(test)}, draws_of(run)
    samples |= _curves(whole, labelled, draws) | _derivative_samples(test, y, slopes)
    for name, split in dataset.shifts.items():
        split = _in_units(split, scaling)
        key, whole = f"shift:{name}", split_prediction(run, split, scaling)
        pred, split, shift_scores, _ = _scored(whole, split)
        counts[key] = len(pred)
        scores["shifts"][name] = shift_scores
        samples |= _thinned(_samples(key, pred, split, 0), KEPT // len(dataset.shifts))
        after(key)
    for name, split in dataset.ood.items():
        key, pred = f"ood:{name}", split_prediction(run, Split(split.x), scaling).of_values
        pred = pred.points()[0]
        counts[key] = len(pred)
        scores["ood"][name] = _ood_scores(test, pred)
        samples |= _samples(key, pred, Split(split.x), gallery)
        samples |= _pooled(name, test, y, pred) | _detection_curve(name, test, pred, draws)
        after(key)
    samples |= _training_points(dataset, test.likelihood.about) | _plane(run, dataset)
    samples |= gradient_samples(run, labelled) | attention_samples(run, labelled)
    if is_drawn(run):
        found = diagnose(run, labelled, scaling=scaling).stored()
        samples |= {f"chains/{name}": tensor for name, tensor in found.items()}
    means = corrupted_means(scores["shifts"])
    scores |= {"corrupted": means} if means else {}
    samples = {name: tensor.cpu() for name, tensor in samples.items()}
    facts = _described(run, dataset, test, counts) | made_from(run, dataset)
    explanation = None if dataset.explain is None else dataset.explain(run)
    if explanation is not None:
        told, tensors = explanation.stored()
        facts, samples = facts | told, samples | tensors
    evaluation = Evaluation({"data": facts, **scores}, samples)
    if keep:
        keep_evaluation(run, evaluation)
    return evaluation


def _scored(
    pred: Predictive, split: Split
) -> tuple[Predictive, Split, dict[str, float], tuple[Predictive, Tensor] | None]:
    """A prediction and its split without ignored targets, every site a data point; its scores.

    The last of the results are prediction and targets of derivatives, if the split has them.
    """
    targets, weight = parted(split.y)
    scores = {} if targets is None else metrics.evaluate(pred, targets, sample_weight=weight)
    if pred.takes_pair(targets):
        parts = {prefix: (part, y) for prefix, part, y, _ in pred.pair_parts(targets)}
        values, y = parts.get("", (pred.of_values, None))
        return values, replace(split, y=y), scores, parts.get("derivatives_")
    points, y = pred.of_values.points(targets)
    same = points is pred and weight is None
    return points, split if same else replace(split, y=y), scores, None


def split_prediction(run: Any, split: Split, scaling: Scaling | None = None) -> Predictive:
    """Prediction of a run for a split, in the units of the targets."""
    at_once = AT_ONCE.get(run.ensemble.device.type, 1024)
    return in_units(predict(run, split, batch_size=at_once, keep=True), scaling)


def labelled_test(dataset: Dataset) -> Split:
    """The test set with its targets in their original units."""
    scaling, split = dataset.scaling, dataset.test
    if split is None or split.y is None:
        raise DataError(
            f"the data set '{dataset.name}' has no labelled test set; "
            f"give Dataset(..., test=Split(x, y))"
        )
    return _in_units(split, scaling)


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
    detection = {name: registry[name](test, ood) for name in fitting if registry[name].ood}
    kind = test.likelihood.about.uncertainty
    share = detected_share(metrics.scores(test)[kind], metrics.scores(ood)[kind])
    means = {name: float(values.double().mean()) for name, values in _uncertainty(ood).items()}
    means["effective_functions"] = metrics.effective_functions(ood)
    return {"recognised": share, **means, **detection}


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
    quantities = {name: values.float() for name, values in _uncertainty(pred).items()}
    if not pred.likelihood.about.has_classes:
        quantities |= _numbers(pred, split) if "numbers" in pred.likelihood.about.kinds else {}
    else:
        quantities["prediction"] = pred.labels().flatten()
        if split.y is not None:
            quantities |= _labelled(pred, pred.check(split.y))
        alone = len(split.x) == len(quantities["prediction"])  # an image has one label
        quantities |= _gallery(split.x, quantities, gallery if alone else 0)
    return {f"{key}/{name}": tensor.contiguous() for name, tensor in quantities.items()}


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
    quantities = {"mean": _column(pred.mean), "stddev": _column(pred.stddev)}
    single = isinstance(split.x, Tensor) and split.x[0].numel() == 1
    if single and len(split.x) == len(pred):
        quantities["x"] = split.x.flatten().float()
    if split.y is not None:
        quantities["y"] = _column(pred.check(split.y))
        if {"gaussian", "intervals"} & {*pred.likelihood.about.kinds}:
            quantities["pit"] = _column(metrics.pit(pred, split.y))
    return quantities


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


def _gallery(x: Tensor, quantities: dict[str, Tensor], count: int) -> dict[str, Tensor]:
    """The images at both ends of each quantity, as bytes, with their indices in the split."""
    if count < 1 or not is_image(x):
        return {}
    kept: dict[str, Tensor] = {}
    low, high = (float(end) for end in x.aminmax())
    for measure in MEASURES:
        order = quantities[measure].argsort(stable=True).to(x.device)
        for end, index in (("low", order[:count]), ("high", order.flip(0)[:count])):
            pixels = (x[index].float() - low) / max(high - low, 1e-12)
            kept[f"gallery/{measure}/{end}"] = (255 * pixels).round().to(torch.uint8)
            kept[f"gallery/{measure}/{end}/index"] = index
    return kept


def _members(pred: Predictive, y: Tensor) -> dict[str, Tensor]:
    """Differences between members: accuracy of each, disagreement of each pair; 64 at most."""
    pred = compared_members(pred)
    if not pred.likelihood.about.has_classes:
        return {"test/affinity": metrics.affinity(pred).float()}
    correct = pred.member_labels() == pred.likelihood.labels(pred.check(y))
    return {
        "test/pairwise": metrics.pairwise_disagreement(pred).float(),
        "test/member_accuracy": correct.double().flatten(1).mean(-1).float(),
    }


_WORTH = "worth"


def draws_of(run: Any) -> int:
    """Draws of each chain of a run; 1 for members that do not sample."""
    return int((getattr(run, "config", {}).get(DRAWS) or {}).get("draws", 1))


def _curves(pred: Predictive, split: Split, draws: int) -> dict[str, Tensor]:
    """Scores of ensembles of some of the members, for "What is one more member worth?"."""
    if not can_tell(pred, draws):
        return {}
    pred, y, weight = pred.values_alone(*parted(split.y))
    return _stored(size_curves(pred, y, weight=weight, draws=draws))


def _detection_curve(name: str, test: Predictive, ood: Predictive, draws: int) -> dict[str, Tensor]:
    if not can_tell(test, draws) or test.size != ood.size:
        return {}
    return _stored({f"auroc {name}": detection_curve(f"auroc {name}", test, ood, draws)})


def _stored(curves: Mapping[str, SizeCurve]) -> dict[str, Tensor]:
    tensors = {score: curve.tensors for score, curve in curves.items()}
    return {f"{_WORTH}/{score}/{n}": t for score, each in tensors.items() for n, t in each.items()}


def stored_curves(evaluation: Evaluation) -> dict[str, SizeCurve]:
    """The curves of an evaluation by score; none for fewer than three members."""
    tensors: dict[str, dict[str, Tensor]] = {}
    for key, tensor in evaluation.split_samples(_WORTH).items():
        score, _, name = key.rpartition("/")
        tensors.setdefault(score, {})[name] = tensor
    return {score: SizeCurve.read(score, each) for score, each in tensors.items()}


def _derivative_samples(
    test: Predictive, y: Tensor | None, slopes: tuple[Predictive, Tensor] | None
) -> dict[str, Tensor]:
    """Quantities of some derivatives, and the error of every member for both kinds of targets."""
    if slopes is None:
        return {}
    pred, targets = slopes
    few = range(0, len(pred), math.ceil(len(pred) / KEPT))
    rows = torch.tensor(few, device=targets.device)
    numbers = _numbers(pred[rows], Split(targets[rows], targets[rows]))
    found = {f"derivatives/{name}": t.contiguous() for name, t in numbers.items() if name != "x"}
    pairs = {"derivatives": (pred, targets), "test": (test, y)}
    for name, (part, known) in pairs.items():
        if known is not None:
            error = (part.columns.member_means - part.check(known)).double()
            found[f"{name}/member_rmse"] = error.square().flatten(1).mean(1).sqrt().float()
    return found


def _training_points(dataset: Dataset, about: Task) -> dict[str, Tensor]:
    """The training data, if they have at most two dimensions."""
    x, y = dataset.train.x, dataset.train.y
    flat = isinstance(x, Tensor) and x.ndim <= 2 and x.shape[1:].numel() <= 2
    if not flat or not isinstance(y, Tensor) or len(x) == 0 or (y.ndim > 1 and y.shape[-1] > 1):
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


def _described(
    run: Any, dataset: Dataset, pred: Predictive, counts: Mapping[str, int]
) -> dict[str, Any]:
    """What the report says about the data; the run knows class names that a test set lacks."""
    known = dataset.classes or getattr(run, "provenance", {}).get("classes")
    image = is_image(dataset.train.x)
    return {
        "name": dataset.name,
        "task": pred.task,
        "about": pred.likelihood.about.plain,
        "classes": None if known is None else list(map(str, known)),
        "inputs": "images" if image else "inputs",
        "counts": dict(counts),
    }


_FEW = 10


def splits_ticker(data: Dataset, quiet: bool) -> Ticker:
    """A ticker over the shifts and OOD sets of an evaluation, silent if they are few."""
    total = len(data.shifts) + len(data.ood)
    return Ticker(total, show=not quiet and total > _FEW)


@overload
def evaluate(
    source: Predictive,
    data: ArrayLike,
    ood: Predictive | None = None,
    *,
    sample_weight: ArrayLike | None = None,
) -> dict[str, float]: ...


@overload
def evaluate(
    source: Run | str | os.PathLike[str],
    data: Dataset | Labelled | str | Mapping[str, Any] | None = None,
    ood: Mapping[str, Inputs] | None = None,
    *,
    shifts: Shifts | None = None,
    severities: Sequence[int] = SEVERITIES,
    gallery: int = 12,
    device: torch.device | str | None = None,
    keep: bool = True,
    progress: bool = False,
) -> Evaluation: ...


@checked(gallery=whole_or_zero, severities=list_of(whole_from(1, 5)), device=usable)
def evaluate(
    source: Predictive | Run | str | os.PathLike[str],
    data: Any = None,
    ood: Any = None,
    *,
    shifts: Shifts | None = None,
    severities: Sequence[int] = SEVERITIES,
    sample_weight: ArrayLike | None = None,
    gallery: int = 12,
    device: torch.device | str | None = None,
    keep: bool = True,
    progress: bool = False,
) -> dict[str, float] | Evaluation:
    """Metrics of a prediction by name; or the evaluation of a run, with data for the report.

        scores = shoal.evaluate(shoal.predict(run, x_test), y_test)      # {"accuracy": ...}
        found = shoal.evaluate(run, (x_test, y_test), ood={"letters": x_letters})
        found.test["nll"], found.ood["letters"]["auroc_entropy"]

    The evaluation of a run stays in its folder, or in memory for a run without a folder, and
    `shoal.report` shows it. The command `shoal evaluate RUN` does the same.

    Args:
        source: a prediction, a run, or the folder of a run.
        data: for a prediction the labels or targets [B]. For a run the test set: a pair (x, y), a
            loader of such batches, or a `Dataset` with a test set, shifts and OOD sets; by
            default the data set of the run, if it can be loaded by name.
        ood: out-of-distribution (OOD) inputs by name: arrays, tensors or loaders. For a prediction,
            the prediction of the same ensemble for OOD inputs.
        shifts: changed test inputs by name: pairs (x, y), or inputs with the test targets; or for
            images the names of corruptions (`shoal list corruptions`), "standard" or "all".
        severities: corruption severities, from 1 to 5.
        sample_weight: weight of each target of a prediction [B]. For a run, give the test set as
            (x, y, weight): its scores are weighted, its figures are not.
        gallery: number of images to keep at each end of disagreement, entropy and confidence.
        device: device to compute on; None keeps the device of the members.
        keep: store the evaluation in the folder or the run.
        progress: show progress if there are many splits.
    """
    if isinstance(source, Predictive):
        if shifts is not None or data is None:
            raise ConfigError(
                "a prediction is evaluated with its targets; type: shoal.evaluate(pred, y)"
            )
        return metrics.evaluate(source, data, ood, sample_weight)
    if sample_weight is not None:
        raise ConfigError("for a run give the test set with its weights, as (x, y, weight)")
    run = placed(opened(source), device)
    dataset = evaluation_data(run, data, ood, shifts, severities)
    with splits_ticker(dataset, not progress) as ticker:
        return evaluate_run(run, dataset, gallery=gallery, after=ticker.tick, keep=keep)

"""The evaluation of a run: scores by split, and quantities of every input."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from shoal.core.display.notebook import facts_html
from shoal.core.errors import CheckpointCorrupt
from shoal.core.storage.files import (
    read_sealed,
    read_tensors,
    sealed,
    sha256,
    write_json,
    write_tensors,
)
from shoal.data.dataset import Dataset
from shoal.inference.likelihoods import Task, task_of
from shoal.prediction.metrics.calibration import AccuracyConfidence, Reliability
from shoal.training.folder.own_data import again
from shoal.training.folder.provenance import inputs_digest

__all__ = [
    "SAMPLES",
    "SCORES",
    "Evaluation",
    "is_current",
    "keep_evaluation",
    "kept_evaluation",
    "load_evaluation",
    "made_from",
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
        start = name + "/"
        return {
            key.removeprefix(start): tensor
            for key, tensor in self.samples.items()
            if key.startswith(start)
        }

    def reliability(self, split: str) -> Reliability | None:
        """Confidence and accuracy in bins; None for a split without labels."""
        names = ("edges", "count", "confidence", "accuracy")
        found = [self.samples.get(f"{split}/reliability/{name}") for name in names]
        return None if None in found else Reliability(*found)  # pyright: ignore

    def accuracy_confidence(self, split: str) -> AccuracyConfidence | None:
        """Accuracy and share of the predictions above each confidence; None without labels."""
        names = AccuracyConfidence._fields
        found = [self.samples.get(f"{split}/above/{name}") for name in names]
        return None if None in found else AccuracyConfidence(*found)  # pyright: ignore

    def save(self, folder: Path | str) -> None:
        """Write both files into the folder of the run; the scores last, as a sign of completion."""
        samples = Path(folder) / SAMPLES
        write_tensors(samples, self.samples)
        write_json(Path(folder) / SCORES, sealed({**self.scores, SAMPLES: sha256(samples)}))


def keep_evaluation(run: Any, found: Evaluation) -> None:
    """Store an evaluation in the folder of the run, or in its `results` if it has no folder."""
    if getattr(run, "folder", None) is not None:
        found.save(run.folder)
    elif hasattr(run, "results"):
        run.results["evaluation"] = found


def kept_evaluation(run: Any) -> Evaluation | None:
    """The evaluation that `keep_evaluation` stored; None if there is none."""
    if getattr(run, "folder", None) is not None:
        return load_evaluation(run.folder)
    return getattr(run, "results", {}).get("evaluation")


def made_from(run: Any, dataset: Dataset) -> dict[str, Any]:
    """The inputs of an evaluation: number of epochs, and a digest of each split.

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
    return {"epochs": len(getattr(run, "history", ())), "digests": digests}


def is_current(found: Evaluation | None, run: Any, dataset: Dataset) -> bool:
    """Whether an evaluation belongs to these data and weights, and suffices for a report."""
    if found is None or not found.samples:
        return False
    facts, wanted = found.scores["data"], made_from(run, dataset)
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
        found = read_sealed(scores)
        if samples.exists() and found.get(SAMPLES) not in (None, sha256(samples)):
            raise CheckpointCorrupt(f"{samples} is not what was saved: its SHA-256 differs")
        known = read_tensors(samples) if samples.exists() else {}
    except CheckpointCorrupt as error:
        raise CheckpointCorrupt(f"{error}; type: {again('evaluate', scores.parent)}") from None
    return Evaluation(_checked(found, scores), known)


def _checked(found: Any, path: Path) -> dict[str, Any]:
    wanted = {"data", "test", "shifts", "ood"}
    sound = isinstance(found, dict) and wanted <= found.keys()
    wanted |= {"corrupted"} & found.keys() if sound else set()
    if not sound or not all(isinstance(found[key], dict) for key in wanted):
        raise CheckpointCorrupt(
            f"{path} is not what `shoal evaluate` writes; type: {again('evaluate', path.parent)}"
        )
    if not isinstance(found["data"].get("task"), str):
        raise CheckpointCorrupt(f"{path} does not name its task; evaluate the run again")
    counts, classes = found["data"].get("counts") or {}, found["data"].get("classes") or []
    numbers: dict[str, Any] = {}
    try:
        sound = all(type(count) is int for count in counts.values())
        sound = sound and all(isinstance(name, str) for name in classes)
        numbers = {key: _numbers(found[key]) for key in wanted - {"data"}}
    except (AttributeError, OverflowError, TypeError, ValueError):
        sound = False
    if not sound or found.keys() - {*wanted, SAMPLES}:
        raise CheckpointCorrupt(f"{path} holds values that are not scores; evaluate the run again")
    return {"data": found["data"], **numbers}


def _numbers(value: Any) -> Any:
    """Numbers as floats; null becomes NaN, since it stands for a number that is not finite."""
    if isinstance(value, Mapping):
        return {key: _numbers(inner) for key, inner in value.items()}
    return math.nan if value is None else float(value)

"""What is known about a run once it has been evaluated: scores, and numbers for every input."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from shoal.core.errors import CheckpointCorrupt
from shoal.core.files import read_sealed, read_tensors, sealed, sha256, write_json, write_tensors
from shoal.core.notebook import facts_html
from shoal.data.dataset import Dataset
from shoal.inference.likelihoods import Task, task_of
from shoal.prediction.calibration import AccuracyConfidence, Reliability
from shoal.training.own_data import again
from shoal.training.provenance import tensor_digest

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
    """What `shoal.evaluate` finds about a run: scores by split, and what the report draws.

    A part of the data is called "test", "shift:NAME" or "ood:NAME".

    Attributes:
        scores: "test" has the metrics, "shifts" and "ood" have them by the name of the part, and
            "data" says what was judged: name, task, classes, number of inputs and digest of each
            part, and after how many epochs. Where
            shifts are corruptions, "corrupted" has the means over "all", over the "standard" ones
            and over each severity.
        samples: tensors named "PART/QUANTITY", such as "test/entropy" or "ood:letters/confidence".
    """

    scores: dict[str, Any]
    samples: dict[str, Tensor] = field(default_factory=dict)

    def __repr__(self) -> str:
        shown = ("accuracy", "rmse", "nll", "ece", "coverage_90")
        told = [f"{key} {self.test[key]:.4g}" for key in shown if key in self.test]
        sets = [f"{len(sets)} {name}" for name, sets in self._sets() if sets]
        return f"Evaluation({', '.join([repr(self.scores['data'].get('name')), *told, *sets])})"

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
        """What the run's likelihood says of its task; of old runs the name alone is kept."""
        data = self.scores["data"]
        return task_of(data.get("about") or data["task"])

    @property
    def test(self) -> dict[str, float]:
        """Metrics on the test data."""
        return self.scores["test"]

    @property
    def shifts(self) -> dict[str, dict[str, float]]:
        """Metrics under each shift."""
        return self.scores["shifts"]

    @property
    def ood(self) -> dict[str, dict[str, float]]:
        """How each set of foreign data is told from the test data."""
        return self.scores["ood"]

    @property
    def corrupted(self) -> dict[str, dict[str, float]]:
        """Means of the metrics over corruptions; empty where no shift is one."""
        return self.scores.get("corrupted", {})

    def split_samples(self, name: str) -> dict[str, Tensor]:
        """Quantities of one part, by name; empty when there is no such part."""
        start = name + "/"
        return {
            key.removeprefix(start): tensor
            for key, tensor in self.samples.items()
            if key.startswith(start)
        }

    def reliability(self, part: str) -> Reliability | None:
        """Confidence against accuracy in bins, where the part has labels."""
        names = ("edges", "count", "confidence", "accuracy")
        found = [self.samples.get(f"{part}/reliability/{name}") for name in names]
        return None if None in found else Reliability(*found)  # pyright: ignore

    def accuracy_confidence(self, part: str) -> AccuracyConfidence | None:
        """Accuracy and share of the answers above each confidence, where the part has labels."""
        names = AccuracyConfidence._fields
        found = [self.samples.get(f"{part}/above/{name}") for name in names]
        return None if None in found else AccuracyConfidence(*found)  # pyright: ignore

    def save(self, folder: Path | str) -> None:
        """Write both files into the folder of the run; the scores come last and complete it."""
        samples = Path(folder) / SAMPLES
        write_tensors(samples, self.samples)
        write_json(Path(folder) / SCORES, sealed({**self.scores, SAMPLES: sha256(samples)}))


def keep_evaluation(run: Any, found: Evaluation) -> None:
    """In the folder of the run; in its `results` where it has none."""
    if getattr(run, "folder", None) is not None:
        found.save(run.folder)
    elif hasattr(run, "results"):
        run.results["evaluation"] = found


def kept_evaluation(run: Any) -> Evaluation | None:
    """What `keep_evaluation` kept; None where there is nothing."""
    if getattr(run, "folder", None) is not None:
        return load_evaluation(run.folder)
    return getattr(run, "results", {}).get("evaluation")


def made_from(run: Any, dataset: Dataset) -> dict[str, Any]:
    """What an evaluation follows from: how long the run was trained, and a digest of each split.

    Shifts that are made when they are looked at follow from the test data and have an empty one.
    """
    splits = {} if dataset.test is None else {"test": dataset.test}
    splits |= {f"ood:{name}": split for name, split in dataset.ood.items()}
    if isinstance(dataset.shifts, dict):
        splits |= {f"shift:{name}": split for name, split in dataset.shifts.items()}
    digests = {f"shift:{name}": "" for name in dataset.shifts}
    for name, split in splits.items():
        tensors = [split.x] if split.y is None else [split.x, split.y]
        digests[name] = "-".join(tensor_digest(tensor)[:16] for tensor in tensors)
    return {"epochs": len(getattr(run, "history", ())), "digests": digests}


def is_current(found: Evaluation | None, run: Any, dataset: Dataset) -> bool:
    """It is about these data and these weights, and complete enough to draw a page from."""
    if found is None or not found.samples:
        return False
    facts, wanted = found.scores["data"], made_from(run, dataset)
    return all(facts.get(key) == value for key, value in wanted.items())


def load_evaluation(folder: Path | str) -> Evaluation | None:
    """What `assess` left in the folder of a run, or None when it has not been there.

    Samples are large: where they have been taken away, or left behind on another machine, the
    scores remain.
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
        raise CheckpointCorrupt(f"{path} holds other values than scores; evaluate the run again")
    return {"data": found["data"], **numbers}


def _numbers(value: Any) -> Any:
    """Numbers as floats; null, which stands for a number that is not finite, as NaN."""
    if isinstance(value, Mapping):
        return {key: _numbers(entry) for key, entry in value.items()}
    return math.nan if value is None else float(value)

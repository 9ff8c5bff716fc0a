"""The runs of a page: loaded, labelled, and grouped by their settings."""

import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor

from shoal.analysis.evidence import Evidence, kept_evidence, load_evidence
from shoal.analysis.landscape.scene import AnalysisResult
from shoal.analysis.landscape.study import kept_study, load_study
from shoal.core.display.text import counted, flat, plain
from shoal.core.errors import ConfigError
from shoal.evaluation.evaluate import Evaluation, kept_evaluation, load_evaluation
from shoal.experiment.variants import Variant, variant_of, word_of
from shoal.training.folder.calibration import calibration_note, read_calibration
from shoal.training.folder.choice import Choice
from shoal.training.folder.history import read_history
from shoal.training.folder.own_data import OWN_DATA, data_name, what_to_type
from shoal.training.folder.run import RunFolder, is_adopted
from shoal.training.folder.run_folder import DRAWS

__all__ = [
    "ReportData",
    "RunRecord",
    "SeedGroup",
    "flat",
    "load_report_data",
    "plain",
    "shown_path",
]

T = TypeVar("T")

_OWN = {"method", "legacy", "calibrated", "strength", "members", "seed", "init_seed", "engine"}
_ASKED = "asked"
_FORMS = ("legacy", "calibrated")


@dataclass(frozen=True, eq=False)
class RunRecord:
    """One run, without its weights.

    Attributes:
        name: the folder's name, or the seed for a run without a folder.
        config: every setting.
        history: one row per epoch.
        notes: messages of the training.
        provenance: versions, device, data digest, wall time.
        assessment: the evaluation, None where the run is not evaluated.
        folder: the run's folder, None where there is none.
        evidence: the result of `shoal evidence`, or None.
        shared: the form that all runs of a page share; labels do not repeat it.
        landscape: results of `shoal landscape`, by the name of the analysis.
        choice: how method or strength was chosen, None where the user named both.
    """

    name: str
    config: Mapping[str, Any]
    history: list[dict[str, Any]]
    notes: list[str]
    provenance: Mapping[str, Any]
    assessment: Evaluation | None
    folder: Path | None = None
    evidence: Evidence | None = None
    shared: str | None = None
    landscape: Mapping[str, AnalysisResult] = field(default_factory=dict)
    choice: Choice | None = None

    @property
    def warnings(self) -> list[str]:
        """The warnings of the training, which are notes too; older runs do not tell them apart."""
        return list(self.provenance.get("warnings") or [])

    @property
    def method(self) -> str:
        """The method's label: name, strength where it is not 1, and form.

        Runs whose method or strength was chosen keep the word that asked for it, such as
        "kde:auto": seeds of one search may choose differently.
        """
        if self.asked:
            return self._labelled("", self.asked_for.label)
        strength = 1.0 if self.plain else float(self.config.get("strength") or 1.0)
        return self._labelled("" if strength == 1.0 else f":{strength:g}")

    @property
    def family(self) -> str:
        """The method's label without the strength."""
        return self.method if self.asked else self._labelled("")

    @property
    def asked_for(self) -> Variant:
        """The variant of a search, such as "kde:auto"."""
        return variant_of(self.asked.get("method"), self.asked.get("strength"))

    @property
    def asked(self) -> Mapping[str, Any]:
        """What a search was asked for: method, and strength; empty without a search."""
        return self.config.get(_ASKED) or {}

    @property
    def plain(self) -> bool:
        """Whether the user asked for a plain ensemble; draws of its members are none."""
        alone = self.config.get("method") == "ensemble" and not self.asked
        return alone and DRAWS not in self.config

    @property
    def adopted(self) -> bool:
        """Whether the members were trained elsewhere, so that their training is not known."""
        return is_adopted(self.config)

    @property
    def form(self) -> str | None:
        """The variant of the method: "legacy", "calibrated" or None."""
        return next((form for form in _FORMS if self.config.get(form)), None)

    @property
    def settings(self) -> dict[str, str]:
        """The settings as text, without those that the label or the group says."""
        words = flat(plain({k: v for k, v in self.config.items() if k != _ASKED}))
        return {key: word for key, word in words.items() if key not in _OWN}

    def _labelled(self, strength: str, name: str | None = None) -> str:
        method = self.config.get("method", "custom")
        name = name or (method if isinstance(method, str) else _typed(method))
        form = f" ({self.form})" if self.form not in (None, self.shared) else ""
        drawn = " draws" if DRAWS in self.config else ""
        return f"{name}{strength}{form}{drawn}"

    @property
    def members(self) -> int:
        """Ensemble size."""
        return int(self.config.get("members", 0))

    @property
    def trained(self) -> dict[str, Any]:
        """The settings of the training; of draws, of the run at whose members the chains begin."""
        config = dict(self.config)
        table = config.pop(DRAWS, None)
        if table is not None:
            count = table["draws"]
            models = [each | {"members": each["members"] // count} for each in config["model"]]
            config |= {"members": table["chains"], "model": models}
        return config

    @property
    def many(self) -> str:
        """The ensemble size in words: "5 members", or "3 chains of 40" draws."""
        if (table := self.config.get(DRAWS)) is not None:
            return f"{counted(table['chains'], 'chain')} of {table['draws']:,}"
        return counted(self.members, "member")

    @property
    def seed(self) -> Any:
        """The seed of the training; adopted networks have none, and their name pairs with none."""
        return self.config.get("seed", self.name if self.adopted else 0)

    @property
    def data(self) -> str:
        """Name of the data set; without one, the name of the evaluated data."""
        name = data_name(self.config)
        if name != OWN_DATA or self.assessment is None:
            return name
        return str(self.assessment.scores["data"].get("name") or name)

    def to_do(self, command: str) -> str:
        """What to type to run a command on this run: a command line, or a Python call."""
        where = None if self.folder is None else shown_path(self.folder)
        return what_to_type(command, self.config, where)

    def confidences(self) -> tuple[Tensor, Tensor] | None:
        """Confidence of every test prediction and whether it is correct; None if not stored."""
        samples = {} if self.assessment is None else self.assessment.split_samples("test")
        if not {"confidence", "prediction", "label"} <= samples.keys():
            return None
        return samples["confidence"].double(), samples["prediction"] == samples["label"]

    @property
    def ratio(self) -> float:
        """Force ratio, push / drive: the median over the epochs."""
        ratios = sorted(r for row in self.history if (r := row.get("ratio")) is not None)
        return ratios[len(ratios) // 2] if ratios else math.nan


@dataclass(frozen=True, eq=False)
class SeedGroup:
    """Runs that differ only in their seed.

    Attributes:
        label: method, and the settings that other groups do not share.
        entries: at least one.
    """

    label: str
    entries: list[RunRecord]

    @property
    def first(self) -> RunRecord:
        """The run that represents the group."""
        return self.entries[0]

    @property
    def members(self) -> int:
        """Ensemble size."""
        return self.first.members

    def values(self, of: Callable[[RunRecord], float]) -> dict[Any, float]:
        """A number of each run by seed, where it is not NaN."""
        by_seed = {record.seed: of(record) for record in self.entries}
        return {seed: value for seed, value in by_seed.items() if not math.isnan(value)}


@dataclass(frozen=True, eq=False)
class ReportData:
    """The runs of a page.

    Attributes:
        entries: all runs, in the given order.
        groups: the evaluated runs, grouped by settings.
        title: title of the page, or None.
        margins: margins of equality that the user gave, by metric.
    """

    entries: list[RunRecord]
    groups: list[SeedGroup] = field(default_factory=list)
    title: str | None = None
    margins: Mapping[str, float] = field(default_factory=dict)

    @property
    def lead(self) -> SeedGroup:
        """The page's subject: the method of the first evaluated run, with most members."""
        first = next(record for record in self.entries if record.assessment is not None)
        label = next(group.label for group in self.groups if first in group.entries)
        same = [group for group in self.groups if group.label == label]
        return max(same, key=lambda group: group.members)

    @property
    def subject(self) -> RunRecord:
        """The run that represents the page: the lead's, or the first where none is evaluated."""
        return self.lead.first if self.groups else self.entries[0]

    @property
    def assessment(self) -> Evaluation:
        """The evaluation of the first run of the lead."""
        evaluation = self.lead.first.assessment if self.groups else None
        if evaluation is None:
            typed = self.entries[0].to_do("evaluate")
            raise ConfigError(f"none of the runs was evaluated; type: {typed}")
        return evaluation

    @property
    def not_evaluated(self) -> list[RunRecord]:
        """Runs without an evaluation."""
        return [record for record in self.entries if record.assessment is None]

    def peers(self) -> dict[str, SeedGroup]:
        """One group per method, of the ensemble size nearest to the lead's."""
        size, chosen = self.lead.members, {}
        for group in self.groups:
            known = chosen.get(group.label)
            if known is None or _distance(group, size) < _distance(known, size):
                chosen[group.label] = group
        return chosen

    def of_peers(self, read: Callable[[Evaluation], T | None]) -> dict[str, T]:
        """What `read` returns for the first evaluation of each method, where it is not None."""
        evaluations = {label: group.first.assessment for label, group in self.peers().items()}
        values = {label: read(each) for label, each in evaluations.items() if each is not None}
        return {label: value for label, value in values.items() if value is not None}

    def class_names(self, count: int) -> list[str]:
        """Names of this many classes: those that are known, and numbers for the others."""
        known = self.assessment.scores["data"].get("classes") or []
        return [*known[:count], *map(str, range(len(known), count))]

    @property
    def sizes(self) -> list[int]:
        """Ensemble sizes, ascending."""
        return sorted({group.members for group in self.groups})


def _distance(group: SeedGroup, size: int) -> tuple[int, int]:
    return abs(group.members - size), -group.members


def load_report_data(
    runs: Iterable[Any], title: str | None = None, classes: Sequence[str] | None = None
) -> ReportData:
    """Load runs (a run, its folder, or a pair of run and evaluation) and group them.

    Args:
        runs: at least one.
        title: heading of the page.
        classes: names of the classes, in place of those that the evaluations have.

    Raises:
        ConfigError: There are no runs, or they use different data.
    """
    records = [_record(run) for run in runs]
    if classes is not None:
        records = [_renamed(record, classes) for record in records]
    if not records:
        raise ConfigError("a page needs at least one run; type: shoal report RUN")
    names = sorted({record.data for record in records})
    if len(names) > 1:
        raise ConfigError(
            f"a page shows one data set, but these runs use {' and '.join(names)}; "
            f"make a page for each"
        )
    forms = {record.form for record in records}
    if len(records) > 1 and len(forms) == 1:
        records = [replace(record, shared=record.form) for record in records]
    return ReportData(records, _groups([e for e in records if e.assessment is not None]), title)


def _record(run: Any) -> RunRecord:
    if isinstance(run, str | os.PathLike):
        return _opened(Path(run))
    run, evaluation = run if isinstance(run, tuple) else (run, None)
    if not hasattr(run, "config") or not hasattr(run, "history"):
        raise ConfigError(f"a page needs runs or their folders, not {type(run).__name__}")
    folder, config = getattr(run, "folder", None), run.config
    unnamed = "adopted networks" if is_adopted(config) else f"seed {config.get('seed', 0)}"
    return RunRecord(
        name=unnamed if folder is None else Path(folder).name,
        config=config,
        history=list(run.history),
        notes=list(getattr(run, "notes", [])),
        provenance=dict(run.provenance),
        assessment=kept_evaluation(run) if evaluation is None else evaluation,
        folder=None if folder is None else Path(folder),
        evidence=kept_evidence(run),
        landscape=kept_study(run),
        choice=getattr(run, "choice", None),
    )


def _renamed(record: RunRecord, classes: Sequence[str]) -> RunRecord:
    """The run, with these names of its classes."""
    if record.assessment is None:
        return record
    if not record.assessment.about.has_classes:
        raise ConfigError(f"the targets of {record.name} are numbers; leave out classes")
    labels = record.assessment.samples.get("test/label")
    names, seen = tuple(map(str, classes)), 0 if labels is None else int(labels.max()) + 1
    if isinstance(classes, str) or len(names) < max(seen, 2):
        raise ConfigError(
            f"classes holds {'one text' if isinstance(classes, str) else f'{len(names)} names'}, "
            f"but the test set has {max(seen, 2)} classes; type classes=['first', 'second', ...]"
        )
    scores = record.assessment.scores
    scores = scores | {"data": scores["data"] | {"classes": list(names)}}
    return replace(record, assessment=replace(record.assessment, scores=scores))


def _opened(folder: Path) -> RunRecord:
    """From the files alone: a page needs neither weights nor the user's network."""
    files = RunFolder(folder)
    config, provenance = files.config(), files.provenance()
    notes, calibrated = provenance.pop("notes", []), read_calibration(folder)
    return RunRecord(
        name=folder.resolve().name,
        config=config,
        history=read_history(folder / "history.jsonl"),
        notes=notes + ([calibration_note(calibrated)] if calibrated else []),
        provenance=provenance,
        assessment=load_evaluation(folder),
        folder=folder,
        evidence=load_evidence(folder),
        landscape=load_study(folder),
        choice=files.choice(),
    )


def shown_path(folder: Path) -> Path:
    """A folder as a path to type in the current directory."""
    whole = folder.resolve()
    here = Path.cwd()
    return whole.relative_to(here) if whole.is_relative_to(here) and whole != here else whole


def _groups(records: list[RunRecord]) -> list[SeedGroup]:
    """Runs with equal settings except the seed; other differences enter the label."""
    settings = [record.settings for record in records]
    varying = _varying(records, settings)
    several = sum(record.adopted for record in records) > 1
    members_of: dict[tuple[str, int], list[RunRecord]] = {}
    for record, setting in zip(records, settings, strict=True):
        known = {key: setting.get(key, "none") for key in varying[record.method]}
        extra = ", ".join(f"{k} {word}" for k, word in known.items())
        if record.adopted and several:
            extra = record.name  # each is an ensemble of its own, not a seed of another
        label = f"{record.method} ({extra})" if extra else record.method
        members_of.setdefault((label, record.members), []).append(record)
    order = list(dict.fromkeys(label for label, _ in members_of))
    groups = sorted(members_of, key=lambda key: (order.index(key[0]), key[1]))
    return [SeedGroup(label, members_of[label, members]) for label, members in groups]


def _varying(records: list[RunRecord], settings: list[dict[str, str]]) -> dict[str, list[str]]:
    """For each method, the settings that its runs do not share."""
    same: dict[str, list[dict[str, str]]] = {}
    for record, setting in zip(records, settings, strict=True):
        same.setdefault(record.method, []).append(setting)
    return {
        method: [key for key in sorted(set().union(*runs)) if len({r.get(key) for r in runs}) > 1]
        for method, runs in same.items()
    }


def _typed(method: Mapping[str, Any]) -> str:
    """A method as it is typed, with its changed settings; a composition is "custom"."""
    name = method.get("name")
    if name in (None, "repulsion"):
        return "custom"
    return word_of(str(name), {key: value for key, value in method.items() if key != "name"})

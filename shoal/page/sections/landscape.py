"""What lies between the members? Paths, planes, subspaces, trajectories and curvature."""

import math
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from torch import Tensor

from shoal import plots
from shoal.analysis.landscape.scene import AnalysisResult
from shoal.page.blocks import Block, Fold, Picture, Remark, Section, section
from shoal.page.findings import finding
from shoal.page.report_data import ReportData, RunRecord
from shoal.prediction.statistics import mean_and_error

__all__ = ["between"]

_FIRST = ("tunnel", "diversity", "line", "functions", "trajectories", "averaging", "curvature")

Study = Mapping[str, AnalysisResult]


@section("landscape", order=55, judged=False)
def between(story: ReportData) -> Section | None:
    """The landscape of the first run that has been looked at, and what all of them compare."""
    studies = {entry: entry.landscape for entry in story.entries if entry.landscape}
    if not studies:
        return None
    entry, study = next(iter(studies.items()))
    sound = {name: part for name, part in study.items() if "missing" not in part.scores}
    if not sound:
        return None
    unlike = LABELS if _classifies(entry) else NUMBERS
    blocks: list[Block] = [*_paths(sound, unlike), *_diversity(sound), *_planes(sound, unlike)]
    blocks += [*_trajectories(sound, unlike), *_averaging(sound)]
    blocks += _compared(_grouped(story, studies))
    notes = [Remark(f"{n}: {finding(n, part, unlike.share)}") for n, part in study.items()]
    blocks.append(Fold(f"Every finding about {entry.name}", notes))
    leading = next(name for name in (*_FIRST, *sound) if name in sound)
    told = finding(leading, sound[leading], unlike.share)
    return Section("What lies between the members?", told, blocks)


class Unlike(NamedTuple):
    """How the difference of two functions is called."""

    share: bool
    words: str
    noun: str

    @property
    def axis(self) -> str:
        return f"{self.words} (%)" if self.share else self.words

    @property
    def from_one(self) -> str:
        return f"difference from member 1{' (% of labels)' if self.share else ''}"


LABELS = Unlike(True, "other labels", "the share of inputs with another label")
NUMBERS = Unlike(False, "RMS difference", "the root mean square difference of the predictions")


def _classifies(entry: RunRecord) -> bool:
    likelihood = entry.config.get("likelihood")
    name = likelihood.get("name") if isinstance(likelihood, Mapping) else likelihood
    return name in (None, "categorical")


def _parts(tensors: Mapping[str, Tensor], *keys: str) -> dict[str, tuple[Tensor, ...]]:
    """Tensors called NAME/KEY, by name."""
    names = dict.fromkeys(name.partition("/")[0] for name in tensors if "/" in name)
    return {name: tuple(tensors[f"{name}/{key}"] for key in keys) for name in names}


def _paths(study: Study, unlike: Unlike) -> Iterator[Block]:
    titles = {
        "tunnel": "A path of low loss between two members",
        "line": "The straight line between two members",
    }
    readings = {
        "tunnel": "A path was sought along which the loss stays low, after the "
        "hidden units of the second were put in the order of the first, where that is possible.",
        "line": "A hump is a barrier between the members; aligned, if it is there, is the same "
        "after the hidden units of the second were put in the order of the first.",
    }
    for name, title in titles.items():
        if name in study:
            paths = _parts(study[name].tensors, "loss", "apart")
            yield Picture(
                plots.profile(paths, unlike.words, unlike.share),  # pyright: ignore
                title,
                f"{finding(name, study[name], unlike.share)} {readings[name]} Below: {unlike.noun} "
                "on the way, from the first member (solid) and from the second (dashed).",
            )


def _diversity(study: Study) -> Iterator[Block]:
    if "diversity" in study:
        scores = study["diversity"].scores
        points = _parts(study["diversity"].tensors, "accuracy", "apart")
        yield Picture(
            plots.diversity_plane(points, scores["reference"], scores["classes"]),  # pyright: ignore
            "Diverse and accurate?",
            f"{finding('diversity', study['diversity'])} Right is accurate, up is different from "
            "one member, which lets an average cancel more errors. Small: samples around that "
            "member; stars: the other members. Nothing can lie above the hard bound.",
        )


def _planes(study: Study, unlike: Unlike) -> Iterator[Block]:
    for name, title in (
        ("origin-plane", "two members and the origin"),
        ("three-plane", "three members"),
    ):
        if name not in study:
            continue
        t, origin = study[name].tensors, name == "origin-plane"
        where = t["across"], t["up"]
        yield Picture(
            plots.surface(*where, t["loss"], t["marks"], "test loss (nats)", origin),
            f"Loss on the plane through {title}",
            "Dark is a low loss. Where a brighter ridge lies between two numbers, the straight "
            "line between those members crosses it.",
        )
        apart = 100 * t["apart"][0] if unlike.share else t["apart"][0]
        yield Picture(
            plots.surface(*where, apart, t["marks"], unlike.from_one, origin),
            f"Functions on the plane through {title}",
            "Dark is the function of member 1, bright another one. Where this is bright and the "
            "loss beside it is low, networks are as good and predict otherwise.",
        )


def _trajectories(study: Study, unlike: Unlike) -> Iterator[Block]:
    if "trajectories" not in study:
        return
    t = study["trajectories"].tensors
    yield Picture(
        plots.similarity(t["cosine"], t["owner"], "cosine of the weights"),
        "Weights along training",
        "Blocks on the diagonal are one member during training, the others compare two members. "
        "1 is the same direction, 0 nothing in common.",
    )
    yield Picture(
        plots.similarity(t["apart"], t["owner"], unlike.axis, share=unlike.share),
        "Functions along training",
        f"The same for predictions: {unlike.noun}; dark is alike. "
        f"{finding('trajectories', study['trajectories'], unlike.share)}",
    )
    yield Picture(
        plots.function_map(t["map"], t["owner"]),
        "Where training led",
        "One dot a snapshot, from the cross to the star; dots that are near predict alike. Lines "
        "that end apart are members that learned different functions.",
    )


def _averaging(study: Study) -> Iterator[Block]:
    if "averaging" not in study:
        return
    for name, table in study["averaging"].scores["parts"].items():
        curves = {
            key: plots.MetricCurve(row["modes"], row["nll"], [math.nan] * len(row["modes"]))
            for key, row in table.items()
        }
        yield Picture(
            plots.sizes(curves, "NLL"),
            f"Within a mode or between modes: {name}",
            "Lower is better. Along a line members are added; between lines lies what averaging "
            "or sampling around each of them changes.",
        )


def _grouped(
    story: ReportData, studies: Mapping[RunRecord, Study]
) -> dict[str, list[tuple[RunRecord, Study]]]:
    """Runs that differ by their seed alone, together, where they have been judged."""
    labels = {entry: group.label for group in story.groups for entry in group.entries}
    found: dict[str, list[tuple[RunRecord, Study]]] = {}
    for entry, study in studies.items():
        found.setdefault(labels.get(entry, entry.method), []).append((entry, study))
    return found


def _compared(groups: Mapping[str, list[tuple[RunRecord, Study]]]) -> Iterator[Block]:
    numbers, sharp, members = {}, {}, 1
    for label, runs in groups.items():
        scores = [study["functions"].scores for _, study in runs if "functions" in study]
        scores = [found for found in scores if "effective" in found]
        if scores:
            members = max(members, *(found["members"] for found in scores))
            numbers[label] = {
                space: mean_and_error([found["effective"][space] for found in scores])
                for space in scores[0]["effective"]
            }
        curved = [study["curvature"].tensors for _, study in runs if "curvature" in study]
        if curved and "eigenvalues" in curved[0]:
            sharp[label] = curved[0]["eigenvalues"]
    if numbers:
        yield Picture(
            plots.effective(numbers, members),
            "How many different members?",
            "1 means that all members are the same, the dotted line that all are different, in "
            "weights, features or predictions; predictions are what counts. Bars are one standard "
            "error over the seeds.",
        )
    if sharp:
        yield Picture(
            plots.curvature(sharp),
            "Flat or sharp minima",
            "One dot a member. The higher it lies, the sharper is the minimum around it.",
        )

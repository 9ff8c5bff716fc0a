"""What lies between the members? Paths, planes, subspaces, trajectories and curvature."""

import math
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from torch import Tensor

from shoal import plots
from shoal.analysis.landscape.scene import AnalysisResult
from shoal.page.blocks import Block, Figure, Fold, Remark, Section, section
from shoal.page.findings import finding
from shoal.page.report_data import ReportData, RunRecord
from shoal.prediction.statistics import mean_and_error

__all__ = ["landscape_section"]

_FIRST = ("tunnel", "diversity", "line", "functions", "trajectories", "averaging", "curvature")

Study = Mapping[str, AnalysisResult]

_MEMBER = {"solution": "member"}
"""Stored names of curves, as the figures show them."""


@section("landscape", order=55, evaluated=False)
def landscape_section(report_data: ReportData) -> Section | None:
    """The landscape of the first analysed run, and a comparison of all analysed runs."""
    studies = {record: record.landscape for record in report_data.entries if record.landscape}
    if not studies:
        return None
    record, study = next(iter(studies.items()))
    computed = {name: result for name, result in study.items() if "missing" not in result.scores}
    if not computed:
        return None
    difference = LABELS if _classifies(record) else NUMBERS
    blocks: list[Block] = [
        *_paths(computed, difference),
        *_diversity(computed),
        *_planes(computed, difference),
    ]
    blocks += [*_trajectories(computed, difference), *_averaging(computed)]
    blocks += _compared(_grouped(report_data, studies))
    notes = [Remark(f"{n}: {finding(n, result, difference.share)}") for n, result in study.items()]
    blocks.append(Fold(f"All results of {record.name}", notes))
    leading = next(name for name in (*_FIRST, *computed) if name in computed)
    answer = finding(leading, computed[leading], difference.share)
    return Section("What lies between the members?", answer, blocks)


class Difference(NamedTuple):
    """The words for the difference of two functions."""

    share: bool
    words: str
    noun: str

    @property
    def axis(self) -> str:
        return f"{self.words} (%)" if self.share else self.words

    @property
    def from_one(self) -> str:
        return f"difference from member 1{' (% of labels)' if self.share else ''}"


LABELS = Difference(True, "disagreement", "the share of inputs with different labels")
NUMBERS = Difference(False, "RMS difference", "the root mean square difference of the predictions")


def _classifies(record: RunRecord) -> bool:
    likelihood = record.config.get("likelihood")
    name = likelihood.get("name") if isinstance(likelihood, Mapping) else likelihood
    return name in (None, "categorical")


def _parts(tensors: Mapping[str, Tensor], *keys: str) -> dict[str, tuple[Tensor, ...]]:
    """Tensors called NAME/KEY, by name."""
    names = dict.fromkeys(name.partition("/")[0] for name in tensors if "/" in name)
    return {name: tuple(tensors[f"{name}/{key}"] for key in keys) for name in names}


def _paths(study: Study, difference: Difference) -> Iterator[Block]:
    titles = {
        "tunnel": "Low-loss tunnel between two members",
        "line": "Straight line between two members",
    }
    readings = {
        "tunnel": "The path is optimised for a low loss, where possible after matching the hidden "
        "units of the two members.",
        "line": "A maximum between the ends is a loss barrier. Aligned: the line after matching "
        "the hidden units of the two members.",
    }
    for name, title in titles.items():
        if name in study:
            paths = _parts(study[name].tensors, "loss", "apart")
            yield Figure(
                plots.profile(paths, difference.words, difference.share),  # pyright: ignore
                title,
                f"{finding(name, study[name], difference.share)} {readings[name]} Below: "
                f"{difference.noun} along the path, from the first member (solid) and the second "
                "(dashed).",
            )


def _diversity(study: Study) -> Iterator[Block]:
    if "diversity" in study:
        scores = study["diversity"].scores
        points = _parts(study["diversity"].tensors, "accuracy", "apart")
        yield Figure(
            plots.diversity_plane(points, scores["reference"], scores["classes"]),  # pyright: ignore
            "Diverse and accurate?",
            f"{finding('diversity', study['diversity'])} Small markers: samples around one "
            "member. Stars: the other members. An average cancels more errors of diverse "
            "functions. No function can lie above the hard bound.",
        )


def _planes(study: Study, difference: Difference) -> Iterator[Block]:
    for name, title in (
        ("origin-plane", "two members and the origin"),
        ("three-plane", "three members"),
    ):
        if name not in study:
            continue
        t, origin = study[name].tensors, name == "origin-plane"
        across, up = t["across"], t["up"]
        yield Figure(
            plots.surface(across, up, t["loss"], t["marks"], "test loss (nats)", origin),
            f"Loss on the plane through {title}",
            "Dark means low loss. A brighter region between two numbers is a loss barrier on the "
            "straight line between these members.",
        )
        apart = 100 * t["apart"][0] if difference.share else t["apart"][0]
        yield Figure(
            plots.surface(across, up, apart, t["marks"], difference.from_one, origin),
            f"Functions on the plane through {title}",
            "Dark means the predictions of member 1, bright means other predictions. Where this "
            "map is bright and the loss low, networks have equal loss, other predictions.",
        )


def _trajectories(study: Study, difference: Difference) -> Iterator[Block]:
    if "trajectories" not in study:
        return
    t = study["trajectories"].tensors
    yield Figure(
        plots.similarity(t["cosine"], t["owner"], "cosine of the weights"),
        "Weights along training",
        "Diagonal blocks compare snapshots of one member, the other blocks compare two members. "
        "1 means the same direction, 0 orthogonal weights.",
    )
    yield Figure(
        plots.similarity(t["apart"], t["owner"], difference.axis, share=difference.share),
        "Functions along training",
        f"Predictions of the snapshots: {difference.noun}. Dark means similar. "
        f"{finding('trajectories', study['trajectories'], difference.share)}",
    )
    yield Figure(
        plots.function_map(t["map"], t["owner"]),
        "Training trajectories in function space",
        "One dot per snapshot, from the cross (start) to the star (end). Near dots have similar "
        "predictions. Distant stars are members that learned different functions.",
    )


def _averaging(study: Study) -> Iterator[Block]:
    if "averaging" not in study:
        return
    for name, table in study["averaging"].scores["parts"].items():
        curves = {
            str(_MEMBER.get(key, key)): plots.MetricCurve(
                row["modes"], row["nll"], [math.nan] * len(row["modes"])
            )
            for key, row in table.items()
        }
        yield Figure(
            plots.sizes(curves, "NLL"),
            f"Averaging within and between modes: {name}",
            "Lower is better. Each line adds modes from left to right. The lines differ in the "
            "average or samples used within each mode.",
        )


def _grouped(
    report_data: ReportData, studies: Mapping[RunRecord, Study]
) -> dict[str, list[tuple[RunRecord, Study]]]:
    """Runs that differ only in their seed, together, where they are evaluated."""
    labels = {record: group.label for group in report_data.groups for record in group.entries}
    groups: dict[str, list[tuple[RunRecord, Study]]] = {}
    for record, study in studies.items():
        groups.setdefault(labels.get(record, record.method), []).append((record, study))
    return groups


def _compared(groups: Mapping[str, list[tuple[RunRecord, Study]]]) -> Iterator[Block]:
    numbers, sharp, members = {}, {}, 1
    for label, runs in groups.items():
        scores = [study["functions"].scores for _, study in runs if "functions" in study]
        scores = [each for each in scores if "effective" in each]
        if scores:
            members = max(members, *(each["members"] for each in scores))
            numbers[label] = {
                space: mean_and_error([each["effective"][space] for each in scores])
                for space in scores[0]["effective"]
            }
        curved = [study["curvature"].tensors for _, study in runs if "curvature" in study]
        if curved and "eigenvalues" in curved[0]:
            sharp[label] = curved[0]["eigenvalues"]
    if numbers:
        yield Figure(
            plots.effective(numbers, members),
            "Effective number of members",
            "1 means that all members are equal; the dotted line means that all are different. "
            "The row of predictions is the effective number of functions. Bars are one standard "
            "error over the seeds.",
        )
    if sharp:
        yield Figure(
            plots.curvature(sharp),
            "Largest Hessian eigenvalues",
            "One dot per member. A high dot means a sharp minimum.",
        )

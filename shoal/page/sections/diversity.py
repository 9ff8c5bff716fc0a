"""Do the members differ? Pairwise disagreement, and diversity against accuracy."""

from collections.abc import Iterator

from torch import Tensor

from shoal import plots
from shoal.core.display.text import percent
from shoal.page import sentences
from shoal.page.blocks import Block, Figure, Section, rest_folded, section
from shoal.page.measures import Measure
from shoal.page.report_data import ReportData
from shoal.prediction.metrics.similarity import COMPARED

__all__ = ["diversity_section"]

_PAIRS = "test/pairwise"
_AFFINITY = "test/affinity"
_GRADIENTS = "test/gradient_similarity"


@section("diversity", order=50)
def diversity_section(report_data: ReportData) -> Section | None:
    """Differences between the members."""
    if report_data.lead.members < 2:
        return None
    blocks = [
        *rest_folded(_pairwise(report_data), "Pairwise disagreement of the other methods"),
        *rest_folded(_distances(report_data), "Distance of predictions of the other methods"),
        *_members(report_data),
        *rest_folded(_gradients(report_data), "Input gradients of the other methods"),
        *_attention(report_data),
    ]
    return Section("Do the members differ?", answer(report_data), blocks) if blocks else None


def answer(report_data: ReportData) -> str:
    """Mean pairwise disagreement, beside the mean error rate of a member."""
    pairs = report_data.assessment.samples.get(_PAIRS)
    accuracy = report_data.assessment.samples.get("test/member_accuracy")
    if pairs is None or accuracy is None or len(pairs) < 2:
        effective, _ = Measure("effective_functions").summary(report_data.lead)
        return sentences.members_sentence(report_data.lead.members, effective, {})
    disagreement, error = float(_others(pairs).mean()), 1 - float(accuracy.mean())
    return (
        f"Two members predict different labels for {percent(disagreement)} of the test inputs. "
        f"The mean error rate of one member is {percent(error)}."
    )


def _others(matrix: Tensor) -> Tensor:
    """Mean over the other members [M]."""
    M = len(matrix)
    return (matrix.sum(-1) - matrix.diagonal()) / (M - 1)


def _kept(report_data: ReportData, key: str) -> dict[str, Tensor]:
    """A matrix of every method that has one."""
    return report_data.of_peers(lambda evaluation: evaluation.samples.get(key))


def _chosen(report_data: ReportData, matrix: Tensor) -> str:
    """Which members a matrix compares, if not all."""
    total = report_data.lead.members
    if len(matrix) != COMPARED or total <= COMPARED:
        return ""
    return f" {COMPARED} of the {total:,} members are compared, evenly spaced."


def _pairwise(report_data: ReportData) -> Iterator[Figure]:
    labels = _kept(report_data, _PAIRS)
    top = max((float(matrix.max()) for matrix in labels.values()), default=0.0)
    for label, matrix in labels.items():
        yield Figure(
            plots.pairwise(matrix, top=top),
            f"Pairwise disagreement: {label}",
            "Bright pairs disagree often. Members in a dark block predict almost the same labels."
            + _chosen(report_data, matrix),
        )


def _distances(report_data: ReportData) -> Iterator[Figure]:
    distances = {label: 1 - kept for label, kept in _kept(report_data, _AFFINITY).items()}
    top = max((float(matrix.max()) for matrix in distances.values()), default=0.0)
    for label, matrix in distances.items():
        yield Figure(
            plots.pairwise(matrix, "distance of predictions (%)", top),
            f"Distance of predictions: {label}",
            "0 % means equal predictions, 100 % means predictions without overlap. "
            "Members in a dark block predict almost the same." + _chosen(report_data, matrix),
        )


def _members(report_data: ReportData) -> Iterator[Block]:
    points = {}
    for label, group in report_data.peers().items():
        samples = group.first.assessment.samples if group.first.assessment else {}
        pairs, accuracy = samples.get(_PAIRS), samples.get("test/member_accuracy")
        if pairs is None or accuracy is None or len(pairs) < 2:
            continue
        if bool((accuracy < 1).any()):
            points[label] = (accuracy, _others(pairs))
    if points:
        yield Figure(
            plots.members(points),
            "Diversity against accuracy",
            "One dot per member; diverse and accurate members lie at the top right. On the dotted "
            "line, disagreement with the other members equals the error rate.",
        )


def _gradients(report_data: ReportData) -> Iterator[Figure]:
    for label, matrix in _kept(report_data, _GRADIENTS).items():
        if len(matrix) > 1:
            mean = float(_others(matrix).mean())
            yield Figure(
                plots.pairwise(matrix.clamp(min=0), "cosine of input gradients (%)", 1.0),
                f"Similarity of input gradients: {label}",
                f"Members of a bright pair use the same input features. 0 % means no common "
                f"features, 100 % the same features. The mean is {percent(mean)}."
                + _chosen(report_data, matrix),
            )


def _attention(report_data: ReportData) -> Iterator[Block]:
    kept = report_data.assessment.split_samples("attention")
    if "images" not in kept:
        return
    depths = [f"{int(h)}x{int(w)}" for h, w in kept["sides"]]
    diversity = dict(zip(depths, kept["diversity"].tolist(), strict=True))
    for index, image in enumerate(kept["images"]):
        maps = {depth: kept[depth][:, index] for depth in depths}
        yield Figure(
            plots.attention(image, maps, diversity),
            f"Class-activation maps: test image {index + 1}",
            "One column per member, one row per network depth. Bright pixels support the true "
            "class. The number of a row is the diversity of the maps over all images: 0 for equal "
            "maps, 1 for maps without overlap.",
        )

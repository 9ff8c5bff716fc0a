"""Do the members differ? Different labels of every pair, diversity against accuracy."""

from collections.abc import Iterator

from torch import Tensor

from shoal import plots
from shoal.core.text import percent
from shoal.page import sentences
from shoal.page.blocks import Block, Picture, Section, section
from shoal.page.measures import Measure
from shoal.page.report_data import ReportData

__all__ = ["differ"]

_PANELS = 4
_PAIRS = "test/pairwise"
_ALIKE = "test/affinity"
_GRADIENTS = "test/gradient_similarity"


@section("diversity", order=50)
def differ(story: ReportData) -> Section | None:
    """How alike the members are."""
    if story.lead.members < 2:
        return None
    blocks = [*_matrices(story), *_members(story), *_features(story), *_attention(story)]
    return Section("Do the members differ?", answer(story), blocks) if blocks else None


def answer(story: ReportData) -> str:
    """Mean disagreement of two members, beside the mean error of one."""
    pairs = story.assessment.samples.get(_PAIRS)
    right = story.assessment.samples.get("test/member_accuracy")
    if pairs is None or right is None or len(pairs) < 2:
        effective, _ = Measure("effective_functions").summary(story.lead)
        return sentences.members_sentence(story.lead.members, effective, {})
    apart, wrong = float(_others(pairs).mean()), 1 - float(right.mean())
    return (
        f"Two members choose different labels for {percent(apart)} of the test inputs; "
        f"one alone is wrong on {percent(wrong)}."
    )


def _others(matrix: Tensor) -> Tensor:
    """Mean over the other members [M]."""
    M = len(matrix)
    return (matrix.sum(-1) - matrix.diagonal()) / (M - 1)


def _matrices(story: ReportData) -> Iterator[Block]:
    found = {
        label: group.first.assessment.samples
        for label, group in list(story.peers().items())[:_PANELS]
        if group.first.assessment is not None
    }
    labels = {label: kept[_PAIRS] for label, kept in found.items() if _PAIRS in kept}
    for label, matrix in labels.items():
        top = max(float(other.max()) for other in labels.values())
        yield Picture(
            plots.pairwise(matrix, top=top),
            f"Different labels: {label}",
            "Bright pairs disagree often. A dark block is a group of members that act as one.",
        )
    apart = {label: 1 - kept[_ALIKE] for label, kept in found.items() if _ALIKE in kept}
    for label, matrix in apart.items():
        top = max(float(other.max()) for other in apart.values())
        yield Picture(
            plots.pairwise(matrix, "distance of predictions (%)", top),
            f"Distance of predictions: {label}",
            "0 is the same prediction everywhere, 100 predictions that exclude each other. "
            "A dark block is a group of members that act as one.",
        )


def _members(story: ReportData) -> Iterator[Block]:
    points = {}
    for label, group in story.peers().items():
        samples = group.first.assessment.samples if group.first.assessment else {}
        pairs, right = samples.get(_PAIRS), samples.get("test/member_accuracy")
        if pairs is not None and right is not None and len(pairs) > 1 and bool((right < 1).any()):
            points[label] = (right, _others(pairs))
    if points:
        yield Picture(
            plots.members(points),
            "Diversity against accuracy",
            "One dot a member; up and to the right is what a good ensemble wants. On the dotted "
            "line a member differs from the others as often as it errs.",
        )


def _features(story: ReportData) -> Iterator[Block]:
    for label, group in list(story.peers().items())[:_PANELS]:
        samples = group.first.assessment.samples if group.first.assessment else {}
        matrix = samples.get(_GRADIENTS)
        if matrix is not None and len(matrix) > 1:
            mean = float(_others(matrix).mean())
            yield Picture(
                plots.pairwise(matrix.clamp(min=0), "cosine of input gradients (%)", 1.0),
                f"Features in common: {label}",
                f"Two members use the same pixels or columns of an input where this is bright; "
                f"0 is nothing in common, 100 the same features. The mean is {percent(mean)}.",
            )


def _attention(story: ReportData) -> Iterator[Block]:
    kept = story.assessment.split_samples("attention")
    if "images" not in kept:
        return
    depths = [f"{int(h)}x{int(w)}" for h, w in kept["sides"]]
    spread = dict(zip(depths, kept["diversity"].tolist(), strict=True))
    for index, image in enumerate(kept["images"]):
        maps = {depth: kept[depth][:, index] for depth in depths}
        yield Picture(
            plots.attention(image, maps, spread),
            f"Where the members look: test image {index + 1}",
            "One column a member, one row a depth of the network, bright where the true class was "
            "seen. The number of a row is 0 if all members look at the same places on all images, "
            "1 if they share none.",
        )

"""What lies between the members? Paths, planes, subspaces, trajectories and curvature."""

import math
from collections.abc import Iterator, Mapping

from torch import Tensor

from shoal import plots
from shoal.analysis.landscape.study import Part, load_study
from shoal.app.blocks import Block, Fold, Picture, Remark, Section, section
from shoal.app.findings import finding
from shoal.app.story import Entry, Story
from shoal.prediction.statistics import mean_and_error

__all__ = ["between"]

_FIRST = ("tunnel", "diversity", "line", "functions", "trajectories", "averaging", "curvature")
_SHIFTS = 3

Study = Mapping[str, Part]


@section("landscape", order=55, judged=False)
def between(story: Story) -> Section | None:
    """The landscape of the first run that has been looked at, and what all of them compare."""
    studies = {entry: load_study(entry.folder) for entry in story.entries if entry.folder}
    studies = {entry: found for entry, found in studies.items() if found}
    if not studies:
        return None
    entry, study = next(iter(studies.items()))
    sound = {name: part for name, part in study.items() if "missing" not in part.scores}
    if not sound:
        return None
    blocks: list[Block] = [*_paths(sound), *_diversity(sound), *_planes(sound)]
    blocks += [*_trajectories(sound), *_averaging(sound), *_compared(_grouped(story, studies))]
    notes = [Remark(f"{n}: {finding(n, part)}") for n, part in study.items()]
    blocks.append(Fold(f"Every finding about {entry.name}", notes))
    leading = next(name for name in (*_FIRST, *sound) if name in sound)
    return Section("What lies between the members?", finding(leading, sound[leading]), blocks)


def _parts(tensors: Mapping[str, Tensor], *keys: str) -> dict[str, tuple[Tensor, ...]]:
    """Tensors called NAME/KEY, by name."""
    names = dict.fromkeys(name.partition("/")[0] for name in tensors if "/" in name)
    return {name: tuple(tensors[f"{name}/{key}"] for key in keys) for name in names}


def _paths(study: Study) -> Iterator[Block]:
    titles = {
        "tunnel": "Equal loss, other functions",
        "line": "The straight line between two members",
    }
    readings = {
        "tunnel": "Above: the loss stays as low as at the two members. Below: meanwhile the labels "
        "change, away from the first member (solid) and towards the second (dashed).",
        "line": "Between two members the loss rises and falls again; with hidden units matched "
        "(aligned) less of the barrier, or none, is left.",
    }
    for name, title in titles.items():
        if name in study:
            paths = _parts(study[name].tensors, "loss", "apart")
            yield Picture(plots.profile(paths), title, readings[name])  # pyright: ignore


def _diversity(study: Study) -> Iterator[Block]:
    if "diversity" in study:
        scores = study["diversity"].scores
        points = _parts(study["diversity"].tensors, "accuracy", "apart")
        yield Picture(
            plots.diversity_plane(points, scores["reference"], scores["classes"]),  # pyright: ignore
            "Diverse and accurate?",
            "Accurate functions (right) have little bias, different ones (up) let an average "
            "cancel more variance. Samples around one member (small) buy difference with errors; "
            "other members (stars) differ at full accuracy. Nothing can lie above the hard bound.",
        )


def _planes(study: Study) -> Iterator[Block]:
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
            "Dark valleys are good networks. Members lie in valleys with a ridge between them.",
        )
        yield Picture(
            plots.surface(*where, t["apart"][0], t["marks"], "difference from member 1", origin),
            f"Functions on the plane through {title}",
            "Dark is the function of member 1. The other valleys are bright: as good, but another "
            "function.",
        )


def _trajectories(study: Study) -> Iterator[Block]:
    if "trajectories" not in study:
        return
    t = study["trajectories"].tensors
    yield Picture(
        plots.similarity(t["cosine"], t["owner"], "cosine of the weights"),
        "Weights along training",
        "Blocks on the diagonal are one member during training, the others compare two members: "
        "their weights have nothing in common at any time.",
    )
    yield Picture(
        plots.similarity(t["apart"], t["owner"], "other labels (%)", share=True),
        "Functions along training",
        "The same for labels: late snapshots of one member agree, those of two members less so.",
    )
    yield Picture(
        plots.function_map(t["map"], t["owner"]),
        "Where training led",
        "One dot a snapshot; dots that are near predict alike. Each member ends in a place of its "
        "own.",
    )


def _averaging(study: Study) -> Iterator[Block]:
    if "averaging" not in study:
        return
    for name, table in list(study["averaging"].scores["parts"].items())[: 1 + _SHIFTS]:
        curves = {
            key: plots.Curve(row["modes"], row["nll"], [math.nan] * len(row["modes"]))
            for key, row in table.items()
        }
        yield Picture(
            plots.sizes(curves, "NLL"),
            f"Within a mode or between modes: {name}",
            "Lower is better. Lines fall with more members; the distance between lines is what "
            "averaging or sampling around each member adds.",
        )


def _grouped(story: Story, studies: Mapping[Entry, Study]) -> dict[str, list[tuple[Entry, Study]]]:
    """Runs that differ by their seed alone, together, where they have been judged."""
    labels = {entry: group.label for group in story.groups for entry in group.entries}
    found: dict[str, list[tuple[Entry, Study]]] = {}
    for entry, study in studies.items():
        found.setdefault(labels.get(entry, entry.method), []).append((entry, study))
    return found


def _compared(groups: Mapping[str, list[tuple[Entry, Study]]]) -> Iterator[Block]:
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
            "1 means that all members are the same, the dotted line that all are different. "
            "Weights always differ; what counts is whether predictions do. Bars are over seeds.",
        )
    if sharp:
        yield Picture(
            plots.curvature(sharp),
            "Flat or sharp minima",
            "One dot a member. A method whose dots lie higher has found sharper minima.",
        )

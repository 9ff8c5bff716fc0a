"""What a page shows of a sweep over strengths."""

from collections.abc import Sequence

from shoal import plots
from shoal.app.blocks import Block, Heading, Picture, Remark
from shoal.app.measures import Measure, baseline
from shoal.app.story import Group, Story
from shoal.app.sweep import Sweep, growth_sentence, strength_sentence, sweeps

__all__ = ["strength_blocks"]


def strength_blocks(story: Story, judged: Sequence[Measure]) -> list[Block]:
    """Sentences and a picture for each measure; nothing where every method has one strength."""
    found = _one_size(sweeps(story.groups), story.lead.members)
    if not found:
        return []
    blocks: list[Block] = [
        Heading(f"Against the strength of the repulsion, {found[0].members} members"),
        Remark(strength_sentence(found, story.groups, Measure("nll"))),
    ]
    growth = growth_sentence(story.groups, Measure("nll"))
    blocks += [Remark(growth)] if growth else []
    return blocks + [_picture(found, story.groups, measure) for measure in judged]


def _one_size(found: list[Sweep], wanted: int) -> list[Sweep]:
    """The sweeps of the size that is wanted, or of the nearest one."""
    sizes = {sweep.members for sweep in found}
    size = min(sizes, key=lambda members: (abs(members - wanted), -members), default=0)
    return [sweep for sweep in found if sweep.members == size]


def _picture(found: list[Sweep], groups: Sequence[Group], measure: Measure) -> Picture:
    curves = {}
    for sweep in found:
        means, errors = zip(*map(measure.summary, sweep.groups.values()), strict=True)
        curves[sweep.method] = plots.Curve(list(sweep.groups), list(means), list(errors))
    falls = {s.method: limit for s in found if (limit := s.falls(groups)) is not None}
    plain = baseline(next(iter(found[0].groups.values())), groups)
    figure = plots.strength(
        curves,
        measure.title,
        falls,
        None if plain is None else measure.summary(plain),
        share=measure.share,
    )
    return Picture(
        figure,
        f"{measure.title[0].upper()}{measure.title[1:]} against strength",
        "The dotted line is the plain ensemble with its standard error; a cross stands where a "
        "method becomes less accurate than it, and gains beyond are bought with errors.",
    )

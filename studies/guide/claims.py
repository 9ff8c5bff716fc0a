"""Claims of the papers, each with what we measured and a verdict.

To add a line, append a `Claim` to a list in one of the modules claims_*.py beside this file. Its
measures are computed from raw files; a missing file makes it "not measured".
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from shoal.core.display.text import markdown_table
from shoal.prediction.statistics import (
    FEWEST,
    SIGNIFICANCE,
    equivalence_p_value,
    holm,
)
from studies.guide.evidence import corrected, difference, interval

VERDICTS = ("confirmed", "mixed", "refuted", "cannot be told")

PAGES = {
    "dangelo-fortuin": ("D'Angelo & Fortuin (2021)", ("D'Angelo & Fortuin (2021)",)),
    "barabanshchikova": ("Barabanshchikova et al. (2023)", ("Barabanshchikova et al. (2023)",)),
    "trinh": ("Trinh et al. (2024)", ("Trinh et al. (2024)", "open in the paper")),
    "fort": ("Fort et al. (2019)", ("Fort et al. (2019)",)),
    "loaiza-ganem": ("Loaiza-Ganem et al. (2025)", ("Loaiza-Ganem et al. (2025)",)),
    "ours": ("our own hypotheses", ("our hypothesis",)),
}
"""A page per source: its title, and the sources of its claims."""


class Measure(NamedTuple):
    """What speaks for or against a claim.

    Attributes:
        words: the number, with its interval.
        seeds: number of pairs; 0 for a number without interval. Fewer than three decide nothing:
            two may agree by the number of test images alone.
        p: p value of no difference.
        sign: what a significant difference says: 1 for the claim, -1 against it; of a fact: 1, -1
            or 0.
        p_equal: p value of a difference at the margin, if the claim says that there is none.
    """

    words: str
    seeds: int = 0
    p: float | None = None
    sign: int = 0
    p_equal: float | None = None

    def tests(self):
        """The p values that count."""
        return [p for p in (self.p, self.p_equal) if p is not None and self.seeds >= FEWEST]

    def speaks(self, adjusted):
        """1 for the claim, -1 against it, 0 for neither; `adjusted` maps p values."""
        if self.p is None or self.seeds < FEWEST:
            return 0
        if self.p_equal is not None and adjusted(self.p_equal) < SIGNIFICANCE:
            return 1
        return self.sign if adjusted(self.p) < SIGNIFICANCE else 0


class Margin(NamedTuple):
    """The largest difference that does not matter, and why."""

    size: float
    why: str


FIFTH = Margin(0.005, "a fifth of the published gain under corruption, 2.4 points")


class Claim(NamedTuple):
    """One line.

    Attributes:
        words: what the source says.
        source: who says it.
        setting: our data, networks and methods.
        measures: what we measured, computed on demand.
        link: the study, from docs/results.
        one: whether one measure that speaks for the claim is enough.
        missing: what has to be done, shown if there are no data.
    """

    words: str
    source: str
    setting: str
    measures: Callable[[], Sequence[Measure]] | None
    link: str = ""
    one: bool = False
    missing: str = ""


def _paired(first: dict, second: Any) -> tuple[list[float], list[float]]:
    """Values of the seeds that both have; a number stands for every seed."""
    if not isinstance(second, dict):
        second = dict.fromkeys(first, second)
    seeds = sorted(first.keys() & second.keys())
    return [first[s] for s in seeds], [second[s] for s in seeds]


def _against(words, first, second, sign, published, style):
    a, b = _paired(first, second)
    found = difference(dict(enumerate(a)), dict(enumerate(b)))
    text = f"{words} {corrected([interval(found, **style)])[0]}"
    if published is not None:
        text += f"; published {sign * published * style.get('scale', 1):+g}"
    right = 1 if sign * found.difference > 0 else -1
    return Measure(text, len(a), found.p, right)


def higher(words, first, second, published=None, **style):
    """The claim says that the first is higher.

    A published size is shown and decides nothing: it is that of other data or a longer training.
    """
    return _against(words, first, second, 1, published, style)


def lower(words, first, second, published=None, **style):
    """The claim says that the first is lower; see `higher`."""
    return _against(words, first, second, -1, published, style)


def same(words, first, second, margin, **style):
    """The claim says that there is no difference: two one-sided tests at the `Margin`."""
    a, b = _paired(first, second)
    found = _against(words, first, second, 1, None, style)
    scale, digits = style.get("scale", 1), style.get("digits", 3)
    return found._replace(
        words=f"{found.words}; margin {scale * margin.size:.{digits}f}: {margin.why}",
        sign=-1,
        p_equal=equivalence_p_value(a, b, margin.size),
    )


def fact(words, holds=None):
    """A number of one run. It decides nothing; `holds` says whether it agrees with the claim."""
    return Measure(words, sign={True: 1, False: -1, None: 0}[holds])


def verdict(measures, adjusted, one=False):
    """Confirmed, refuted, mixed or cannot be told."""
    votes = [measure.speaks(adjusted) for measure in measures]
    if 1 in votes and (one or all(vote == 1 for vote in votes)):
        return "confirmed"
    if -1 in votes:
        return "mixed" if 1 in votes else "refuted"
    return "cannot be told"


def _adjuster(measures):
    """Holm's correction over all tests of these measures."""
    tests = [p for measure in measures for p in measure.tests()]
    return dict(zip(tests, holm(tests), strict=True)).__getitem__


def evaluated(claims):
    """Claims with their measures; an empty list where a raw file is missing."""
    found = []
    for claim in claims:
        try:
            found.append((claim, list(claim.measures()) if claim.measures else []))
        except (KeyError, FileNotFoundError):
            found.append((claim, []))
    return found


def lines(groups):
    """Rows of every group, rows that are not measured, and the number of each verdict.

    A verdict is bold if it also holds after Holm's correction over all tests of the page. A verdict
    from numbers without interval is never bold.
    """
    found = {title: evaluated(claims) for title, claims in groups.items()}
    everything = [measure for group in found.values() for _, ms in group for measure in ms]
    page, number, missing, counts = _adjuster(everything), 0, [], {}
    tables = {}
    for title, group in found.items():
        rows = tables.setdefault(title, [])
        for claim, measures in group:
            if not measures:
                absent = claim.missing or f"the numbers of results/{claim.link.rpartition('/')[0]}"
                missing.append([claim.words, claim.source, absent])
                continue
            number += 1
            words = verdict(measures, _adjuster(measures), claim.one)
            sure = verdict(measures, page, claim.one) == words and all(m.seeds for m in measures)
            counts[words] = counts.get(words, 0) + 1
            bold = sure and words != "cannot be told"
            counts["bold"] = counts.get("bold", 0) + bold
            link = f"[study](../{claim.link})" if claim.link else ""
            text = "<br>".join(measure.words for measure in measures)
            shown = f"**{words}**" if bold else words + _one_run(measures)
            rows.append(
                [number, claim.words, claim.source, _setting(claim, measures), text, shown, link]
            )
    return tables, missing, counts


def _one_run(measures):
    """What numbers without interval say, in words; they decide nothing."""
    signs = {measure.sign for measure in measures if not measure.seeds}
    ways = {frozenset({1}): " for it", frozenset({-1}): " against it"}
    return f", one run{ways.get(frozenset(signs), '')}" if signs else ""


def _setting(claim, measures):
    seeds = sorted({measure.seeds for measure in measures if measure.seeds})
    word = "seed" if seeds == [1] else "seeds"
    return f"{claim.setting}, {' or '.join(map(str, seeds))} {word}" if seeds else claim.setting


def source_page(title, tables, missing):
    """The claims of one source, by topic."""
    titles = ["", "claim", "source", "our data and networks", "measured", "verdict", ""]
    parts = [f"# Claims: {title}", "[How a verdict is made](../claims.md)"]
    parts += [f"## {topic}\n\n{markdown_table(titles, rows)}" for topic, rows in tables if rows]
    if missing:
        parts.append(
            "## Not measured\n\n" + markdown_table(["claim", "source", "missing"], missing)
        )
    return "\n\n".join(parts) + "\n"


def pages(groups, words):
    """The text of the index and of a page per source, by path from docs/results.

    `words` has places for the table of sources and the counts.
    """
    tables, missing, counts = lines(groups)
    texts, overview = {}, []
    for name, (title, sources) in PAGES.items():
        own = {topic: [row for row in rows if row[2] in sources] for topic, rows in tables.items()}
        absent = [row for row in missing if row[1] in sources]
        verdicts = [row[5].strip("*") for rows in own.values() for row in rows]
        number = [sum(verdict.startswith(word) for verdict in verdicts) for word in VERDICTS]
        overview.append([f"[{title}](claims/{name}.md)", len(verdicts), *number, len(absent)])
        texts[f"claims/{name}.md"] = source_page(title, own.items(), absent)
    titles = ["source", "claims", *VERDICTS, "not measured"]
    total = sum(map(len, tables.values()))
    assert total == sum(row[1] for row in overview), "a source has no page"
    texts["claims.md"] = words.format(
        sources=markdown_table(titles, overview), total=total, unmeasured=len(missing),
        verdicts=", ".join(f"{counts.get(word, 0)} {word}" for word in VERDICTS),
        bold=counts.get("bold", 0),
    )  # fmt: skip
    return texts

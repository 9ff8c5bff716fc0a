"""Claims of the papers, each with what we measured and a verdict.

To add a line, append a `Claim` to a list in one of the modules claims_*.py beside this file. Its
measures are computed from raw files; a missing file makes it "not measured".
"""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from shoal.core.display.text import markdown_table
from shoal.prediction.statistics import (
    FEWEST,
    SIGNIFICANCE,
    Pairs,
    decide,
    equivalence_p_value,
    holm,
    paired_difference,
    paired_p_value,
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


class Margin(NamedTuple):
    """The largest difference that does not matter, and why."""

    size: float
    why: str


FIFTH = Margin(0.005, "a fifth of the published gain under corruption, 2.4 points")
HUNDREDTH = Margin(0.01, "published gains in AUROC are 0.010 to 0.013")
ON_MNIST = Margin(0.0033, "a fifth of the gain from one to five members")
"""Margins of equality where a claim names none: points, NLL, ECE and AUROC, and NLL on MNIST."""


class Measure(NamedTuple):
    """What speaks for or against a claim.

    Attributes:
        words: the number, with its interval.
        pairs: values by seed, with the claimed sign as `better` and "neither" for a claim of no
            difference; None for a number of one run.
        within: the margin of `pairs` in words.
        sign: of one run: 1 if it agrees with the claim, -1 if not, 0 if neither.
    """

    words: str
    pairs: Pairs | None = None
    within: str = ""
    sign: int = 0

    @property
    def seeds(self):
        """The number of pairs; 0 for one run."""
        return len(self.pairs.values) if self.pairs else 0

    def tests(self):
        """P values of no difference and, if the claim says so, of one beyond the margin."""
        if self.pairs is None or self.seeds < FEWEST:
            return []
        a, b, better, margin = self.pairs
        equal = [equivalence_p_value(a, b, margin)] if margin and better == "neither" else []
        return [paired_p_value(a, b), *equal]

    def speaks(self, adjusted):
        """1 for the claim, -1 against it, 0 for neither, by the adjusted p values of `tests`."""
        significant = [p < SIGNIFICANCE for p in adjusted]
        if self.pairs is None or not any(significant):
            return 0
        if self.pairs.better == "neither":
            return 1 if significant[1] else -1
        higher = paired_difference(*self.pairs[:2]).difference > 0
        return 1 if higher == (self.pairs.better == "higher") else -1


def adjusted(measures: Sequence[Measure]) -> list[list[float]]:
    """The p values of each measure with Holm's correction over all; none with too few seeds.

    A difference of zero and one beyond the margin exclude each other (see `holm`).
    """
    tests = [measure.tests() for measure in measures]
    groups = [i for i, each in enumerate(tests) for _ in each]
    found = iter(holm([p for each in tests for p in each], groups))
    return [[next(found) for _ in each] for each in tests]


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


def _against(words, first, second, better, margin, style):
    a, b = _paired(first, second)
    text = f"{words} {corrected([interval(difference(*map(_numbered, (a, b))), **style)])[0]}"
    scale, unit = style.get("scale", 1), style.get("unit", "")
    within = f"{scale * margin.size:g}{unit}" if margin else ""
    return Measure(text, Pairs(a, b, better, margin and margin.size), within)


def _numbered(values):
    return dict(enumerate(values))


def _margin(words, style):
    """The margin of equality of a number, by its unit; None where there is none."""
    if style.get("unit") == " points":
        return FIFTH
    if not any(name in words for name in ("NLL", "AUROC", "ECE")):
        return None
    return ON_MNIST if style.get("digits") == 4 else HUNDREDTH


def higher(
    words, first, second, published=None, *, better: Any = "higher", margin: Any = None, **style
):
    """The claim says that the first is higher.

    A published size is shown and decides nothing: it is that of other data or a longer training.
    """
    found = _against(words, first, second, better, margin or _margin(words, style), style)
    if published is None:
        return found
    size = (1 if better == "higher" else -1) * published * style.get("scale", 1)
    return found._replace(words=f"{found.words}; published {size:+g}")


def lower(words, first, second, published=None, **style):
    """The claim says that the first is lower; see `higher`."""
    return higher(words, first, second, published, better="lower", **style)


def same(words, first, second, margin, **style):
    """The claim says that there is no difference: two one-sided tests at the `Margin`."""
    found = _against(words, first, second, "neither", margin, style)
    return found._replace(words=f"{found.words}; margin {found.within}: {margin.why}")


def fact(words, holds=None):
    """A number of one run. It decides nothing; `holds` says whether it agrees with the claim."""
    return Measure(words, sign={True: 1, False: -1, None: 0}[holds])


def votes(measures, tests):
    """What each measure says, by its adjusted p values."""
    return [measure.speaks(each) for measure, each in zip(measures, tests, strict=True)]


def verdict(measures, tests, one=False):
    """Confirmed, refuted, mixed or cannot be told, by the adjusted p values of the measures."""
    said = votes(measures, tests)
    if 1 in said and (one or all(vote == 1 for vote in said)):
        return "confirmed"
    if -1 in said:
        return "mixed" if 1 in said else "refuted"
    return "cannot be told"


def _open(measures, said):
    """What is known where nothing is told: equality, or the number of seeds that would decide."""
    unsaid = [i for i, vote in enumerate(said) if not vote]
    if any(measures[i].seeds < FEWEST for i in unsaid):
        return ""
    decided = decide("the numbers of a claim", {i: m.pairs for i, m in enumerate(measures)})
    apart = [decided[i].needed for i in unsaid if not decided[i].within]
    if not apart:
        margins = " and ".join(dict.fromkeys(measures[i].within for i in unsaid))
        return f"; {'' if len(unsaid) == len(said) else 'the rest '}equal within {margins}"
    known = [seeds for seeds in apart if seeds is not None]
    return f"; {max(known):,} seeds would decide" if len(known) == len(apart) else ""


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
    page = iter(adjusted([m for group in found.values() for _, ms in group for m in ms]))
    number, missing, counts, tables = 0, [], Counter(), {}
    for title, group in found.items():
        rows = tables.setdefault(title, [])
        for claim, measures in group:
            if not measures:
                absent = claim.missing or f"the numbers of results/{claim.link.rpartition('/')[0]}"
                missing.append([claim.words, claim.source, absent])
                continue
            number += 1
            tests, strictly = adjusted(measures), [next(page) for _ in measures]
            words = verdict(measures, tests, claim.one)
            bold = verdict(measures, strictly, claim.one) == words != "cannot be told"
            shown = f"**{words}**" if bold else words + _one_run(measures)
            if words == "cannot be told":
                shown += _open(measures, votes(measures, tests))
            counts.update({words: 1, "bold": bold, "equal": "equal within" in shown})
            link = f"[study](../{claim.link})" if claim.link else ""
            text = "<br>".join(measure.words for measure in measures)
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
        verdicts=", ".join(f"{counts[word]} {word}" for word in VERDICTS),
        bold=counts["bold"], equal=counts["equal"],
    )  # fmt: skip
    return texts

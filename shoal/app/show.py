"""The scores of one run as text."""

from collections.abc import Mapping, Sequence
from typing import Any

from shoal.app.assessment import Evaluation
from shoal.app.measures import headline
from shoal.app.outcome import table
from shoal.app.words import number
from shoal.data.corruptions import parse_shift

__all__ = ["scores_text"]

_FOREIGN = ("recognised", "auroc_entropy", "auroc_variance", "fpr95_entropy", "disagreement")


def scores_text(scores: Mapping[str, Any]) -> str:
    """Metrics on the test data and every shift, then how foreign data are told.

    Corruptions are told by their means, since there can be 95 of them.
    """
    shifts = {name: found for name, found in scores["shifts"].items() if not parse_shift(name)}
    means = {
        f"corrupted, {name.replace('-', ' ')}": found
        for name, found in scores.get("corrupted", {}).items()
    }
    labelled = {"test": scores["test"], **shifts, **means}
    few = [*headline(Evaluation(dict(scores)).about), "brier"]
    blocks = [_block(labelled, few), _block(scores["ood"], _FOREIGN)]
    width = max(map(len, [*labelled, *scores["ood"]]))
    return "\n\n".join(table(rows, header) for header, rows in _padded(blocks, width) if rows)


def _block(parts: Mapping[str, Mapping[str, float]], keys: Sequence[str]) -> tuple:
    shown = [key for key in keys if any(key in scores for scores in parts.values())]
    rows = [[part, *(_cell(scores, key) for key in shown)] for part, scores in parts.items()]
    return ["", *(key.replace("_", " ") for key in shown)], rows


def _cell(scores: Mapping[str, float], key: str) -> str:
    value = scores.get(key)
    return "–" if value is None else number(value, 0.0005)


def _padded(blocks: list[tuple], width: int) -> list[tuple]:
    """The first columns equally wide, so that the blocks stand below each other."""
    return [(header, [[row[0].ljust(width), *row[1:]] for row in rows]) for header, rows in blocks]

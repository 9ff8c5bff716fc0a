"""Numbers, tables and settings as text, with as many digits as the error justifies."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

__all__ = [
    "counted",
    "flat",
    "joined",
    "markdown_table",
    "number",
    "percent",
    "plain",
    "plus_minus",
    "seconds",
    "size",
    "table",
]


def _decimals(error: float) -> int:
    """Decimals that show one digit of the error, two when it begins with a 1."""
    if not math.isfinite(error) or error <= 0:
        return -1
    exponent = math.floor(math.log10(error))
    leading = error / 10**exponent
    return max(0, -exponent + (1 if leading < 1.95 else 0))


def number(value: float, error: float = math.nan) -> str:
    """A number to the precision of its error, or to four digits.

    >>> number(0.123456), number(0.123456, 0.002), number(math.nan)
    ('0.1235', '0.123', '–')
    """
    if math.isnan(value):
        return "–"
    if math.isinf(value):
        return "∞" if value > 0 else "−∞"
    decimals = _decimals(error)
    text = f"{value:.{decimals}f}" if 0 <= decimals <= 8 else f"{value:.4g}"
    text = text.removeprefix("-") if float(text) == 0 else text
    return text.replace("-", "−")


def plus_minus(mean: float, error: float, scale: float = 1.0) -> str:
    """A mean with its standard error, if there is one.

    >>> plus_minus(0.9643, 0.0018, scale=100), plus_minus(0.5, math.nan)
    ('96.43 ± 0.18', '0.5')
    """
    mean, error = scale * mean, scale * error
    if not math.isfinite(error) or not math.isfinite(mean):
        return number(mean)
    if error == 0:
        return f"{number(mean)} ± 0"
    return f"{number(mean, error)} ± {number(error, error)}"


def percent(share: float, error: float = math.nan) -> str:
    """A share in per cent; small shares keep a significant digit.

    >>> percent(0.978), percent(0.00021), percent(1.0), percent(0.9781, 0.0002), percent(3e-7)
    ('97.8 %', '0.02 %', '100 %', '97.81 %', 'under 0.0001 %')
    """
    value = 100 * share
    if math.isnan(value):
        return "an unknown share"
    if error < 0.0005:
        text = f"{value:.2f}"
    elif 0 < abs(value) < 1e-4:
        return "under 0.0001 %"
    elif 0 < abs(value) < 0.1:
        text = f"{value:.4f}" if abs(value) < 9.5e-4 else f"{value:.1g}"
    else:
        text = f"{value:.1f}"
    text = text.rstrip("0").rstrip(".") if "." in text and "e" not in text else text
    return f"{text} %".replace("-", "−")


def joined(words: Sequence[str]) -> str:
    """A list in a sentence.

    >>> joined(["kde"]), joined(["kde", "sge", "svgd"])
    ('kde', 'kde, sge and svgd')
    """
    if len(words) < 2:
        return "".join(words)
    return f"{', '.join(words[:-1])} and {words[-1]}"


def seconds(total: float) -> str:
    """A duration.

    >>> seconds(0.52), seconds(75), seconds(7320)
    ('0.5 s', '1 min 15 s', '2 h 2 min')
    """
    if math.isnan(total):
        return "–"
    if total < 60:
        return f"{total:.1f} s"
    if total < 3600:
        return f"{int(total // 60)} min {int(total % 60)} s"
    return f"{int(total // 3600)} h {int(total % 3600 // 60)} min"


def size(count: float) -> str:
    """A number of bytes.

    >>> size(8 * 2**30), size(1_500_000_000), size(800_000_000), size(900)
    ('8 GiB', '1.4 GiB', '763 MiB', '900 bytes')
    """
    for unit, factor in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= factor:
            amount = f"{count / factor:,.1f}" if count < 100 * factor else f"{count / factor:,.0f}"
            return f"{amount.removesuffix('.0')} {unit}"
    return f"{count:.0f} bytes"


def counted(count: int, word: str) -> str:
    """A number of things.

    >>> counted(1, "seed"), counted(3, "seed")
    ('1 seed', '3 seeds')
    """
    return f"{count} {word}" if count == 1 else f"{count} {word}s"


def table(rows: Sequence[Sequence[str]], header: Sequence[str] = ()) -> str:
    """Aligned columns: the first to the left, the others to the right.

    >>> print(table([["test", "0.98"], ["rotated-15", "0.9"]], ["", "accuracy"]))
                accuracy
    test            0.98
    rotated-15       0.9
    """
    lines = [list(header), *map(list, rows)] if header else [list(row) for row in rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if index else cell.ljust(width)
            for index, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A table in Markdown, without a line break at its end.

    >>> print(markdown_table(["method", "members"], [["kde", 10]]))
    | method | members |
    | --- | --- |
    | kde | 10 |
    """
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


def plain(config: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that are set; a single architecture without its list.

    >>> plain({"clip": None, "model": [{"name": "mlp", "members": 5}]})
    {'model': {'name': 'mlp'}}
    >>> plain({"model": [{"custom": "net", "members": 5}], "data": {"custom": "own data"}})
    {'model': 'own net', 'data': 'own data'}
    """
    kept = {key: value for key, value in config.items() if value is not None}
    models = kept.get("model")
    if isinstance(models, list) and len(models) == 1 and isinstance(models[0], Mapping):
        kept["model"] = {key: value for key, value in models[0].items() if key != "members"}
    return {key: _own(value) for key, value in kept.items()}


def _own(value: Any) -> Any:
    """A custom object as one word; a config has only its name."""
    own = isinstance(value, Mapping) and "custom" in value
    name = str(value["custom"]) if own else ""
    return (name if name.startswith("own ") else f"own {name}") if own else value


def flat(table: Any, prefix: str = "") -> dict[str, str]:
    """A nested table as a flat table with dotted keys and words.

    >>> flat({"prior": {"name": "gaussian", "std": 1.0}, "hidden": [32, 32], "on": True})
    {'prior.name': 'gaussian', 'prior.std': '1', 'hidden': '32, 32', 'on': 'yes'}
    """
    if isinstance(table, Mapping):
        words: dict[str, str] = {}
        for key, value in table.items():
            words |= flat(value, f"{prefix}{key}.")
        return words
    name = prefix.removesuffix(".")
    if isinstance(table, list | tuple):
        if any(isinstance(value, Mapping | list | tuple) for value in table):
            return flat({str(index): value for index, value in enumerate(table)}, prefix)
        return {name: ", ".join(map(_word, table))}
    return {name: _word(table)}


def _word(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return repr(value).removesuffix(".0")
    return "none" if value is None else str(value)

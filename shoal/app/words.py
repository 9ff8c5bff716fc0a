"""Numbers as a reader wants them: no more digits than the noise allows."""

import math
from collections.abc import Sequence

__all__ = ["joined", "number", "percent", "plus_minus", "seconds"]


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
    """A mean with its standard error, which is left out when there is none.

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
    """A share in per cent; small ones keep a digit that says something.

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

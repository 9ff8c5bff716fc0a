"""Where calibrated function-space methods are worse: python -m studies.fidelity.worse

The script prints the table of README.md from results.csv and stein.csv: means over seeds, and
differences to the plain ensemble, paired by seed, with 95 % intervals by Student's t.
"""

from shoal.core.display.text import markdown_table
from shoal.prediction.statistics import paired_difference
from studies import RESULTS
from studies.common import read_csv
from studies.fidelity.stein import FILE as STEIN
from studies.fidelity.stein import SEEDS

FILE = RESULTS / "fidelity/results.csv"
CASES = (
    *(("stein", problem) for problem in ("linear", "regression", "classification", "digits")),
    ("weights/sliced", "linear"),
    ("weights/mmd", "linear"),
)
OURS = ("f-kde:calibrated", "f-svgd:calibrated")
BESIDE = ("ensemble", "kde:legacy", "svgd:legacy", "kde:calibrated")


def _mean(values: list[float]) -> str:
    """The mean over all seeds; nothing for a method that lacks some."""
    return f"{sum(values) / SEEDS:.3g}" if len(values) == SEEDS else ""


def main() -> None:
    """Print the table."""
    found: dict[tuple[str, str, str], list[float]] = {}
    for row in [*read_csv(FILE), *read_csv(STEIN)]:
        key = row["distance"], row["problem"], row["method"]
        found.setdefault(key, []).append(float(row["value"]))
    rows = []
    for distance, problem in CASES:
        means = [
            _mean(found.get((distance, problem, method), []))
            for method in ("posterior draws", *OURS, *BESIDE)
        ]
        change = paired_difference(
            found[distance, problem, OURS[1]], found[distance, problem, "ensemble"]
        )
        ends = f"{change.difference:+.3g} ({change.low:+.3g} to {change.high:+.3g})"
        rows.append([distance, problem, *means, ends])
    header = ["distance", "problem", "posterior draws", *OURS, *BESIDE]
    print(markdown_table([*header, "f-svgd:calibrated minus ensemble"], rows))


if __name__ == "__main__":
    main()

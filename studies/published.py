"""The table of a result page: our numbers, with the published ones in parentheses.

python -m studies.published mnist
python -m studies.published mnist-published
python -m studies.published fashion-mnist
"""

import argparse
from typing import NamedTuple

from shoal.core.display.text import markdown_table
from studies import RESULTS
from studies.common import read_csv


class Column(NamedTuple):
    """A metric on a split of the data, and its format."""

    title: str
    metric: str
    split: str = "test"
    scale: float = 1
    digits: int = 4


ACCURACY = Column("accuracy, %", "accuracy", scale=100, digits=2)
COLUMNS = {
    "mnist": [
        ACCURACY,
        Column("NLL", "nll"),
        Column("ECE, 30 bins, %", "ece_30", scale=100, digits=2),
        Column("entropy ratio NotMNIST / MNIST", "entropy_ratio", "ood:notmnist", digits=1),
        Column("AUROC by predictive entropy, NotMNIST", "auroc_entropy", "ood:notmnist", digits=3),
    ],
    "fashion-mnist": [
        ACCURACY,
        Column("NLL", "nll"),
        Column("-log of mean probability", "nll_legacy", digits=3),
        Column("ECE, %", "ece", scale=100, digits=2),
        Column("entropy ratio MNIST / Fashion", "entropy_ratio", "ood:mnist", digits=2),
        Column("AUROC by predictive entropy", "auroc_entropy", "ood:mnist", digits=3),
        Column("AUROC by disagreement", "auroc_disagreement", "ood:mnist", digits=3),
    ],
}
COLUMNS["mnist-published"] = COLUMNS["mnist"]
BESIDE = {"mnist-published": "mnist"}
"""Studies that use the published numbers in the folder of another study."""


def ours(folder):
    """Mean and standard error of every method, size, metric and split.

    The column of the split was called "part" in older files.
    """
    return {
        (row["method"], int(row["size"]), row["metric"], row.get("split", row.get("part"))): (
            float(row["mean"]),
            float(row["stderr"]),
        )
        for row in read_csv(folder / "summary.csv")
        if row["stderr"]
    }


def published(folder):
    """Published numbers by method, size and metric; ECE in per cent."""
    found = {}
    for row in read_csv(folder / "published.csv"):
        for metric, value in row.items():
            if value and metric not in ("method", "size", "remark"):
                scale = 100 if metric.startswith("ece") else 1
                found[row["method"], int(row["size"]), metric] = scale * float(value)
    return found


def main():
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("study", choices=COLUMNS)
    study: str = parser.parse_args().study
    columns, mine = COLUMNS[study], ours(RESULTS / study)
    theirs = published(RESULTS / BESIDE.get(study, study))
    cases = list(dict.fromkeys((method, size) for method, size, *_ in mine))
    lines = []
    for method, size in sorted(cases, key=lambda case: (case[1], cases.index(case))):
        cells = []
        for column in columns:
            value = mine[method, size, column.metric, column.split]
            mean, error = (column.scale * each for each in value)
            known = theirs.get((method, size, column.metric))
            beside = "" if known is None else f" ({known:.{column.digits}f})"
            cells.append(f"{mean:.{column.digits}f} ± {error:.{column.digits}f}{beside}")
        lines.append([method, size, *cells])
    print(markdown_table(["method", "members", *(column.title for column in columns)], lines))


if __name__ == "__main__":
    main()

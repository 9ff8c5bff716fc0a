"""The numbers of a study beside the published ones, as the table of its page.

python docs/results/tables.py mnist
python docs/results/tables.py mnist-published
python docs/results/tables.py fashion-mnist
"""

import argparse
import csv
from pathlib import Path
from typing import NamedTuple

from shoal.app.markdown import markdown_table

HERE = Path(__file__).parent


class Column(NamedTuple):
    """A metric on a part of the data, and how it is written."""

    title: str
    metric: str
    part: str = "test"
    scale: float = 1
    digits: int = 4


ACCURACY = Column("accuracy, %", "accuracy", scale=100, digits=2)
COLUMNS = {
    "mnist": [
        ACCURACY,
        Column("NLL", "nll"),
        Column("ECE, 30 bins, %", "ece_30", scale=100, digits=2),
        Column("entropy NotMNIST / MNIST", "entropy_ratio", "ood:notmnist", digits=1),
        Column("AUROC NotMNIST", "auroc_entropy", "ood:notmnist", digits=3),
    ],
    "fashion-mnist": [
        ACCURACY,
        Column("NLL", "nll"),
        Column("- log of the mean probability", "nll_legacy", digits=3),
        Column("ECE, %", "ece", scale=100, digits=2),
        Column("entropy MNIST / Fashion", "entropy_ratio", "ood:mnist", digits=2),
        Column("AUROC, entropy", "auroc_entropy", "ood:mnist", digits=3),
        Column("AUROC, disagreement", "auroc_disagreement", "ood:mnist", digits=3),
    ],
}
COLUMNS["mnist-published"] = COLUMNS["mnist"]
BESIDE = {"mnist-published": "mnist"}
"""Studies that are held against the published numbers of another's folder."""


def rows(path):
    """Of a CSV file."""
    with path.open() as file:
        yield from csv.DictReader(file)


def ours(folder):
    """Mean and standard error of every method, size, metric and part."""
    return {
        (row["method"], int(row["size"]), row["metric"], row["part"]): (
            float(row["mean"]),
            float(row["stderr"]),
        )
        for row in rows(folder / "summary.csv")
        if row["stderr"]
    }


def published(folder):
    """By method, size and metric; in per cent where the table is."""
    found = {}
    for row in rows(folder / "published.csv"):
        for metric, value in row.items():
            if value and metric not in ("method", "size", "remark"):
                scale = 100 if metric.startswith("ece") else 1
                found[row["method"], int(row["size"]), metric] = scale * float(value)
    return found


def main():
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("study", choices=COLUMNS)
    study = parser.parse_args().study
    columns, mine = COLUMNS[study], ours(HERE / study)
    theirs = published(HERE / BESIDE.get(study, study))
    cases = list(dict.fromkeys((method, size) for method, size, *_ in mine))
    lines = []
    for method, size in sorted(cases, key=lambda case: (case[1], cases.index(case))):
        cells = []
        for column in columns:
            value = mine[method, size, column.metric, column.part]
            mean, error = (column.scale * each for each in value)
            known = theirs.get((method, size, column.metric))
            beside = "" if known is None else f" ({known:.{column.digits}f})"
            cells.append(f"{mean:.{column.digits}f} ± {error:.{column.digits}f}{beside}")
        lines.append([method, size, *cells])
    print(markdown_table(["method", "members", *(column.title for column in columns)], lines))


if __name__ == "__main__":
    main()

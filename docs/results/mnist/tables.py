"""The numbers of `summary.csv` beside the published ones, as tables for the page next to this file.

    python docs/results/mnist/tables.py
"""

import csv
from pathlib import Path

HERE = Path(__file__).parent
COLUMNS = {
    "accuracy": ("accuracy, %", "test", 100, 2),
    "nll": ("NLL", "test", 1, 4),
    "ece_30": ("ECE, 30 bins, %", "test", 100, 2),
    "entropy_ratio": ("entropy NotMNIST / MNIST", "ood:notmnist", 1, 1),
    "auroc_entropy": ("AUROC NotMNIST", "ood:notmnist", 1, 3),
}


def rows(name):
    with (HERE / name).open() as file:
        yield from csv.DictReader(file)


def ours():
    return {
        (row["method"], int(row["size"]), row["metric"]): (float(row["mean"]), float(row["stderr"]))
        for row in rows("summary.csv")
        if row["metric"] in COLUMNS and row["part"] == COLUMNS[row["metric"]][1]
    }


def published():
    found = {}
    for row in rows("published.csv"):
        for metric in ("accuracy", "nll", "ece_30", "entropy_ratio"):
            scale = 100 if metric == "ece_30" else 1
            found[row["method"], int(row["size"]), metric] = scale * float(row[metric])
    return found


def main():
    mine, theirs = ours(), published()
    cases = list(dict.fromkeys((method, size) for method, size, _ in mine))
    print("| method | members |", " | ".join(title for title, *_ in COLUMNS.values()), "|")
    print("| --- | --- |" + " --- |" * len(COLUMNS))
    for method, size in sorted(cases, key=lambda case: (case[1], cases.index(case))):
        cells = []
        for metric, (_, _, scale, digits) in COLUMNS.items():
            mean, error = (scale * value for value in mine[method, size, metric])
            known = theirs.get((method, size, metric))
            beside = "" if known is None else f" ({known:.{digits}f})"
            cells.append(f"{mean:.{digits}f} ± {error:.{digits}f}{beside}")
        print(f"| {method} | {size} |", " | ".join(cells), "|")


if __name__ == "__main__":
    main()

"""The page of the suite, from its raw files.

python -m studies.tables.page
"""

from pathlib import Path

from shoal.core.display.text import markdown_table
from studies.common import read_csv
from studies.tables.sets import HALVES, SUITE

PLAN = Path(__file__).with_name("plan.md")
"""Written before the runs."""


def set_table(half):
    """The sets of a half."""
    rows = [row for row in read_csv(SUITE / "sets.csv") if row["half"] == half]
    kinds = {"regression": "regression", "classification": "{classes} classes"}
    lines = [
        [row["name"], kinds[row["task"]].format(**row), row["source"].split(":", 1)[1]]
        + [f"{int(row['train']):,} / {int(row['test']):,}"]
        + [row["numbers"], row["categories"], row["gaps"]]
        for row in rows
    ]
    heads = ["set", "task", "source", "training / test points", "numbers", "categories", "gaps"]
    return f"The {half} half:\n\n{markdown_table(heads, lines)}"


def page():
    """The plan and the sets."""
    parts = [PLAN.read_text().strip(), "## Sets", *map(set_table, HALVES)]
    (SUITE / "README.md").write_text("\n\n".join(parts) + "\n")


if __name__ == "__main__":
    page()

"""Rows of the table of networks of libraries: python benchmarks/zoo_table.py FILE...

Prints rows for docs/benchmarks/README.md from what `shoal bench --fit` has written.
"""

import json
import sys
from collections.abc import Iterator, Mapping
from itertools import groupby
from pathlib import Path
from typing import Any


def lines(value: Mapping[str, Any]) -> Iterator[str]:
    """Milliseconds per step of the loop and of the plain ensemble, their ratio, and the start."""
    for name, group in groupby(value["steps"], lambda row: row["model"]):
        rows = {row["method"] or row["what"]: row for row in group}
        loop, plain = rows["module loop"], rows["ensemble"]
        times, start = plain["times_faster_than_loop"], plain["setup_seconds"]
        cells = name, f"{loop['ms']:.1f}", f"{plain['ms']:.1f}", f"{times:.1f}", f"{start:.1f} s"
        yield f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    for file in sys.argv[1:]:
        print(*lines(json.loads(Path(file).read_text(encoding="utf-8"))), sep="\n")

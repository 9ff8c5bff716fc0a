"""The table of networks of libraries: python benchmarks/zoo_table.py docs/benchmarks/zoo-h200.json

Prints the table of docs/benchmarks/README.md from what `shoal bench --fit` has written.
"""

import json
import sys
from collections.abc import Mapping
from itertools import groupby
from pathlib import Path
from typing import Any

HEADER = (
    "| network | module loop | plain | times faster | `f-kde` | start | start of `f-kde` | MiB |"
)


def markdown(value: Mapping[str, Any]) -> str:
    """Milliseconds per step, ratios, starts in seconds, and memory of the plain ensemble."""
    lines = [HEADER, "| --- " * HEADER.count(" | ") + "| --- |"]
    for name, group in groupby(value["steps"], lambda row: row["model"]):
        rows = {row["method"] or row["what"]: row for row in group}
        loop, plain, repelled = (rows[key] for key in ("module loop", "ensemble", "f-kde"))
        cells = [name, _ms(loop), _ms(plain), _times(plain), _ms(repelled)]
        cells += [_seconds(plain), _seconds(repelled), _mib(plain)]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _ms(row: Mapping[str, Any]) -> str:
    if "ms" not in row:
        return "-"
    low, high = row["quartiles_ms"]
    digits = 0 if row["ms"] >= 100 else 1
    return f"{row['ms']:.{digits}f} ± {(high - low) / 2:.{digits}f}"


def _times(row: Mapping[str, Any]) -> str:
    return f"{row['times_faster_than_loop']:.1f}" if row.get("times_faster_than_loop") else "-"


def _seconds(row: Mapping[str, Any]) -> str:
    return f"{row['setup_seconds']:.1f} s" if "ms" in row else "-"


def _mib(row: Mapping[str, Any]) -> str:
    return f"{row['memory_mib']:,.0f}" if row.get("memory_mib") else "-"


if __name__ == "__main__":
    print(markdown(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))))

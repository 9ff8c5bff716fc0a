"""Exported files: networks x formats, with the largest difference from `predict` and the size.

    python benchmarks/export.py                          # writes the table into docs/export.md
    python benchmarks/export.py --formats onnx,pt2       # without the table's other columns

The difference is relative to the largest value of an output, or to 1, over batches of 1, 7 and 64.
"""

import argparse
import sys
import tempfile
from pathlib import Path

import torch

from shoal.core.errors import ConfigError
from shoal.integrations.export import export

HOME = Path(__file__).parents[1]
PAGE = HOME / "docs" / "export.md"
START, END = "<!-- table: python benchmarks/export.py -->", "<!-- end of table -->"
FORMATS = {
    "onnx": ("model.onnx", {}),
    "float16": ("model.onnx", {"precision": "float16"}),
    "int8": ("model.onnx", {"precision": "int8"}),
    "pt2": ("model.pt2", {}),
    "compiled": ("model.pt2", {"compile": True}),
}


def cell(ensemble: object, x: object, name: str, options: dict, folder: Path) -> str:
    """Difference and size of one file, or why there is none."""
    try:
        done = export(ensemble, folder / name, x, **options)
    except ConfigError as error:
        print(f"  {error}", flush=True)
        return "–"
    return f"{done.difference:.0e}, {done.bytes / 1000:,.0f} kB"


def main() -> None:
    """Export every network in every format, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--formats", default=",".join(FORMATS))
    chosen = parser.parse_args().formats.split(",")
    sys.path.insert(0, str(HOME / "tests"))
    from export_cases import CASES

    names = {name: (make, {}) for name, make in CASES.items()}
    names["lora, merged"] = (CASES["lora"], {"merge": True})
    lines = [f"| network | {' | '.join(chosen)} |", "| --- |" + " --- |" * len(chosen)]
    with tempfile.TemporaryDirectory() as folder:
        for name, (make, more) in names.items():
            torch.manual_seed(0)
            ensemble, x = make()
            cells = [
                cell(ensemble, x, FORMATS[key][0], FORMATS[key][1] | more, Path(folder))
                for key in chosen
            ]
            lines.append(f"| {ensemble.members} x {name} | {' | '.join(cells)} |")
            print(lines[-1], flush=True)
    before, rest = PAGE.read_text().split(START)
    PAGE.write_text("\n".join([before + START, "", *lines, "", END + rest.split(END)[1]]))


if __name__ == "__main__":
    main()

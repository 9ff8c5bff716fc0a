"""Exported files: networks x formats, with the largest difference from `predict` and the size.

    python benchmarks/export.py                          # writes the table into docs/export.md
    python benchmarks/export.py --networks 'gru;bert'    # these rows anew; other rows stay

The difference is relative to the largest value of an output, or to 1, over batches of 1, 7 and 64.
"""

import argparse
import sys
import tempfile
from pathlib import Path

import torch
from torch import nn

from shoal.core.errors import ConfigError
from shoal.inference.ensemble import Ensemble
from shoal.integrations.export import export

HOME = Path(__file__).parents[1]
PAGE = HOME / "docs" / "export.md"
START, END = "<!-- table: python benchmarks/export.py -->", "<!-- end of table -->"
WIDE = "perceptron 784-512-512-10"
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


def wide() -> tuple[Ensemble, torch.Tensor]:
    """A network whose weights are most of the file, as in practice."""
    layers = lambda: nn.Sequential(  # noqa: E731
        nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10)
    )
    return Ensemble.init(layers, members=5), torch.randn(64, 784)


def networks() -> dict[str, tuple]:
    """Every network by name, with options of its export."""
    sys.path.insert(0, str(HOME / "tests"))
    from export_cases import CASES

    found: dict[str, tuple] = {name: (make, {}) for name, make in CASES.items()}
    return {**found, "lora, merged": (CASES["lora"], {"merge": True}), WIDE: (wide, {})}


def main() -> None:
    """Export the networks in every format, and write their rows of the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--networks", help="names separated by ';' (default: all)")
    chosen = parser.parse_args().networks
    known = networks()
    before, rest = PAGE.read_text().split(START)
    table, after = rest.split(END)
    rows = {
        line.split(" x ")[1].split(" |")[0]: line for line in table.splitlines() if " x " in line
    }
    with tempfile.TemporaryDirectory() as folder:
        for name in chosen.split(";") if chosen else known:
            make, more = known[name]
            torch.manual_seed(0)
            ensemble, x = make()
            cells = [
                cell(ensemble, x, file, options | more, Path(folder))
                for file, options in FORMATS.values()
            ]
            rows[name] = f"| {ensemble.members} x {name} | {' | '.join(cells)} |"
            print(rows[name], flush=True)
    lines = [f"| network | {' | '.join(FORMATS)} |", "| --- |" + " --- |" * len(FORMATS)]
    lines += [rows[name] for name in known if name in rows]
    PAGE.write_text("\n".join([before + START, "", *lines, "", END + after]))


if __name__ == "__main__":
    main()

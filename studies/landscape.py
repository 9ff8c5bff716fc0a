"""The landscape of a deep ensemble: python -m studies.landscape --out FOLDER

The script trains five independent members with snapshots, runs every analysis of `shoal landscape`,
and writes one JSON file, one CSV file and the figures as PNG and SVG. The default is CIFAR-10 with
the network of Fort et al. (2019) on a GPU. --data digits uses a small network and takes some
minutes on one core; --quick is coarse. A failed analysis is recorded in parts.json and does not
stop the others. The same command resumes an interrupted study.
"""

import argparse
import csv
import io
import time
import traceback
from pathlib import Path
from typing import Any

import torch

import shoal
from shoal.analysis.landscape.analyses import along  # noqa: F401  # registers the analyses
from shoal.analysis.landscape.scene import Effort, registry
from shoal.analysis.landscape.study import study
from shoal.core.storage.files import read_json, write_bytes, write_json, write_text
from shoal.models import Blueprint, SmallCNN
from shoal.models import registry as models
from shoal.page.findings import finding
from shoal.page.report import section_figures, slug
from shoal.page.report_data import load_report_data
from shoal.page.sections.landscape import landscape_section

CORRUPTED = {
    "corruptions": ["gaussian-noise", "motion-blur", "fog", "jpeg-compression"],
    "severities": [3],
}
"""One corruption of each family; digits have their own shifts."""


def prepared(options):
    """The data with shifts, and the network."""
    small = options.data == "digits"
    data = shoal.data.load({"name": options.data, "ood": []} | ({} if small else CORRUPTED))
    network = SmallCNN() if small else models.make("medium-cnn")
    return data, Blueprint(network, data.input_shape, data.outputs)


def trained(options, data, blueprint):
    """Five independent members whose learning rate never falls below a quarter."""
    small = options.data == "digits"
    return shoal.fit(
        shoal.Ensemble.init(blueprint, members=5, seed=options.seed),
        data,
        method="ensemble",
        temperature=0.0,
        lr=3e-3 if small else 1.6e-3,
        schedule=lambda step, steps: 0.5 ** min(int(4 * step / steps), 2),
        epochs=12 if options.quick else options.epochs,
        batch_size=64 if small else 128,
        seed=options.seed,
        device=options.device,
        precision=options.precision,
        keep_every=1,
        out=options.out / "run",
        resume=True,
    )


def analysed(run, data, effort, names):
    """The result of every analysis with its seconds, or its error."""
    for name in names:
        start = time.monotonic()
        try:
            result = study(run, data, [name], effort=effort)[name]
            row: dict[str, Any] = {"sentence": finding(name, result), **result.scores}
        except Exception as error:
            traceback.print_exc()
            row = {"failed": f"{type(error).__name__}: {error}"}
        row["seconds"] = round(time.monotonic() - start, 2)
        print(f"{name}: {row['seconds']} s: {row.get('sentence', row.get('failed'))}", flush=True)
        yield name, row


def draw(folder, out):
    """Each figure as PNG and as SVG, named after its title."""
    section = landscape_section(load_report_data([folder]))
    for index, drawn in enumerate(section_figures([] if section is None else section.blocks), 1):
        name = f"{index:02d}-{slug(drawn.title)}"
        write_bytes(out / f"{name}.png", shoal.plots.png(drawn.figure, 110))
        write_text(out / f"{name}.svg", shoal.plots.svg(drawn.figure, name, drawn.title))


def write(run, out, seconds, found):
    """Write the numbers so far."""
    value = {"seconds": seconds, "device": str(run.ensemble.device), "config": run.config}
    write_json(out / "parts.json", value | {"parts": found})
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([("number", "value"), *flat(found)])
    write_text(out / "numbers.csv", text.getvalue())


def flat(value, path=()):
    """Numbers of nested tables, each with its path."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from flat(inner, (*path, str(key)))
    elif isinstance(value, list | tuple):
        for index, inner in enumerate(value):
            yield from flat(inner, (*path, str(index)))
    else:
        yield "/".join(path), value


def main():
    """Train, analyse and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--data", default="cifar10")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--device", default=None)
    parser.add_argument("--precision", default=None)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=300, help="training steps of a curve (300)")
    parser.add_argument("--analyses", help="such as line,tunnel (default: all)")
    options = parser.parse_args()
    if options.quick:
        options.data = "digits"
    if options.device is None:
        options.device = "cuda" if torch.cuda.is_available() else "cpu"
    options.out.mkdir(parents=True, exist_ok=True)
    start = time.monotonic()
    data, blueprint = prepared(options)
    run = trained(options, data, blueprint)
    seconds = {"training": round(time.monotonic() - start, 2)}
    effort = Effort.quick() if options.quick else Effort(inputs=3000, steps=options.steps)
    names = options.analyses.split(",") if options.analyses else registry.names()
    kept = options.out / "parts.json"
    found = read_json(kept)["parts"] if kept.exists() else {}
    for name, row in analysed(run, data, effort, names):
        found[name] = row
        seconds["everything"] = round(time.monotonic() - start, 2)
        write(run, options.out, seconds, found)
    draw(run.folder, options.out)
    print(f"{seconds}, written to {options.out}")


if __name__ == "__main__":
    main()

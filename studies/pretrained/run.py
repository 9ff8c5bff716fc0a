"""The pre-trained study: EfficientNet-lite0 on CIFAR-10, adapted in seven ways.

    python -m studies.pretrained.run pack --carry FOLDER  images and network
    python -m studies.pretrained.run features --carry FOLDER --features FOLDER  for other studies
    python -m studies.pretrained.run choose --carry FOLDER --methods heads  on held-out images
    python -m studies.pretrained.run cells --carry FOLDER --methods heads,laplace --within 500
    python -m studies.pretrained.run cells --carry FOLDER --quick  tiny sizes
    python -m studies.pretrained.run tables  tables.md, results.png

`cells` writes raw.csv into --out, one row per cell and metric, and leaves out the cells that are in
a raw*.csv of --out or beside this file. It runs seed after seed, and starts no cell that would
end after --within seconds, by the time of the last such cell. A cell that fails is reported, and
the others run on.
"""

import argparse
import json
import sys
import time
import traceback
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from studies import RESULTS
from studies.common import append_rows, read_csv
from studies.pretrained import cells, images, network, tables

FOLDER = RESULTS / "pretrained"
HEADER = ["method", "images", "seed", "metric", "value", "device"]


def options() -> argparse.Namespace:
    """The command-line options."""
    made = argparse.ArgumentParser(description=__doc__)
    made.add_argument("what", choices=("pack", "features", "choose", "cells", "tables"))
    made.add_argument("--carry", type=Path, help="the folder of pack")
    made.add_argument("--out", type=Path, default=FOLDER, help="the folder of the numbers")
    made.add_argument("--features", type=Path, help="a folder that keeps features")
    made.add_argument("--methods", default=",".join(cells.METHODS))
    made.add_argument("--sizes", default="1000,0", help="training images; 0 is all")
    made.add_argument("--seeds", type=int, default=5)
    made.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    made.add_argument("--within", type=float, default=1e9, help="seconds for all cells")
    made.add_argument("--quick", action="store_true", help="tiny sizes")
    asked = made.parse_args()
    if asked.what != "tables" and asked.carry is None:
        made.error(f"{asked.what} needs --carry FOLDER")
    if asked.what == "features" and asked.features is None:
        made.error("features needs --features FOLDER")
    return asked


def say(*words: object) -> None:
    """Report progress."""
    print(*words, file=sys.stderr, flush=True)


def opened(asked: argparse.Namespace) -> cells.Study:
    """The study with its images, network and features."""
    data = images.Images(asked.carry, asked.device, asked.quick)
    net = network.load(asked.carry)
    known: dict[str, torch.Tensor] = {}

    def features(name: str) -> torch.Tensor:
        if name not in known:
            file = asked.features and asked.features / f"{name}.safetensors"
            if file and file.exists() and not asked.quick:
                found = load_file(file)["x"]
            else:
                found = network.features(net, data[name]).half()
                if file and not asked.quick:
                    file.parent.mkdir(parents=True, exist_ok=True)
                    save_file({"x": found.cpu()}, file)
            known[name] = found.to(asked.device).float()
        return known[name]

    return cells.Study(data, net, features, asked.device, asked.quick)


def keep_features(asked: argparse.Namespace) -> None:
    """Compute the features of the training images and of those that judge, and keep them."""
    study = opened(asked)
    for name in ("train", *images.JUDGES):
        say(name, *study.features(name).shape)


def append(file: Path, key: list, scores: dict[str, float], device: str) -> None:
    """Add the rows of a cell to a file."""
    rows = [[*key, name, f"{value:.6g}", device] for name, value in scores.items()]
    append_rows(file, HEADER, rows)


def done(asked: argparse.Namespace) -> set[tuple[str, int, int]]:
    """The cells that are in raw*.csv of --out and beside this file."""
    found = set()
    for file in {*asked.out.glob("raw*.csv"), *(() if asked.quick else FOLDER.glob("raw*.csv"))}:
        for r in read_csv(file):
            method = "fine-tuned" if r["method"].startswith("fine-tuned") else r["method"]
            found.add((method, int(r["images"]), int(r["seed"])))
    return found


def choose(asked: argparse.Namespace) -> None:
    """Try every choice on held-out images, and write choice-KIND.csv and chosen-KIND.json."""
    study, device = opened(asked), asked.device
    for kind in asked.methods.split(","):
        grid = cells.LORA_CHOICES if kind == "lora" else cells.CHOICES
        grid = grid[:1] if asked.quick else grid
        for size in [int(s) for s in asked.sizes.split(",")]:
            rows: dict[str, dict[str, float]] = {}
            for choice in [{}, *grid]:
                begun, name = time.monotonic(), _name(choice)
                rows[name] = study.held(kind, size, choice)
                key = [f"{kind}/{name}", size, cells.CHOICE_SEED]
                append(asked.out / f"choice-{kind}.csv", key, rows[name], device)
                say(kind, size, name, f"{time.monotonic() - begun:.1f} s", rows[name])
            best = cells.pick(rows)
            file = asked.out / f"chosen-{kind}.json"
            known = json.loads(file.read_text()) if file.exists() else {}
            known[str(size)] = next(c for c in grid if _name(c) == best)
            file.write_text(json.dumps(known, indent=1) + "\n")
            say("chosen", kind, size, best)


def _name(choice: dict) -> str:
    return f"{choice['points']}:{choice['strength']:g}" if choice else "plain"


def chosen(asked: argparse.Namespace, method: str, size: int) -> dict:
    """The choice for a repelled method; {} for the others."""
    if not method.endswith("-repelled"):
        return {}
    name = f"chosen-{method.partition('-')[0]}.json"
    file = next((f for f in (asked.out / name, FOLDER / name) if f.exists()), None)
    if file is None:
        raise SystemExit(f"{name} is missing; run choose first")
    known = json.loads(file.read_text())
    # LoRA is chosen with 1,000 images; per="batch" makes a strength mean the same for all images.
    return known[str(size)] if str(size) in known else known["1000"]


def run_cells(asked: argparse.Namespace) -> None:
    """Run missing cells, seed after seed, while there is time."""
    begun, study, took = time.monotonic(), opened(asked), {}
    say(f"opened in {time.monotonic() - begun:.0f} s")
    ready = done(asked)
    plan = [
        (method, int(size), seed)
        for seed in range(asked.seeds)
        for size in asked.sizes.split(",")
        for method in asked.methods.split(",")
    ]
    for cell in plan:
        started = time.monotonic()
        if cell in ready or started - begun + took.get(cell[:2], 0.0) > asked.within:
            continue
        try:
            choice = chosen(asked, cell[0], cell[1])
            for name, scores in study.run(*cell, choice):
                append(asked.out / "raw.csv", [name, *cell[1:]], scores, asked.device)
        except (Exception, SystemExit):
            say(f"{cell} failed:", traceback.format_exc())
            continue
        took[cell[:2]] = time.monotonic() - started
        say(*cell, f"{took[cell[:2]]:.1f} s, {time.monotonic() - begun:.0f} s in all")


def main() -> None:
    """Do what was asked."""
    asked = options()
    asked.out.mkdir(parents=True, exist_ok=True)
    if asked.what == "tables":
        return tables.write(asked.out)
    if asked.what == "pack":
        asked.carry.mkdir(parents=True, exist_ok=True)
        network.carry(asked.carry)
        size = images.pack(asked.carry)
        assert size <= images.LIMIT, f"{size:,} bytes are more than may travel"
        return say(f"{size / 2**20:.1f} MiB in {asked.carry}")
    if asked.what == "features":
        return keep_features(asked)
    (choose if asked.what == "choose" else run_cells)(asked)


if __name__ == "__main__":
    main()

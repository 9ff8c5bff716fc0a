"""What the scripts of this folder share: options, a header, and a folder for figures."""

import argparse
import sys
from pathlib import Path
from typing import Any

import torch

from shoal.core.storage.files import write_json
from shoal.experiment.bench.measure import load, machine, versions
from shoal.experiment.bench.plan import find_device

__all__ = ["DOCS", "finish", "options", "parser", "say", "title"]

DOCS = Path(__file__).resolve().parent.parent / "docs" / "benchmarks"


def parser(description: str) -> argparse.ArgumentParser:
    """The options of every script."""
    made = argparse.ArgumentParser(description=description)
    made.add_argument("--device", help="cpu or cuda (a GPU where there is one)")
    made.add_argument("--quick", action="store_true", help="a small, short test")
    made.add_argument("--threads", type=int, help="CPU threads")
    made.add_argument("-o", "--out", help="write every number to this JSON file")
    return made


def options(made: argparse.ArgumentParser) -> argparse.Namespace:
    """The parsed options; the device is resolved and the threads are set."""
    found = made.parse_args()
    found.device = find_device(found.device)
    if found.threads is not None:
        torch.set_num_threads(found.threads)
    return found


def title(device: torch.device) -> dict[str, Any]:
    """The header of a result: machine, load and versions."""
    return {"machine": machine(device), "versions": versions()}


def say(line: str) -> None:
    """Report progress."""
    print(line, file=sys.stderr, flush=True)


def finish(value: dict[str, Any], text: str, out: str | None) -> None:
    """Print the result, and write it to a file if there is one."""
    value["machine"]["load_after"] = load()
    print(text)
    if out is not None:
        write_json(out, value)

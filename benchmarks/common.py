"""What the scripts of this folder share: options, a title, and a place for the figures."""

import argparse
import sys
from pathlib import Path
from typing import Any

import torch

from shoal.app.bench.machine import load, machine, versions
from shoal.app.bench.plan import find_device
from shoal.core.files import write_json

__all__ = ["DOCS", "finish", "options", "parser", "say", "title"]

DOCS = Path(__file__).resolve().parent.parent / "docs" / "benchmarks"


def parser(description: str) -> argparse.ArgumentParser:
    """Options that every script has."""
    made = argparse.ArgumentParser(description=description)
    made.add_argument("--device", help="cpu or cuda; by default a GPU where there is one")
    made.add_argument("--quick", action="store_true", help="small and short: whether it works")
    made.add_argument("--threads", type=int, help="CPU threads")
    made.add_argument("-o", "--out", help="write every figure there as JSON")
    return made


def options(made: argparse.ArgumentParser) -> argparse.Namespace:
    """What was typed, with the device found and the threads set."""
    found = made.parse_args()
    found.device = find_device(found.device)
    if found.threads is not None:
        torch.set_num_threads(found.threads)
    return found


def title(device: torch.device) -> dict[str, Any]:
    """The beginning of a result: the machine, how busy it is, and versions."""
    return {"machine": machine(device), "versions": versions()}


def say(line: str) -> None:
    """Progress."""
    print(line, file=sys.stderr, flush=True)


def finish(value: dict[str, Any], text: str, out: str | None) -> None:
    """Show the result, and keep it if wanted."""
    value["machine"]["load_after"] = load()
    print(text)
    if out is not None:
        write_json(out, value)

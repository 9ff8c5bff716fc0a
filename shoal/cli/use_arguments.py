"""The arguments of `shoal export` and `shoal compress`, which make a run ready for use."""

import argparse

from shoal.cli.arguments import machine, path
from shoal.cli.run_arguments import network

__all__ = ["compress", "export"]


def export(parser: argparse.ArgumentParser) -> None:
    """Arguments of `shoal export`."""
    add = parser.add_argument
    add("run", metavar="RUN", help="folder of a run")
    add("-o", "--out", type=path, metavar="FILE", required=True, help="file: .onnx or .pt2")
    add("--inputs", metavar="FILE", help="file with example inputs: .npz with x, .npy, or .csv")
    add(
        "--weights",
        default="uniform",
        choices=("uniform", "posterior", "stacking"),
        help="weights of the members (default: uniform)",
    )
    add("--members", action="store_true", help="add the outputs of every member")
    add("--quantiles", metavar="Q,Q", type=_levels, help="levels of quantiles, such as 0.05,0.95")
    add("--merge", action="store_true", help="multiply adapters into the weights of their layers")
    add("--precision", choices=("float16", "int8"), help="smaller weights of an .onnx file")
    add("--compile", action="store_true", help="a .pt2 package of compiled code for this machine")
    add("--tolerance", type=float, metavar="D", help="largest allowed difference (default: 1e-5)")
    network(parser)
    machine(parser, device=False)


def compress(parser: argparse.ArgumentParser) -> None:
    """Arguments of `shoal compress`."""
    add = parser.add_argument
    add("run", metavar="RUN", help="folder of a run")
    add("--to", type=int, required=True, metavar="M", help="number of members to keep")
    add(
        "--by",
        default="greedy",
        choices=("greedy", "stacking", "distil"),
        help="how to choose members; distil trains one network that predicts like all of them, "
        "with --to 1 (default: greedy)",
    )
    add("--data", metavar="SPEC", help="data of the run, if the run cannot load its own")
    add("-o", "--out", type=path, metavar="FOLDER", help="folder of the smaller run")
    network(parser)
    machine(parser, device=False)


def _levels(text: str) -> list[float]:
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"levels must be numbers such as 0.05,0.95, not {text!r}"
        ) from None

"""The arguments of commands about a run, and of `shoal adopt`, which makes one."""

import argparse

from shoal.cli.arguments import machine, path

__all__ = [
    "adopt",
    "decide",
    "evaluate",
    "evidence",
    "fidelity",
    "grow",
    "landscape",
    "network",
    "predict",
    "report",
]


def network(parser: argparse.ArgumentParser, required: bool = False) -> None:
    """The function that makes the user's own network."""
    parser.add_argument(
        "--model",
        metavar="MODULE:FUNCTION",
        action="append",
        required=required,
        help="function that makes your own network, such as mynet:build for a function in mynet.py "
        "of this folder; once per architecture",
    )


def adopt(parser: argparse.ArgumentParser) -> None:
    """Arguments of `shoal adopt`."""
    add = parser.add_argument
    add(
        "paths",
        metavar="FOLDER|FILE",
        nargs="+",
        help="files with the weights of one network each, or folders of such files",
    )
    network(parser, required=True)
    add(
        "--likelihood",
        metavar="SPEC",
        help="what the outputs mean: a name, or a TOML table in quotes (default: categorical)",
    )
    add("--data", metavar="SPEC", help="training data: a name, or a TOML table in quotes")
    add("--outputs", metavar="NAME", help="the output to use, for a network that returns several")
    add(
        "-o",
        "--out",
        type=path,
        metavar="RUN",
        help="folder of the run (default: runs/NAME, after the first folder)",
    )


def evaluate(parser: argparse.ArgumentParser) -> None:
    """Arguments of `shoal evaluate`."""
    parser.add_argument("run", metavar="RUN", help="folder of a run")
    parser.add_argument(
        "--data", metavar="SPEC", help="another data set: a name, or a TOML table in quotes"
    )
    parser.add_argument(
        "-o", "--out", type=path, metavar="FILE", help="write the scores to this file as JSON"
    )
    network(parser)
    machine(parser)


def predict(parser: argparse.ArgumentParser) -> None:
    """Arguments of `shoal predict`."""
    parser.add_argument("run", metavar="RUN", help="folder of a run")
    parser.add_argument("file", metavar="FILE", help="file with inputs: .npz with x, .npy, or .csv")
    parser.add_argument(
        "-o",
        "--out",
        type=path,
        metavar="FILE",
        help="write to this .csv or .npz file, not to the screen; a .safetensors file takes the "
        "outputs of every member",
    )
    network(parser)
    machine(parser)


def decide(parser: argparse.ArgumentParser) -> None:
    """Arguments of `shoal decide`."""
    add = parser.add_argument
    add("run", metavar="RUN", help="folder of a run")
    shares = {
        "--error": (0.01, "wished error rate of answers to classes (default: 0.01)"),
        "--confidence": (0.95, "probability that the error rate holds (default: 0.95)"),
        "--level": (0.9, "probability of conformal sets and intervals (default: 0.9)"),
        "--alarms": (0.05, "wished false-alarm rate of OOD detection (default: 0.05)"),
    }
    for name, (default, words) in shares.items():
        add(name, type=float, default=default, metavar="P", help=words)
    add(
        "--score",
        choices=("lac", "aps", "raps"),
        default="aps",
        help="score of conformal sets: lac for the smallest, aps and raps for adaptive ones",
    )
    add("--seed", type=int, default=0, metavar="N", help="seed of the two halves (default: 0)")
    add("--data", metavar="SPEC", help="other held-out data: a name, or a TOML table in quotes")
    add("-o", "--out", type=path, metavar="FILE", help="write the rules to this file as JSON")
    network(parser)
    machine(parser)


def report(parser: argparse.ArgumentParser) -> None:
    """Arguments of `shoal report`."""
    parser.add_argument(
        "runs", metavar="RUN", nargs="+", help="folder of a run, or of several runs"
    )
    parser.add_argument(
        "-o", "--out", type=path, metavar="FILE", help="report file (default: report.html)"
    )
    parser.add_argument("--title", help="title of the report")
    parser.add_argument(
        "--figures", metavar="FOLDER", help="also write every figure as PNG and SVG"
    )
    parser.add_argument(
        "--data", metavar="SPEC", help="evaluate the runs on this data set first: a name or a table"
    )
    network(parser)


def landscape(parser: argparse.ArgumentParser) -> None:
    """Arguments of `shoal landscape`."""
    add = parser.add_argument
    add("run", metavar="RUN", help="folder of a run")
    add(
        "--analyses",
        metavar="A,B",
        help="trajectories, functions, diversity, averaging, line, tunnel, origin-plane, "
        "three-plane, curvature (default: all)",
    )
    add("--parts", dest="analyses", metavar="A,B", help=argparse.SUPPRESS)  # its former name
    add("--quick", action="store_true", help="coarse and fast: checks that everything runs")
    add(
        "--points",
        type=int,
        metavar="N",
        help="grid points along each side of a plane (default: 41)",
    )
    add(
        "--inputs",
        type=int,
        metavar="N",
        help="number of test and of training points (default: 2000)",
    )
    add("--steps", type=int, metavar="N", help="number of steps to train a curve (default: 300)")
    add("--fresh", action="store_true", help="recompute everything")
    add("--data", metavar="SPEC", help="data of the run, if the run cannot load its own")
    network(parser)
    machine(parser)


def evidence(parser: argparse.ArgumentParser) -> None:
    """Arguments of `shoal evidence`."""
    add = parser.add_argument
    add("run", metavar="RUN", help="folder of a run")
    add("--data", metavar="SPEC", help="training data, if the run cannot load its own")
    add(
        "--no-priors",
        action="store_true",
        help="leave out the prior comparison, which takes longest",
    )
    add(
        "--points",
        type=int,
        metavar="N",
        help="number of training points for the curvature (default: 500, and at least 10 per "
        "weight in the last layer)",
    )
    add(
        "--flow-steps",
        type=int,
        default=200,
        metavar="N",
        help="number of steps to fit the flow prior (default: 200)",
    )
    network(parser)
    machine(parser, device=False)


def fidelity(parser: argparse.ArgumentParser) -> None:
    """Arguments of `shoal fidelity`."""
    add = parser.add_argument
    add(
        "run",
        metavar="RUN",
        nargs="?",
        help="folder of a run: sample the posterior of its last layer (needs numpyro)",
    )
    add("--data", metavar="SPEC", help="training data, if the run cannot load its own")
    add("--points", type=int, metavar="N", help="training points of the run (default: all)")
    add("--draws", type=int, default=1000, metavar="N", help="draws per chain (default: 1000)")
    add(
        "--within",
        type=float,
        default=600.0,
        metavar="SECONDS",
        help="longest expected time of sampling (default: 600)",
    )
    network(parser)
    add(
        "--problems",
        metavar="A,B",
        help="linear, regression, classification, digits (default: all)",
    )
    add(
        "--methods",
        metavar="A,B",
        help="each as NAME, NAME:legacy or NAME:calibrated (default: all)",
    )
    add("--seeds", type=int, metavar="N", help="number of seeds (default: 5; with --quick: 1)")
    add("--quick", action="store_true", help="two problems, few methods, few steps")
    add("--reference", action="store_true", help="sample the true posteriors again (needs numpyro)")
    add("--no-figures", action="store_true", help="write no figures")
    add(
        "-o",
        "--out",
        type=path,
        metavar="FOLDER",
        help="folder of the results (default: runs/fidelity)",
    )
    machine(parser, device=False)


def grow(parser: argparse.ArgumentParser) -> None:
    """Arguments of `shoal grow`."""
    parser.add_argument("run", metavar="RUN", help="folder of a run")
    parser.add_argument(
        "changes", metavar="key=value", nargs="*", help="settings that replace those of the run"
    )
    parser.add_argument(
        "--more", type=int, default=5, metavar="M", help="number of new members (default: 5)"
    )
    parser.add_argument(
        "--data", metavar="SPEC", help="training data, if the run cannot load its own"
    )
    parser.add_argument(
        "-o",
        "--out",
        type=path,
        metavar="FOLDER",
        help="folder of the grown run (default: RUN-grown-M)",
    )
    parser.add_argument("--resume", action="store_true", help="continue the run in the folder")
    network(parser)
    machine(parser)

"""The arguments of every command."""

import argparse
import os

__all__ = [
    "bench",
    "compare",
    "data",
    "demo",
    "evaluate",
    "evidence",
    "fidelity",
    "fit",
    "grow",
    "landscape",
    "list",
    "predict",
    "report",
]


_MOST_THREADS = max(1024, 4 * (os.cpu_count() or 1))
"""More threads than any machine needs, and few enough that the system can start them."""


def _threads(text: str) -> int:
    count = _count(text, "threads")
    if count > _MOST_THREADS:
        raise argparse.ArgumentTypeError(
            f"the number of threads is at most {_MOST_THREADS} here, not {text!r}"
        )
    return count


def _jobs(text: str) -> int:
    return _count(text, "jobs")


def _count(text: str, what: str) -> int:
    if not text.isdecimal() or len(text) > 18 or int(text) < 1:
        raise argparse.ArgumentTypeError(f"the number of {what} is 1 or more, not {text!r}")
    return int(text)


def _path(text: str) -> str:
    """A path; an empty text comes from a shell variable that was never set."""
    if not text:
        raise argparse.ArgumentTypeError("the path is empty; give a path or leave the option out")
    return text


def _machine(parser: argparse.ArgumentParser, device: bool = True) -> None:
    parser.add_argument(
        "--threads",
        type=_threads,
        metavar="N",
        help="number of CPU threads (default: 1 for small networks, where more are slower)",
    )
    if device:
        parser.add_argument("--device", help="device to compute on, such as cpu or cuda")


def _workers(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--jobs",
        type=_jobs,
        default=1,
        metavar="N",
        help="processes that share the runs, each with 1 thread or --threads (default: 1)",
    )


def _config(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "config",
        metavar="CONFIG",
        help="TOML file, or name of an experiment (see: shoal list experiments)",
    )
    parser.add_argument(
        "changes",
        metavar="key=value",
        nargs="*",
        help="settings that replace those of the config, such as lr=0.01 or prior.std=0.5",
    )


def demo(parser: argparse.ArgumentParser) -> None:
    """Arguments of `shoal demo`."""
    parser.add_argument(
        "--seeds", type=int, default=3, metavar="N", help="number of seeds per method (default: 3)"
    )
    parser.add_argument("--open", action="store_true", help="open the report in a browser")
    parser.add_argument(
        "-o", "--out", type=_path, metavar="FOLDER", help="folder of all runs (default: runs/demo)"
    )
    _workers(parser)
    _machine(parser, device=False)


def fit(parser: argparse.ArgumentParser) -> None:
    """Arguments of `shoal fit`."""
    _config(parser)
    parser.add_argument(
        "-o",
        "--out",
        type=_path,
        metavar="FOLDER",
        help="folder of the run (default: runs/NAME-METHOD-mMEMBERS-sSEED)",
    )
    parser.add_argument("--resume", action="store_true", help="continue the run in the folder")
    _machine(parser)


def evaluate(parser: argparse.ArgumentParser) -> None:
    """Arguments of `shoal evaluate`."""
    parser.add_argument("run", metavar="RUN", help="folder of a run")
    parser.add_argument(
        "--data", metavar="SPEC", help="another data set: a name, or a TOML table in quotes"
    )
    parser.add_argument(
        "-o", "--out", type=_path, metavar="FILE", help="write the scores to this file as JSON"
    )
    _machine(parser)


def predict(parser: argparse.ArgumentParser) -> None:
    """Arguments of `shoal predict`."""
    parser.add_argument("run", metavar="RUN", help="folder of a run")
    parser.add_argument("file", metavar="FILE", help="file with inputs: .npz with x, .npy, or .csv")
    parser.add_argument(
        "-o",
        "--out",
        type=_path,
        metavar="FILE",
        help="write to this .csv or .npz file, not to the screen",
    )
    _machine(parser)


def compare(parser: argparse.ArgumentParser) -> None:
    """Arguments of `shoal compare`."""
    _config(parser)
    parser.add_argument(
        "--methods",
        metavar="A,B",
        help="methods, each with optional settings and strength, such as forde+fraction=0.25:16; "
        "'all' is the nine published methods (default: plain ensemble and the config's method)",
    )
    parser.add_argument(
        "--strengths", metavar="A,B", help="strengths for each repulsive method, such as 1,10,100"
    )
    parser.add_argument("--sizes", metavar="M,N", help="ensemble sizes (default: the config's)")
    parser.add_argument(
        "--seeds", type=int, default=3, metavar="N", help="number of seeds (default: 3)"
    )
    parser.add_argument(
        "-o", "--out", type=_path, metavar="FOLDER", help="folder of all runs (default: runs/NAME)"
    )
    parser.add_argument("--report", metavar="FILE", help="also write a report, such as report.html")
    _workers(parser)
    _machine(parser)


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
        default=500,
        metavar="N",
        help="number of training points for the curvature (default: 500)",
    )
    add(
        "--flow-steps",
        type=int,
        default=200,
        metavar="N",
        help="number of steps to fit the flow prior (default: 200)",
    )
    _machine(parser, device=False)


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
        type=_path,
        metavar="FOLDER",
        help="folder of the grown run (default: RUN-grown-M)",
    )
    parser.add_argument("--resume", action="store_true", help="continue the run in the folder")
    _machine(parser)


def report(parser: argparse.ArgumentParser) -> None:
    """Arguments of `shoal report`."""
    parser.add_argument(
        "runs", metavar="RUN", nargs="+", help="folder of a run, or of several runs"
    )
    parser.add_argument(
        "-o", "--out", type=_path, metavar="FILE", help="report file (default: report.html)"
    )
    parser.add_argument("--title", help="title of the report")
    parser.add_argument(
        "--figures", metavar="FOLDER", help="also write every figure as PNG and SVG"
    )


def data(parser: argparse.ArgumentParser) -> None:
    """Arguments of `shoal data`."""
    actions = ("list", "get", "path")
    parser.add_argument(
        "action",
        choices=actions,
        metavar="list|get|path",
        help="list, download or locate data sets",
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="names of data sets")


def list(parser: argparse.ArgumentParser) -> None:
    """Arguments of `shoal list`."""
    parser.add_argument(
        "kind", nargs="?", metavar="KIND", help="what to list, such as methods or kernels"
    )


def bench(parser: argparse.ArgumentParser) -> None:
    """Arguments of `shoal bench`."""
    add = parser.add_argument
    add("--models", metavar="A,B", help="mlp, small-cnn, resnet18 (GPU only by default), or none")
    add(
        "--methods", metavar="A,B", help="such as forde+fraction=0.25 (default: ensemble,kde,f-kde)"
    )
    add(
        "--engines",
        metavar="A,B",
        help="auto, vmap, loop or chunk:4, optionally with +eager or +compile",
    )
    add("--members", type=int, metavar="M", help="ensemble size (default: 20; resnet18: 10)")
    add("--batch-size", type=int, default=128, metavar="B", help="batch size (default: 128)")
    add(
        "--precision",
        metavar="A,B",
        help="float32, tf32 or bfloat16 (default: float32; resnet18: bfloat16)",
    )
    add("--optimizer", default="sgd", metavar="NAME", help="optimiser (default: sgd)")
    add(
        "--seconds",
        type=float,
        metavar="S",
        help="seconds per row of the table (default: 5; GPU: 2)",
    )
    add("--quick", action="store_true", help="less data and time: checks that everything runs")
    add("--check", action="store_true", help="also compare each engine with float64 on the CPU")
    add("--train-mnist-like", action="store_true", help="also time 15 epochs of 60,000 points")
    add("-o", "--out", type=_path, metavar="FILE", help="write all results to this file as JSON")
    _machine(parser)


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
    _machine(parser)


def fidelity(parser: argparse.ArgumentParser) -> None:
    """Arguments of `shoal fidelity`."""
    add = parser.add_argument
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
        type=_path,
        metavar="FOLDER",
        help="folder of the results (default: runs/fidelity)",
    )
    _machine(parser, device=False)

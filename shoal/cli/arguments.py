"""The arguments of every verb."""

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
"""More of them than any machine needs, and few enough that the system can start them."""


def _threads(text: str) -> int:
    count = _count(text, "threads")
    if count > _MOST_THREADS:
        raise argparse.ArgumentTypeError(
            f"a number of threads is at most {_MOST_THREADS} here, not {text!r}"
        )
    return count


def _jobs(text: str) -> int:
    return _count(text, "jobs")


def _count(text: str, what: str) -> int:
    if not text.isdecimal() or len(text) > 18 or int(text) < 1:
        raise argparse.ArgumentTypeError(f"a number of {what} is 1 or more, not {text!r}")
    return int(text)


def _path(text: str) -> str:
    """An empty one is a variable of the shell that was never set."""
    if not text:
        raise argparse.ArgumentTypeError("the path is an empty text; leave the option out")
    return text


def _machine(parser: argparse.ArgumentParser, device: bool = True) -> None:
    parser.add_argument(
        "--threads",
        type=_threads,
        metavar="N",
        help="CPU threads; by default 1 for small networks, which more would slow down",
    )
    if device:
        parser.add_argument("--device", help="where to compute, such as cpu or cuda")


def _workers(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--jobs",
        type=_jobs,
        default=1,
        metavar="N",
        help="processes that share the runs, each with 1 thread unless --threads says more (1)",
    )


def _config(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", metavar="CONFIG", help="a TOML file, or an experiment's name")
    parser.add_argument(
        "changes",
        metavar="key=value",
        nargs="*",
        help="changes to the config, as in lr=0.01 or prior.std=0.5",
    )


def demo(parser: argparse.ArgumentParser) -> None:
    """Of `shoal demo`."""
    parser.add_argument("--seeds", type=int, default=3, metavar="N", help="runs of each method (3)")
    parser.add_argument("--open", action="store_true", help="open the page in a browser")
    parser.add_argument(
        "-o", "--out", type=_path, metavar="FOLDER", help="where to keep it (runs/demo)"
    )
    _workers(parser)
    _machine(parser, device=False)


def fit(parser: argparse.ArgumentParser) -> None:
    """Of `shoal fit`."""
    _config(parser)
    parser.add_argument(
        "-o",
        "--out",
        type=_path,
        metavar="FOLDER",
        help="of the run (runs/NAME-METHOD-mMEMBERS-sSEED)",
    )
    parser.add_argument("--resume", action="store_true", help="continue the run in the folder")
    _machine(parser)


def evaluate(parser: argparse.ArgumentParser) -> None:
    """Of `shoal evaluate`."""
    parser.add_argument("run", metavar="RUN", help="folder of a run")
    parser.add_argument(
        "--data", metavar="SPEC", help="other data: a name, or a TOML table in quotes"
    )
    parser.add_argument(
        "-o", "--out", type=_path, metavar="FILE", help="write the scores there as JSON"
    )
    _machine(parser)


def predict(parser: argparse.ArgumentParser) -> None:
    """Of `shoal predict`."""
    parser.add_argument("run", metavar="RUN", help="folder of a run")
    parser.add_argument("file", metavar="FILE", help="inputs: .npz with x, .npy, or .csv")
    parser.add_argument(
        "-o", "--out", type=_path, metavar="FILE", help=".csv or .npz; else the screen"
    )
    _machine(parser)


def compare(parser: argparse.ArgumentParser) -> None:
    """Of `shoal compare`."""
    _config(parser)
    parser.add_argument(
        "--methods",
        metavar="A,B",
        help="methods, each with settings and a strength if wanted, as forde+fraction=0.25:16, "
        "or 'all' for the nine published ones (the config's and the plain ensemble)",
    )
    parser.add_argument(
        "--strengths", metavar="A,B", help="each method that repels at each of these, as 1,10,100"
    )
    parser.add_argument("--sizes", metavar="M,N", help="numbers of members (the config's)")
    parser.add_argument("--seeds", type=int, default=3, metavar="N", help="runs of each (3)")
    parser.add_argument("-o", "--out", type=_path, metavar="FOLDER", help="of all runs (runs/NAME)")
    parser.add_argument("--report", metavar="PAGE", help="also write a page, as page.html")
    _workers(parser)
    _machine(parser)


def evidence(parser: argparse.ArgumentParser) -> None:
    """Of `shoal evidence`."""
    add = parser.add_argument
    add("run", metavar="RUN", help="folder of a run")
    add("--data", metavar="SPEC", help="the training data, where the run cannot load them again")
    add("--no-priors", action="store_true", help="leave out the richer priors, which take longest")
    add("--points", type=int, default=500, metavar="N", help="training data of the curvature (500)")
    add("--flow-steps", type=int, default=200, metavar="N", help="of the flow prior (200)")
    _machine(parser, device=False)


def grow(parser: argparse.ArgumentParser) -> None:
    """Of `shoal grow`."""
    parser.add_argument("run", metavar="RUN", help="folder of a run")
    parser.add_argument(
        "changes", metavar="key=value", nargs="*", help="settings other than the run's own"
    )
    parser.add_argument("--more", type=int, default=5, metavar="M", help="new members (5)")
    parser.add_argument("--data", metavar="SPEC", help="where the run cannot load its own again")
    parser.add_argument(
        "-o", "--out", type=_path, metavar="FOLDER", help="of the grown run (RUN-grown-M)"
    )
    parser.add_argument("--resume", action="store_true", help="continue the run in the folder")
    _machine(parser)


def report(parser: argparse.ArgumentParser) -> None:
    """Of `shoal report`."""
    parser.add_argument("runs", metavar="RUN", nargs="+", help="folder of a run, or of many runs")
    parser.add_argument("-o", "--out", type=_path, metavar="FILE", help="the page (report.html)")
    parser.add_argument("--title", help="of the page")
    parser.add_argument("--figures", metavar="FOLDER", help="also write every figure, PNG and SVG")


def data(parser: argparse.ArgumentParser) -> None:
    """Of `shoal data`."""
    actions = ("list", "get", "path")
    parser.add_argument("action", choices=actions, metavar="list|get|path", help="what to do")
    parser.add_argument("names", nargs="*", metavar="NAME", help="data sets to get, or to find")


def list(parser: argparse.ArgumentParser) -> None:
    """Of `shoal list`."""
    parser.add_argument("kind", nargs="?", metavar="KIND", help="such as methods or kernels")


def bench(parser: argparse.ArgumentParser) -> None:
    """Of `shoal bench`."""
    add = parser.add_argument
    add("--models", metavar="A,B", help="mlp, small-cnn, resnet18 (the last on a GPU), or none")
    add("--methods", metavar="A,B", help="as in forde+fraction=0.25 (ensemble,kde,f-kde)")
    add("--engines", metavar="A,B", help="auto, vmap, loop, chunk:4; with +eager or +compile")
    add("--members", type=int, metavar="M", help="(20; resnet18: 10)")
    add("--batch-size", type=int, default=128, metavar="B", help="(128)")
    add("--precision", metavar="A,B", help="float32, tf32, bfloat16 (float32; resnet18: bfloat16)")
    add("--optimizer", default="sgd", metavar="NAME", help="(sgd)")
    add(
        "--seconds", type=float, metavar="S", help="of measuring each line of the table (5; GPU: 2)"
    )
    add("--quick", action="store_true", help="less data and time: whether it works, not how fast")
    add("--check", action="store_true", help="also compare each engine with float64 on the CPU")
    add("--train-mnist-like", action="store_true", help="also time 15 epochs of 60,000 points")
    add("-o", "--out", type=_path, metavar="FILE", help="write every figure there as JSON")
    _machine(parser)


def landscape(parser: argparse.ArgumentParser) -> None:
    """Of `shoal landscape`."""
    add = parser.add_argument
    add("run", metavar="RUN", help="folder of a run")
    add(
        "--parts",
        metavar="A,B",
        help="trajectories, functions, diversity, averaging, line, tunnel, origin-plane, "
        "three-plane, curvature (all)",
    )
    add("--quick", action="store_true", help="coarse: whether it works, and roughly how it looks")
    add("--points", type=int, metavar="N", help="along each side of a plane (41)")
    add("--inputs", type=int, metavar="N", help="of the test and of the training data (2000)")
    add("--steps", type=int, metavar="N", help="of training a curve (300)")
    add("--fresh", action="store_true", help="compute again what the folder already holds")
    add("--data", metavar="SPEC", help="the run's data, where they cannot be loaded by name")
    _machine(parser)


def fidelity(parser: argparse.ArgumentParser) -> None:
    """Of `shoal fidelity`."""
    add = parser.add_argument
    add("--problems", metavar="A,B", help="linear, regression, classification, digits (all)")
    add("--methods", metavar="A,B", help="each as NAME, NAME:legacy or NAME:calibrated (all)")
    add("--seeds", type=int, metavar="N", help="runs of each (5; quick: 1)")
    add("--quick", action="store_true", help="two problems, few methods and steps")
    add("--reference", action="store_true", help="sample the true posteriors again; needs numpyro")
    add("--no-figures", action="store_true", help="the table alone")
    add("-o", "--out", type=_path, metavar="FOLDER", help="where to keep it (runs/fidelity)")
    _machine(parser, device=False)

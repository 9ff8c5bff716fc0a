"""The arguments of commands that need no run; `run_arguments` has those about a run."""

import argparse
import os

__all__ = [
    "bench",
    "compare",
    "data",
    "demo",
    "doctor",
    "fit",
    "list",
    "machine",
    "path",
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


def _minutes(text: str) -> int:
    return _count(text, "minutes")


def _jobs(text: str) -> int:
    return _count(text, "jobs")


def _retries(text: str) -> int:
    return _count(text, "retries", least=0)


def _count(text: str, what: str, least: int = 1) -> int:
    if not text.isdecimal() or len(text) > 18 or int(text) < least:
        raise argparse.ArgumentTypeError(f"the number of {what} is {least} or more, not {text!r}")
    return int(text)


def _names(text: str) -> tuple[str, ...]:
    return tuple(filter(None, map(str.strip, text.split(","))))


def path(text: str) -> str:
    """A path; an empty text comes from a shell variable that was never set."""
    if not text:
        raise argparse.ArgumentTypeError("the path is empty; give a path or leave the option out")
    return text


def machine(parser: argparse.ArgumentParser, device: bool = True) -> None:
    """Options for threads and, where it can be chosen, the device."""
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
        metavar="N",
        help="processes that share the runs, each with 1 thread or --threads, and with --device "
        "cuda a GPU in turn (default: 1)",
    )
    parser.add_argument(
        "--retries",
        type=_retries,
        default=1,
        metavar="N",
        help="further attempts at a failed run (default: 1)",
    )


def _cluster(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("options for a cluster (needs submitit; see docs/cluster.md)")
    group.add_argument(
        "--submit",
        choices=("slurm", "local"),
        help="submit every run as a job, to SLURM, or to this machine to try it out",
    )
    group.add_argument("--partition", metavar="NAME", help="partition of SLURM")
    group.add_argument(
        "--time",
        type=_minutes,
        default=60,
        metavar="MINUTES",
        help="time limit of a job, after which the run continues in a new job (default: 60)",
    )
    group.add_argument(
        "--request",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="a parameter of submitit, such as mem_gb=32 or slurm_account=bio; can be repeated",
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
        "-o", "--out", type=path, metavar="FOLDER", help="folder of all runs (default: runs/demo)"
    )
    _workers(parser)
    machine(parser, device=False)


def fit(parser: argparse.ArgumentParser) -> None:
    """Arguments of `shoal fit`."""
    _config(parser)
    parser.add_argument(
        "-o",
        "--out",
        type=path,
        metavar="FOLDER",
        help="folder of the run (default: runs/NAME-METHOD-mMEMBERS-sSEED)",
    )
    parser.add_argument("--resume", action="store_true", help="continue the run in the folder")
    shown = {
        "--validation": ("SHARE", "share of the training data to hold out, such as 0.1"),
        "--patience": ("N", "end after N epochs without a lower validation NLL"),
        "--keep": ("best|last", "which members the run ends with (default: best with --patience)"),
    }
    for name, (metavar, words) in shown.items():
        parser.add_argument(name, metavar=metavar, help=words)
    parser.add_argument(
        "--memory",
        metavar="SIZE",
        help="most that the run takes on its device, such as 8GiB, or 0.5 of the device",
    )
    parser.add_argument(
        "--loggers",
        type=_names,
        default=(),
        metavar="A,B",
        help="also log to tensorboard, wandb, mlflow or csv (see docs/loggers.md)",
    )
    machine(parser)


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
        "-o", "--out", type=path, metavar="FOLDER", help="folder of all runs (default: runs/NAME)"
    )
    parser.add_argument("--report", metavar="FILE", help="also write a report, such as report.html")
    _workers(parser)
    machine(parser)
    _cluster(parser)


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


def doctor(parser: argparse.ArgumentParser) -> None:
    """Arguments of `shoal doctor`."""
    parser.add_argument(
        "--try",
        dest="thorough",
        action="store_true",
        help="also import every optional library, and compile a small function",
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
    add(
        "--batch-size",
        type=int,
        metavar="B",
        help="batch size (default: 128; with --predict on a GPU: 1024)",
    )
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
    add("--predict", action="store_true", help="time predictions instead of training steps")
    add("--check", action="store_true", help="also compare each engine with float64 on the CPU")
    add("--train-mnist-like", action="store_true", help="also time 15 epochs of 60,000 points")
    add("-o", "--out", type=path, metavar="FILE", help="write all results to this file as JSON")
    machine(parser)

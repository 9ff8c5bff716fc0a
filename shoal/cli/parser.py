"""The command line after `shoal`: a command and its arguments.

This module imports no torch, so that help appears at once.
"""

import argparse
import difflib
import functools
import os
import sys
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NoReturn

from shoal.core.display.progress import printable
from shoal.core.errors import ConfigError
from shoal.core.registry import nearest
from shoal.experiment.config import keys

__all__ = ["COMMANDS", "Command", "command_help", "overview", "parse"]

Add = Callable[[argparse.ArgumentParser], None]


@dataclass(frozen=True)
class Command:
    """One command of the command line.

    Attributes:
        summary: what the command does, in one line.
        example: what to type, one command per line.
        add: declares the arguments.
        about: further help.
    """

    summary: str
    example: str
    add: Add
    about: str = ""


def _keys(width: int = 96) -> str:
    """The keys of a config, each with its description."""
    described = keys()
    margin = " " * (max(map(len, described)) + 4)
    lines = []
    for typed, doc in described.items():
        start = f"  {typed}".ljust(len(margin))
        lines += textwrap.wrap(doc, width, initial_indent=start, subsequent_indent=margin)
    return "\n".join(lines)


# Arguments that several commands have.

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


def _path(text: str) -> str:
    """A path; an empty text comes from a shell variable that was never set."""
    if not text:
        raise argparse.ArgumentTypeError("the path is empty; give a path or leave the option out")
    return text


def _machine(parser: argparse.ArgumentParser, device: bool = True) -> None:
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
    group = parser.add_argument_group(
        "options for a cluster (needs submitit; see docs/several-gpus.md)"
    )
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


def _network(parser: argparse.ArgumentParser, required: bool = False) -> None:
    """The function that makes the user's own network."""
    parser.add_argument(
        "--model",
        metavar="MODULE:FUNCTION",
        action="append",
        required=required,
        help="function that makes your own network, such as mynet:build for a function in mynet.py "
        "of this folder; once per architecture. The module is imported, so its code runs: name "
        "only code that you trust",
    )


# Arguments of each command.


def _demo(parser: argparse.ArgumentParser) -> None:
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


def _fit(parser: argparse.ArgumentParser) -> None:
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
    shown = {
        "--validation": ("SHARE", "share of the training data to hold out, such as 0.1"),
        "--patience": ("N", "end after N epochs without a lower validation NLL"),
        "--keep": ("best|crps|last", "members the run ends with (default: best with --patience)"),
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
    _machine(parser)


def _margin(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--margin",
        metavar="A=X,B=Y",
        help="differences that do not matter, such as nll=0.01,accuracy=0.005 (these are the "
        "defaults, with ece=0.005, auroc=0.01, and 2%% of the plain value for others)",
    )


def _compare(parser: argparse.ArgumentParser) -> None:
    """Arguments of `shoal compare`."""
    _config(parser)
    parser.add_argument(
        "--methods",
        metavar="A,B",
        help="methods, each with optional settings, options of their runs and strength, such as "
        "forde+fraction=0.25:16, kde+placebo=true:300 or ensemble+batches=own+members=11; "
        "'all' is the nine published methods (default: ensemble and the config's method, or auto)",
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
    parser.add_argument(
        "--equal-cost",
        nargs="?",
        const="all",
        metavar="A,B",
        help="add plain ensembles with the seconds of the dearest method, and placebos: some of "
        "members,longer,own,tuned,placebo (default: all)",
    )
    _margin(parser)
    _workers(parser)
    _machine(parser)
    _cluster(parser)


def _data(parser: argparse.ArgumentParser) -> None:
    """Arguments of `shoal data`."""
    actions = ("list", "get", "path")
    parser.add_argument(
        "action",
        choices=actions,
        metavar="list|get|path",
        help="list, download or locate data sets",
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="names of data sets")


def _list(parser: argparse.ArgumentParser) -> None:
    """Arguments of `shoal list`."""
    parser.add_argument(
        "kind", nargs="?", metavar="KIND", help="what to list, such as methods or kernels"
    )


def _doctor(parser: argparse.ArgumentParser) -> None:
    """Arguments of `shoal doctor`."""
    parser.add_argument(
        "--try",
        dest="thorough",
        action="store_true",
        help="also import every optional library, and compile a small function",
    )


def _bench(parser: argparse.ArgumentParser) -> None:
    """Arguments of `shoal bench`."""
    add = parser.add_argument
    add(
        "--models",
        metavar="A,B",
        help="mlp, small-cnn, resnet18 (GPU only by default), torchvision:NAME, transformers:NAME, "
        "or none",
    )
    add(
        "--methods", metavar="A,B", help="such as forde+fraction=0.25 (default: ensemble,kde,f-kde)"
    )
    add(
        "--engines",
        metavar="A,B",
        help="auto, vmap, loop or chunk:4, optionally with +eager or +compile",
    )
    add(
        "--members",
        type=int,
        metavar="M",
        help="ensemble size (default: 20; resnet18: 10; libraries: 5)",
    )
    add(
        "--batch-size",
        type=int,
        metavar="B",
        help="batch size (default: 128; libraries: 16; with --predict on a GPU: 1024)",
    )
    add(
        "--precision",
        metavar="A,B",
        help="float32, tf32 or bfloat16 (default: float32; resnet18, libraries: bfloat16)",
    )
    add("--optimizer", default="sgd", metavar="NAME", help="optimiser (default: sgd)")
    _bench_kind(parser)
    _machine(parser)


def _bench_kind(parser: argparse.ArgumentParser) -> None:
    """What `shoal bench` times, and for how long."""
    add = parser.add_argument
    add(
        "--batches",
        choices=("common", "own", "common,own"),
        default="common",
        metavar="A,B",
        help="common (all members share them), own, or common,own (default: common)",
    )
    add(
        "--seconds",
        type=float,
        metavar="S",
        help="seconds per row of the table (default: 5; GPU: 2)",
    )
    add("--quick", action="store_true", help="less data and time: checks that everything runs")
    add("--fit", action="store_true", help="time whole calls of fit: their start and their steps")
    add("--predict", action="store_true", help="time predictions instead of training steps")
    add("--check", action="store_true", help="also compare each engine with float64 on the CPU")
    add("--train-mnist-like", action="store_true", help="also time 15 epochs of 60,000 points")
    add("-o", "--out", type=_path, metavar="FILE", help="write all results to this file as JSON")


def _adopt(parser: argparse.ArgumentParser) -> None:
    """Arguments of `shoal adopt`."""
    add = parser.add_argument
    add(
        "paths",
        metavar="FOLDER|FILE",
        nargs="+",
        help="files with the weights of one network each, or folders of such files",
    )
    _network(parser, required=True)
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
        type=_path,
        metavar="RUN",
        help="folder of the run (default: runs/NAME, after the first folder)",
    )


def _evaluate(parser: argparse.ArgumentParser) -> None:
    """Arguments of `shoal evaluate`."""
    parser.add_argument("run", metavar="RUN", help="folder of a run")
    parser.add_argument(
        "--data", metavar="SPEC", help="another data set: a name, or a TOML table in quotes"
    )
    parser.add_argument(
        "-o", "--out", type=_path, metavar="FILE", help="write the scores to this file as JSON"
    )
    _network(parser)
    _machine(parser)


def _predict(parser: argparse.ArgumentParser) -> None:
    """Arguments of `shoal predict`."""
    parser.add_argument("run", metavar="RUN", help="folder of a run")
    parser.add_argument("file", metavar="FILE", help="file with inputs: .npz with x, .npy, or .csv")
    parser.add_argument(
        "-o",
        "--out",
        type=_path,
        metavar="FILE",
        help="write to this .csv or .npz file, not to the screen; a .safetensors file takes the "
        "outputs of every member",
    )
    _network(parser)
    _machine(parser)


def _decide(parser: argparse.ArgumentParser) -> None:
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
    add("-o", "--out", type=_path, metavar="FILE", help="write the rules to this file as JSON")
    _network(parser)
    _machine(parser)


def _report(parser: argparse.ArgumentParser) -> None:
    """Arguments of `shoal report`."""
    parser.add_argument(
        "runs", metavar="RUN", nargs="+", help="folder of a run, or of several runs"
    )
    parser.add_argument(
        "-o", "--out", type=_path, metavar="FILE", help="report file (default: report.html)"
    )
    parser.add_argument("--title", help="title of the report")
    parser.add_argument(
        "--classes", metavar="A,B", help="names of the classes, in the order of the labels"
    )
    parser.add_argument(
        "--figures", metavar="FOLDER", help="also write every figure as PNG and SVG"
    )
    parser.add_argument(
        "--data", metavar="SPEC", help="evaluate the runs on this data set first: a name or a table"
    )
    _margin(parser)
    _network(parser)


def _landscape(parser: argparse.ArgumentParser) -> None:
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
    _network(parser)
    _machine(parser)


def _evidence(parser: argparse.ArgumentParser) -> None:
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
    _network(parser)
    _machine(parser, device=False)


def _fidelity(parser: argparse.ArgumentParser) -> None:
    """Arguments of `shoal fidelity`."""
    add = parser.add_argument
    add(
        "run",
        metavar="RUN",
        nargs="?",
        help="folder of a run: sample the posterior of its last layer (needs numpyro)",
    )
    add("--data", metavar="SPEC", help="training data, if the run cannot load its own")
    add(
        "--subspace",
        type=int,
        metavar="K",
        help="the whole network in K directions through one member, not its last layer",
    )
    add("--points", type=int, metavar="N", help="training points of the run (default: all)")
    add("--draws", type=int, default=1000, metavar="N", help="draws per chain (default: 1000)")
    add(
        "--within",
        type=float,
        default=600.0,
        metavar="SECONDS",
        help="longest expected time of sampling (default: 600)",
    )
    _network(parser)
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


def _grow(parser: argparse.ArgumentParser) -> None:
    """Arguments of `shoal grow`."""
    parser.add_argument("run", metavar="RUN", help="folder of a run")
    parser.add_argument(
        "changes", metavar="key=value", nargs="*", help="settings that replace those of the run"
    )
    parser.add_argument(
        "--more",
        type=int,
        default=5,
        metavar="M",
        help="number of new members; with --until, at most so many at a time (default: 5)",
    )
    parser.add_argument(
        "--until",
        choices=("worth it",),
        help="'worth it': grow in steps until the next member is not worth --price, by validation "
        "data of the run",
    )
    parser.add_argument(
        "--price",
        type=float,
        metavar="NATS",
        help="with --until: the gain in validation NLL that a member must be expected to bring",
    )
    parser.add_argument(
        "--most", type=int, metavar="M", help="with --until: members at which growing stops"
    )
    parser.add_argument(
        "--data", metavar="SPEC", help="training data, if the run cannot load its own"
    )
    parser.add_argument(
        "-o",
        "--out",
        type=_path,
        metavar="FOLDER",
        help="folder of the grown run (default: RUN-grown-M, or RUN-grown with --until)",
    )
    parser.add_argument("--resume", action="store_true", help="continue the run in the folder")
    _network(parser)
    _machine(parser)


def _members(text: str) -> int:
    return _count(text, "members")


def _draws(text: str) -> int:
    return _count(text, "draws")


def _steps(text: str) -> int:
    return _count(text, "steps")


def _steps_or_none(text: str) -> int:
    return _count(text, "steps", least=0)


def _draw(parser: argparse.ArgumentParser) -> None:
    """Arguments of `shoal draw`."""
    add = parser.add_argument
    add("run", metavar="RUN", help="folder of a run")
    add(
        "changes",
        metavar="key=value",
        nargs="*",
        help="settings: sampler.NAME (such as sampler.lr=0.01), prior, temperature, batch_size, "
        "seed, precision (float32, bfloat16 or float64), save_every (seconds), and cache=true to "
        "compute what a frozen trunk gives once",
    )
    add(
        "--sampler",
        default="mclmc",
        metavar="NAME",
        help="sampler, see: shoal list samplers (default: mclmc)",
    )
    add(
        "--draws",
        type=_draws,
        default=1000,
        metavar="K",
        help="draws that each chain keeps (default: 1000)",
    )
    add(
        "--warmup",
        type=_steps_or_none,
        metavar="N",
        help="steps before the first draw (default: 1250; hmc: 500; mini-batches: half of what "
        "follows)",
    )
    add(
        "--thin",
        type=_steps,
        metavar="N",
        help="steps from draw to draw (default: 2; hmc: 1; mini-batches: a quarter of an epoch)",
    )
    add("--data", metavar="SPEC", help="training data, if the run cannot load its own")
    add(
        "-o",
        "--out",
        type=_path,
        metavar="FOLDER",
        help="folder of the run of draws (default: RUN-drawn)",
    )
    add("--resume", action="store_true", help="continue the draws in the folder")
    _network(parser)
    _machine(parser)


def _worth(parser: argparse.ArgumentParser) -> None:
    """Arguments of `shoal worth`."""
    add = parser.add_argument
    add("run", metavar="RUN", help="folder of a run of at least three members")
    add("--data", metavar="SPEC", help="test data: a name, a table, or a file (default: the run's)")
    add(
        "--beside",
        metavar="RUN",
        nargs="*",
        default=(),
        help="other runs, such as a longer training, to compare gain and time with",
    )
    _network(parser)
    _machine(parser)


def _export(parser: argparse.ArgumentParser) -> None:
    """Arguments of `shoal export`."""
    add = parser.add_argument
    add("run", metavar="RUN", help="folder of a run")
    add("-o", "--out", type=_path, metavar="FILE", required=True, help="file: .onnx or .pt2")
    add("--inputs", metavar="FILE", help="file with example inputs: .npz with x, .npy, or .csv")
    add(
        "--weights",
        default="uniform",
        choices=("uniform", "posterior", "stacking"),
        help="weights of the members (default: uniform)",
    )
    add("--members", action="store_true", help="add the outputs of every member")
    add("--most", type=_members, metavar="M", help="write at most M members, evenly spaced")
    add("--quantiles", metavar="Q,Q", type=_levels, help="levels of quantiles, such as 0.05,0.95")
    add("--merge", action="store_true", help="multiply adapters into the weights of their layers")
    add("--precision", choices=("float16", "int8"), help="smaller weights of an .onnx file")
    add("--compile", action="store_true", help="a .pt2 package of compiled code for this machine")
    add("--tolerance", type=float, metavar="D", help="largest allowed difference (default: 1e-5)")
    _network(parser)
    _machine(parser, device=False)


def _compress(parser: argparse.ArgumentParser) -> None:
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
    add("-o", "--out", type=_path, metavar="FOLDER", help="folder of the smaller run")
    _network(parser)
    _machine(parser, device=False)


def _levels(text: str) -> list[float]:
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"levels must be numbers such as 0.05,0.95, not {text!r}"
        ) from None


COMMANDS = {
    "demo": Command(
        "train and compare ensembles on handwritten digits, and write a report",
        "shoal demo\nshoal demo --open",
        _demo,
        "\n\nNothing is downloaded. A report comes after half a minute, a comparison after two.",
    ),
    "fit": Command(
        "train one ensemble and evaluate it",
        "shoal fit digits\n"
        "shoal fit digits method=kde members=10 model.hidden=[50,50] seed=1\n"
        "shoal fit runs/digits-ensemble-m5-s0/config.toml -o runs/again",
        _fit,
        "\n\nCtrl-C saves the run; --resume continues it. Keys of a config and their defaults:\n\n"
        + _keys(),
    ),
    "evaluate": Command(
        "evaluate a run on its test set, shifts and OOD sets",
        "shoal evaluate runs/digits-ensemble-m5-s0\n"
        "shoal evaluate runs/mine --data test.npz\n"
        'shoal evaluate runs/mine --data \'{name = "file", train = "a.npz", test = "b.npz"}\'\n'
        "shoal evaluate runs/mine --model mynet:build --data digits",
        _evaluate,
    ),
    "predict": Command(
        "predict for the inputs in a file, with the uncertainty of each prediction",
        "shoal predict runs/digits-ensemble-m5-s0 new.csv -o predictions.csv",
        _predict,
        "\n\nColumns for classification: class, probability, entropy and disagreement.\n"
        "Columns for regression: mean and stddev.",
    ),
    "decide": Command(
        "fit rules for decisions: when to answer, which classes, which interval, when to alarm",
        "shoal decide runs/digits-ensemble-m5-s0 --error 0.01\n"
        "shoal decide runs/digits-ensemble-m5-s0 --level 0.95 --alarms 0.1 -o rules.json",
        _decide,
        "\n\nThe rules come from a random half of the test set, which the run was not trained on.\n"
        "They are checked on the other half. They hold for new data of the same distribution.",
    ),
    "compare": Command(
        "train a grid of methods, ensemble sizes and seeds, and compare with error bars",
        "shoal compare digits --methods ensemble,kde,f-kde --sizes 1,5 --seeds 5\n"
        "shoal compare digits --methods ensemble,kde,kde:300 epochs=20 --report report.html\n"
        "shoal compare digits --methods ensemble,kde,f-kde --strengths 1,10,100 --jobs 2\n"
        "shoal compare digits --methods kde:300,f-kde:100 --seeds 5 --equal-cost\n"
        "shoal compare mnist --methods all --sizes 1,5,9,13,17 --seeds 5 --device cuda --jobs 6\n"
        "shoal compare mnist --methods all --device cuda --submit slurm --partition gpu --time 90",
        _compare,
        "\n\nThe same command can be typed again at any time: it skips finished runs and\n"
        "continues a stopped run. results.csv has every run. summary.csv has means over the\n"
        "seeds, standard errors, and paired differences to the plain ensemble.",
    ),
    "report": Command(
        "write an HTML report about one or several runs",
        "shoal report runs/digits-ensemble-m5-s0 -o digits.html\nshoal report runs/demo",
        _report,
    ),
    "landscape": Command(
        "analyse the loss landscape around and between the members of a run",
        "shoal landscape runs/digits --quick\n"
        "shoal landscape runs/digits --analyses line,tunnel --fresh",
        _landscape,
        "\n\nThe results stay in the folder of the run, and `shoal report` shows them. Train with\n"
        "keep_every=1 for more analyses: trajectories, SWAG, and averages within a mode.",
    ),
    "evidence": Command(
        "compute log evidence, member weights and learned priors of a run",
        "shoal evidence runs/digits-ensemble-m5-s0\n"
        "shoal evidence runs/digits-ensemble-m5-s0 --no-priors --json",
        _evidence,
        "\n\nThe results stay in the folder of the run, for reports and weighted predictions.",
    ),
    "grow": Command(
        "train more members for a run, repelled by its trained members",
        "shoal grow runs/digits-ensemble-m5-s0 --more 5\n"
        "shoal grow runs/digits-ensemble-m5-s0 --more 5 epochs=30 -o runs/larger\n"
        "shoal grow runs/first --until 'worth it' --price 0.001",
        _grow,
        "\n\nThe trained members stay unchanged. The new folder has all members. --until needs a\n"
        "run with validation data, such as shoal fit digits validation=0.1.",
    ),
    "worth": Command(
        "tell what more members of a run would add, and what they cost",
        "shoal worth runs/digits-ensemble-m5-s0\nshoal worth runs/first --beside runs/longer",
        _worth,
        "\n\nAverages over subsets of the members tell the expected scores of smaller ensembles.\n"
        "Their continuation tells those of larger ones, with an interval.",
    ),
    "draw": Command(
        "sample the posterior: every member of a run becomes a chain and keeps draws",
        "shoal draw runs/digits-ensemble-m5-s0 --draws 200\n"
        "shoal draw runs/digits-ensemble-m5-s0 --sampler sghmc sampler.lr=0.02 batch_size=64",
        _draw,
        "\n\nThe new folder is a run whose members are the draws of all chains. Ctrl-C saves\n"
        "the chains; --resume continues them.",
    ),
    "adopt": Command(
        "make a run of networks that were trained elsewhere, from files with their weights",
        "shoal adopt nets/ --model mynet:build -o runs/mine\n"
        "shoal adopt a.pt b.safetensors --model mynet:build --data digits\n"
        "shoal adopt nets/ --model mynet:build --likelihood '{name = \"gaussian\", noise_std = 1}'",
        _adopt,
        "\n\nFiles: .safetensors, or a state dict by torch.save; Lightning checkpoints too. A file "
        "that\ncould run code is refused. Other commands take the run with the same --model.",
    ),
    "compress": Command(
        "make a smaller run of the best members, and measure what that costs",
        "shoal compress runs/digits-ensemble-m5-s0 --to 3\n"
        "shoal compress runs/digits-ensemble-m5-s0 --to 1 --by distil -o runs/small",
        _compress,
        "\n\nHalf of the held-out data choose members, the other half measures the change of NLL.",
    ),
    "export": Command(
        "write a run to one file for onnxruntime or torch, and compare the file with the run",
        "shoal export runs/digits-ensemble-m5-s0 -o digits.onnx\n"
        "shoal export runs/digits-ensemble-m5-s0 -o digits.pt2 --compile",
        _export,
        "\n\nThe file gives predictions with their uncertainty for any number of inputs. A file\n"
        "that differs from 'shoal predict' is not written.",
    ),
    "fidelity": Command(
        "measure the distance of a run, or of each method, from the true posterior",
        "shoal fidelity runs/first\n"
        "shoal fidelity --quick\n"
        "shoal fidelity --methods ensemble,f-kde:legacy,f-kde:calibrated --seeds 3 -o runs/mine\n"
        "shoal fidelity --reference",
        _fidelity,
        "\n\nWith RUN, the posterior is that of the last layer of the run, given its trunk,\n"
        "or with --subspace that of the whole network in some directions through one member.\n"
        "Without RUN, the problems are small. Their posterior is known, in closed form or from\n"
        "long Markov chains. The same command can be typed again: it skips finished rows.",
    ),
    "data": Command(
        "list data sets, download them, or print the paths of their files",
        "shoal data list\nshoal data get mnist fashion-mnist\nshoal data path mnist",
        _data,
        "\n\nShoal looks for files in the folder SHOAL_DATA, then in the user's cache. It\n"
        "downloads missing files into the cache, and checks every file.",
    ),
    "list": Command(
        "list everything that has a name, such as methods, kernels and models",
        "shoal list\nshoal list methods",
        _list,
    ),
    "doctor": Command(
        "print versions, devices and memory, and what is missing with the command to get it",
        "shoal doctor\nshoal doctor --try\nshoal doctor --json",
        _doctor,
        "\n\nThe exit status is 2 if Shoal cannot work as installed. Missing extras do not count.",
    ),
    "bench": Command(
        "time training on this machine, and compare with a plain loop over modules",
        "shoal bench --quick\n"
        "shoal bench --device cuda --check --train-mnist-like -o gpu.json\n"
        "shoal bench --models mlp --methods ensemble,svgd --engines vmap,vmap+compile\n"
        "shoal bench --fit --models torchvision:resnet50,transformers:llama",
        _bench,
        "\n\nThe inputs are random. Rows that cannot run show the reason. All rows are timed in\n"
        "turns, so that a busy machine disturbs all of them alike.",
    ),
}
"""Every command; `shoal.cli.commands` has a file for each."""


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The command and its options; a mistake gives one line and exit status 2."""
    name, *rest = arguments
    if name not in COMMANDS:
        if name.startswith("-"):
            raise ConfigError(
                f"options come after the command: shoal COMMAND {name}; see shoal --help"
            )
        raise ConfigError(f"there is no command {name!r}; {nearest(name, COMMANDS)}")
    # Intermixed, so that settings may be typed before and after options.
    return _parser(name).parse_intermixed_args(rest, argparse.Namespace(command=name))


def overview() -> str:
    """The text of `shoal --help`."""
    width = max(map(len, COMMANDS)) + 2
    lines = [f"  {name.ljust(width)}{command.summary}" for name, command in COMMANDS.items()]
    commands = "\n".join(lines)
    return (
        "usage: shoal COMMAND [options]\n\n"
        "Train deep ensembles as Bayesian particle systems, evaluate them, and report on them.\n\n"
        f"{commands}\n\n"
        "Start with 'shoal demo'. 'shoal COMMAND --help' shows the options and an example.\n"
    )


def command_help(name: str, width: int) -> str:
    """The text of `shoal NAME --help`, for a page of this width."""
    parser = _parser(name)
    parser.formatter_class = functools.partial(argparse.RawDescriptionHelpFormatter, width=width)
    return parser.format_help().strip()


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        # argparse names every missing argument, also those with nargs="*", which are optional.
        for action in self._actions:
            if action.nargs == "*":
                message = message.replace(f", {action.metavar}", "")
        unknown = message.removeprefix("unrecognized arguments: ").split(" ")[0]
        if unknown != message.split(" ")[0] and unknown.startswith("-"):
            message = f"there is no option '{unknown}'{self._like(unknown)}"
        print(f"shoal: {printable(message)}; see {self.prog} --help", file=sys.stderr)
        sys.exit(2)

    def _like(self, unknown: str) -> str:
        name = unknown.partition("=")[0]
        key = name.lstrip("-").replace("-", "_")
        changed = any(action.dest == "changes" for action in self._actions)
        if changed and key in {typed.partition("=")[0] for typed in keys()}:
            return f"; write {key}=VALUE without dashes"
        near = difflib.get_close_matches(name, list(self._option_string_actions), 1)
        return f"; did you mean '{near[0]}'?" if near else ""


def _parser(name: str) -> _Parser:
    command = COMMANDS[name]
    example = "\n".join(f"  {line}" for line in command.example.splitlines())
    parser = _Parser(
        prog=f"shoal {name}",
        description=f"{command.summary[:1].upper()}{command.summary[1:]}.{command.about}",
        epilog=f"example:\n{example}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    command.add(parser)
    common = parser.add_argument_group("options of every command")
    common.add_argument(
        "-q", "--quiet", action="store_true", help="print the result without progress"
    )
    common.add_argument(
        "--json", action="store_true", help="print the result as JSON and nothing else"
    )
    common.add_argument("--debug", action="store_true", help="show where an error came from")
    return parser

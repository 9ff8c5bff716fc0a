"""The command line after `shoal`: a command and its arguments.

This module imports no torch, so that help appears at once.
"""

import argparse
import difflib
import functools
import sys
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NoReturn

from shoal.cli import arguments, run_arguments, use_arguments
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


COMMANDS = {
    "demo": Command(
        "train and compare ensembles on handwritten digits, and write a report",
        "shoal demo\nshoal demo --open",
        arguments.demo,
        "\n\nThe demo takes a minute or two, downloads nothing, and ends with an HTML report.",
    ),
    "fit": Command(
        "train one ensemble and evaluate it",
        "shoal fit digits\n"
        "shoal fit digits method=kde members=10 model.hidden=[50,50] seed=1\n"
        "shoal fit runs/digits-f-kde-m5-s0/config.toml -o runs/again",
        arguments.fit,
        "\n\nCtrl-C saves the run; --resume continues it. Keys of a config and their defaults:\n\n"
        + _keys(),
    ),
    "evaluate": Command(
        "evaluate a run on its test set, shifts and OOD sets",
        "shoal evaluate runs/digits-f-kde-m5-s0\n"
        'shoal evaluate runs/mine --data \'{name = "file", train = "a.npz", test = "b.npz"}\'\n'
        "shoal evaluate runs/mine --model mynet:build --data digits",
        run_arguments.evaluate,
    ),
    "predict": Command(
        "predict for the inputs in a file, with the uncertainty of each prediction",
        "shoal predict runs/digits-f-kde-m5-s0 new.csv -o predictions.csv",
        run_arguments.predict,
        "\n\nColumns for classification: class, probability, entropy and disagreement.\n"
        "Columns for regression: mean and stddev.",
    ),
    "decide": Command(
        "fit rules for decisions: when to answer, which classes, which interval, when to alarm",
        "shoal decide runs/digits-f-kde-m5-s0 --error 0.01\n"
        "shoal decide runs/digits-f-kde-m5-s0 --level 0.95 --alarms 0.1 -o rules.json",
        run_arguments.decide,
        "\n\nThe rules come from a random half of the test set, which the run was not trained on.\n"
        "They are checked on the other half. They hold for new data of the same distribution.",
    ),
    "compare": Command(
        "train a grid of methods, ensemble sizes and seeds, and compare with error bars",
        "shoal compare digits --methods ensemble,kde,f-kde --sizes 1,5 --seeds 5\n"
        "shoal compare digits --methods ensemble,kde,kde:300 epochs=20 --report report.html\n"
        "shoal compare digits --methods ensemble,kde,f-kde --strengths 1,10,100 --jobs 2\n"
        "shoal compare mnist --methods all --sizes 1,5,9,13,17 --seeds 5 --device cuda --jobs 6\n"
        "shoal compare mnist --methods all --device cuda --submit slurm --partition gpu --time 90",
        arguments.compare,
        "\n\nThe same command can be typed again at any time: it skips finished runs and\n"
        "continues a stopped run. results.csv has every run. summary.csv has means over the\n"
        "seeds, standard errors, and paired differences to the plain ensemble.",
    ),
    "report": Command(
        "write an HTML report about one or several runs",
        "shoal report runs/digits-f-kde-m5-s0 -o digits.html\nshoal report runs/demo",
        run_arguments.report,
    ),
    "landscape": Command(
        "analyse the loss landscape around and between the members of a run",
        "shoal landscape runs/digits --quick\n"
        "shoal landscape runs/digits --analyses line,tunnel --fresh",
        run_arguments.landscape,
        "\n\nThe results stay in the folder of the run, and `shoal report` shows them. Train with\n"
        "keep_every=1 for more analyses: trajectories, SWAG, and averages within a mode.",
    ),
    "evidence": Command(
        "compute log evidence, member weights and learned priors of a run",
        "shoal evidence runs/digits-f-kde-m5-s0\n"
        "shoal evidence runs/digits-f-kde-m5-s0 --no-priors --json",
        run_arguments.evidence,
        "\n\nThe results stay in the folder of the run, for reports and weighted predictions.",
    ),
    "grow": Command(
        "train more members for a run, repelled by its trained members",
        "shoal grow runs/digits-f-kde-m5-s0 --more 5\n"
        "shoal grow runs/digits-f-kde-m5-s0 --more 5 epochs=30 -o runs/larger",
        run_arguments.grow,
        "\n\nThe trained members stay unchanged. The new folder has all members.",
    ),
    "adopt": Command(
        "make a run of networks that were trained elsewhere, from files with their weights",
        "shoal adopt nets/ --model mynet:build -o runs/mine\n"
        "shoal adopt a.pt b.safetensors --model mynet:build --data digits\n"
        "shoal adopt nets/ --model mynet:build --likelihood '{name = \"gaussian\", noise_std = 1}'",
        run_arguments.adopt,
        "\n\nFiles: .safetensors, or a state dict by torch.save; Lightning checkpoints too. A file "
        "that\ncould run code is refused. Other commands take the run with the same --model.",
    ),
    "compress": Command(
        "make a smaller run of the best members, and measure what that costs",
        "shoal compress runs/digits-f-kde-m5-s0 --to 3\n"
        "shoal compress runs/digits-f-kde-m5-s0 --to 1 --by distil -o runs/small",
        use_arguments.compress,
        "\n\nHalf of the held-out data choose members, the other half measures the change of NLL.",
    ),
    "export": Command(
        "write a run to one file for onnxruntime or torch, and compare the file with the run",
        "shoal export runs/digits-f-kde-m5-s0 -o digits.onnx\n"
        "shoal export runs/digits-f-kde-m5-s0 -o digits.pt2 --compile",
        use_arguments.export,
        "\n\nThe file gives predictions with their uncertainty for any number of inputs. A file\n"
        "that differs from 'shoal predict' is not written.",
    ),
    "fidelity": Command(
        "measure the distance of a run, or of each method, from the true posterior",
        "shoal fidelity runs/first\n"
        "shoal fidelity --quick\n"
        "shoal fidelity --methods ensemble,f-kde:legacy,f-kde:calibrated --seeds 3 -o runs/mine\n"
        "shoal fidelity --reference",
        run_arguments.fidelity,
        "\n\nWith RUN, the posterior is that of the last layer of the run, given its trunk.\n"
        "Without RUN, the problems are small. Their posterior is known, in closed form or from\n"
        "long Markov chains. The same command can be typed again: it skips finished rows.",
    ),
    "data": Command(
        "list data sets, download them, or print the paths of their files",
        "shoal data list\nshoal data get mnist fashion-mnist\nshoal data path mnist",
        arguments.data,
        "\n\nShoal looks for files in the folder SHOAL_DATA, then in the user's cache. It\n"
        "downloads missing files into the cache, and checks every file.",
    ),
    "list": Command(
        "list everything that has a name, such as methods, kernels and models",
        "shoal list\nshoal list methods",
        arguments.list,
    ),
    "doctor": Command(
        "print versions, devices and memory, and what is missing with the command to get it",
        "shoal doctor\nshoal doctor --try\nshoal doctor --json",
        arguments.doctor,
        "\n\nThe exit status is 2 if Shoal cannot work as installed. Missing extras do not count.",
    ),
    "bench": Command(
        "time training on this machine, and compare with a plain loop over modules",
        "shoal bench --quick\n"
        "shoal bench --device cuda --check --train-mnist-like -o gpu.json\n"
        "shoal bench --models mlp --methods ensemble,svgd --engines vmap,vmap+compile",
        arguments.bench,
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

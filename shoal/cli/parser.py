"""What was typed after `shoal`: a verb and its arguments.

Nothing here imports torch, so that help is there at once.
"""

import argparse
import difflib
import sys
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NoReturn

from shoal.cli import arguments
from shoal.core.errors import ConfigError
from shoal.core.progress import printable
from shoal.core.registry import nearest
from shoal.experiment.config import keys

__all__ = ["VERBS", "Command", "overview", "parse"]

Add = Callable[[argparse.ArgumentParser], None]


@dataclass(frozen=True)
class Command:
    """One thing that the command line can do.

    Attributes:
        summary: what it does, in a line.
        example: what to type, one command a line.
        add: declares its arguments.
        about: more to know.
    """

    summary: str
    example: str
    add: Add
    about: str = ""


def _keys(width: int = 96) -> str:
    """The keys of a config, each with what it is."""
    told = keys()
    margin = " " * (max(map(len, told)) + 4)
    lines = []
    for typed, doc in told.items():
        start = f"  {typed}".ljust(len(margin))
        lines += textwrap.wrap(doc, width, initial_indent=start, subsequent_indent=margin)
    return "\n".join(lines)


VERBS = {
    "demo": Command(
        "train, compare and show ensembles on handwritten digits",
        "shoal demo\nshoal demo --open",
        arguments.demo,
        "\n\nTakes a minute or two; nothing is downloaded. Ends with one page to look at.",
    ),
    "fit": Command(
        "train one ensemble and judge it",
        "shoal fit digits\n"
        "shoal fit digits method=kde members=10 model.hidden=[50,50] seed=1\n"
        "shoal fit runs/digits-f-kde-m5-s0/config.toml -o runs/again",
        arguments.fit,
        "\n\nCtrl-C saves first; --resume goes on. The keys of a config, with their defaults:\n\n"
        + _keys(),
    ),
    "evaluate": Command(
        "judge a run on test data, shifted data and foreign data",
        "shoal evaluate runs/digits-f-kde-m5-s0\n"
        'shoal evaluate runs/mine --data \'{name = "file", train = "a.npz", test = "b.npz"}\'',
        arguments.evaluate,
    ),
    "predict": Command(
        "predict for the inputs in a file, with how sure each prediction is",
        "shoal predict runs/digits-f-kde-m5-s0 new.csv -o predictions.csv",
        arguments.predict,
        "\n\nColumns: class, probability, entropy and disagreement; or mean and stddev.",
    ),
    "compare": Command(
        "train methods, sizes and seeds, and compare them with error bars",
        "shoal compare digits --methods ensemble,kde,f-kde --sizes 1,5 --seeds 5\n"
        "shoal compare digits --methods ensemble,kde,kde:300 epochs=20 --report page.html\n"
        "shoal compare digits --methods ensemble,kde,f-kde --strengths 1,10,100 --jobs 2\n"
        "shoal compare mnist --methods all --sizes 1,5,9,13,17 --seeds 5 --device cuda --jobs 6",
        arguments.compare,
        "\n\nRuns that are done are skipped and one that was stopped goes on, so the same command\n"
        "can be typed again at any time. results.csv has every run, summary.csv means over the\n"
        "seeds with standard errors and paired differences to the plain ensemble.",
    ),
    "report": Command(
        "write one page about one or several runs",
        "shoal report runs/digits-f-kde-m5-s0 -o digits.html\nshoal report runs/demo",
        arguments.report,
    ),
    "landscape": Command(
        "look at what lies around and between the members of a run",
        "shoal landscape runs/digits --quick\n"
        "shoal landscape runs/digits --parts line,tunnel --fresh",
        arguments.landscape,
        "\n\nThe results stay in the folder of the run, and shoal report shows them. A run\n"
        "trained with keep_every=1 has more to show: trajectories, SWAG, averages within a mode.",
    ),
    "evidence": Command(
        "tell in what sense a run is Bayesian: evidence, weights of members, learned priors",
        "shoal evidence runs/digits-f-kde-m5-s0\n"
        "shoal evidence runs/digits-f-kde-m5-s0 --no-priors --json",
        arguments.evidence,
        "\n\nKept in the folder of the run, for its page and for weighted predictions.",
    ),
    "grow": Command(
        "train more members for a run, repelled by those it has",
        "shoal grow runs/digits-f-kde-m5-s0 --more 5\n"
        "shoal grow runs/digits-f-kde-m5-s0 --more 5 epochs=30 -o runs/larger",
        arguments.grow,
        "\n\nThe old members stay as they are; the new folder has all of them.",
    ),
    "fidelity": Command(
        "measure how far each method is from the true posterior",
        "shoal fidelity --quick\n"
        "shoal fidelity --methods ensemble,f-kde:legacy,f-kde:calibrated --seeds 3 -o runs/mine\n"
        "shoal fidelity --reference",
        arguments.fidelity,
        "\n\nSmall problems whose posterior is known, in closed form or from long Markov chains.\n"
        "Rows that are done are skipped, so the same command can be typed again at any time.",
    ),
    "data": Command(
        "list the data sets, get some, or say where data files are kept",
        "shoal data list\nshoal data get mnist fashion-mnist\nshoal data path mnist",
        arguments.data,
        "\n\nFiles are looked for in the folder that SHOAL_DATA names, then in the user's cache,\n"
        "and downloaded into the cache when they are in neither; every file is checked.",
    ),
    "list": Command(
        "list everything that has a name, such as methods, kernels and models",
        "shoal list\nshoal list methods",
        arguments.list,
    ),
    "bench": Command(
        "time training on this machine, beside a plain loop over modules",
        "shoal bench --quick\n"
        "shoal bench --device cuda --check --train-mnist-like -o gpu.json\n"
        "shoal bench --models mlp --methods ensemble,svgd --engines vmap,vmap+compile",
        arguments.bench,
        "\n\nRandom inputs. What cannot run here is shown with the reason. Every line is timed in\n"
        "turns with the others, so that a busy machine disturbs all of them alike.",
    ),
}
"""Every verb; `shoal.cli.commands` has a file for each."""


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The verb and its options; what is wrong is said in one line, with exit status 2."""
    verb, *rest = arguments
    if verb not in VERBS:
        if verb.startswith("-"):
            raise ConfigError(f"options come after the verb: shoal VERB {verb}; see shoal --help")
        raise ConfigError(f"there is no verb {verb!r}; {nearest(verb, VERBS)}")
    # Intermixed, so that changes may be typed before and after options.
    return _parser(verb).parse_intermixed_args(rest, argparse.Namespace(verb=verb))


def overview() -> str:
    """The answer to `shoal --help`."""
    width = max(map(len, VERBS)) + 2
    verbs = "\n".join(f"  {name.ljust(width)}{verb.summary}" for name, verb in VERBS.items())
    return (
        "usage: shoal VERB [options]\n\n"
        "Deep ensembles as Bayesian particle systems: trained, judged, and shown on one page.\n\n"
        f"{verbs}\n\n"
        "Begin with 'shoal demo'. 'shoal VERB --help' tells what a verb takes, with an example.\n"
    )


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        # Said of everything that has not been given, though what may be repeated need not be.
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
        near = difflib.get_close_matches(name, list(self._option_string_actions), 1)
        return f"; did you mean '{near[0]}'?" if near else ""


def _parser(name: str) -> _Parser:
    verb = VERBS[name]
    example = "\n".join(f"  {line}" for line in verb.example.splitlines())
    parser = _Parser(
        prog=f"shoal {name}",
        description=f"{verb.summary[:1].upper()}{verb.summary[1:]}.{verb.about}",
        epilog=f"example:\n{example}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    verb.add(parser)
    common = parser.add_argument_group("always")
    common.add_argument("-q", "--quiet", action="store_true", help="no progress, only the result")
    common.add_argument("--json", action="store_true", help="the result as JSON, nothing else")
    common.add_argument("--debug", action="store_true", help="show where an error came from")
    return parser

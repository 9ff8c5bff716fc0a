"""What can be typed after `shoal`: verbs, their arguments, and an example of each.

Nothing here imports torch, so that help is there at once.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NoReturn

from shoal.core.errors import ConfigError
from shoal.core.registry import nearest

__all__ = ["VERBS", "Verb", "overview", "parse"]

Add = Callable[[argparse.ArgumentParser], None]


@dataclass(frozen=True)
class Verb:
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
        # Said of everything that has not been given, though changes need not be.
        message = message.replace("CONFIG, key=value", "CONFIG")
        print(f"shoal: {message}; see {self.prog} --help", file=sys.stderr)
        sys.exit(2)


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


def _threads(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"a number of threads is 1 or more, not {text!r}")
    return int(text)


def _machine(parser: argparse.ArgumentParser, device: bool = True) -> None:
    parser.add_argument(
        "--threads",
        type=_threads,
        metavar="N",
        help="CPU threads; by default 1 for small networks, which more would slow down",
    )
    if device:
        parser.add_argument("--device", help="where to compute, such as cpu or cuda")


def _config(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", metavar="CONFIG", help="a TOML file, or an experiment's name")
    parser.add_argument(
        "changes",
        metavar="key=value",
        nargs="*",
        help="changes to the config, as in lr=0.01 or prior.std=0.5",
    )


def _demo(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seeds", type=int, default=3, metavar="N", help="runs of each method (3)")
    parser.add_argument("--open", action="store_true", help="open the page in a browser")
    parser.add_argument("-o", "--out", metavar="FOLDER", help="where to keep it (runs/demo)")
    _machine(parser, device=False)


def _fit(parser: argparse.ArgumentParser) -> None:
    _config(parser)
    parser.add_argument(
        "-o", "--out", metavar="FOLDER", help="of the run (runs/NAME-METHOD-mMEMBERS-sSEED)"
    )
    parser.add_argument("--resume", action="store_true", help="continue the run in the folder")
    _machine(parser)


def _evaluate(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help="folder of a run")
    parser.add_argument(
        "--data", metavar="SPEC", help="other data: a name, or a TOML table in quotes"
    )
    parser.add_argument("-o", "--out", metavar="FILE", help="write the scores there as JSON")
    _machine(parser)


def _predict(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help="folder of a run")
    parser.add_argument("file", metavar="FILE", help="inputs: .npz with x, .npy, or .csv")
    parser.add_argument("-o", "--out", metavar="FILE", help=".csv or .npz; else the screen")
    _machine(parser)


def _compare(parser: argparse.ArgumentParser) -> None:
    _config(parser)
    parser.add_argument(
        "--methods",
        metavar="A,B",
        help="methods, each with a strength after a colon if wanted, or 'all' "
        "(the config's and the plain ensemble)",
    )
    parser.add_argument("--sizes", metavar="M,N", help="numbers of members (the config's)")
    parser.add_argument("--seeds", type=int, default=3, metavar="N", help="runs of each (3)")
    parser.add_argument("-o", "--out", metavar="FOLDER", help="of all runs (runs/NAME)")
    parser.add_argument("--report", metavar="PAGE", help="also write a page, as page.html")
    _machine(parser)


def _report(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", metavar="RUN", nargs="+", help="folder of a run, or of many runs")
    parser.add_argument("-o", "--out", metavar="FILE", help="the page (report.html)")
    parser.add_argument("--title", help="of the page")


def _data(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("action", choices=("list", "get", "path"), help="what to do")
    parser.add_argument("name", nargs="?", metavar="NAME", help="data set to get")


def _list(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("kind", nargs="?", metavar="KIND", help="such as methods or kernels")


def _bench(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--models", metavar="A,B", help="mlp, small-cnn, resnet18 (the last on a GPU), or none")
    add("--methods", metavar="A,B", help="(ensemble,kde,f-kde)")
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
    add("-o", "--out", metavar="FILE", help="write every figure there as JSON")
    _machine(parser)


def _fidelity(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--problems", metavar="A,B", help="linear, regression, classification, digits (all)")
    add("--methods", metavar="A,B", help="each as NAME, NAME:legacy or NAME:calibrated (all)")
    add("--seeds", type=int, metavar="N", help="runs of each (5; quick: 1)")
    add("--quick", action="store_true", help="two problems, few methods and steps")
    add("--reference", action="store_true", help="sample the true posteriors again; needs numpyro")
    add("--no-figures", action="store_true", help="the table alone")
    add("-o", "--out", metavar="FOLDER", help="where to keep it (runs/fidelity)")
    _machine(parser, device=False)


VERBS = {
    "demo": Verb(
        "train, compare and show ensembles on handwritten digits",
        "shoal demo\nshoal demo --open",
        _demo,
        "\n\nTakes a minute or two; nothing is downloaded. Ends with one page to look at.",
    ),
    "fit": Verb(
        "train one ensemble and judge it",
        "shoal fit digits\n"
        "shoal fit digits method=kde members=10 model.hidden=[50,50] seed=1\n"
        "shoal fit runs/digits-f-kde-m5-s0/config.toml -o runs/again",
        _fit,
        "\n\nCtrl-C saves first; --resume goes on. The keys are the arguments of shoal.fit, and\n"
        "data, model, members and out.",
    ),
    "evaluate": Verb(
        "judge a run on test data, shifted data and foreign data",
        "shoal evaluate runs/digits-f-kde-m5-s0\n"
        'shoal evaluate runs/mine --data \'{name = "file", train = "a.npz", test = "b.npz"}\'',
        _evaluate,
    ),
    "predict": Verb(
        "predict for the inputs in a file, with how sure each prediction is",
        "shoal predict runs/digits-f-kde-m5-s0 new.csv -o predictions.csv",
        _predict,
        "\n\nColumns: class, probability, entropy and disagreement; or mean and stddev.",
    ),
    "compare": Verb(
        "train methods, sizes and seeds, and compare them with error bars",
        "shoal compare digits --methods ensemble,kde,f-kde --sizes 1,5 --seeds 5\n"
        "shoal compare digits --methods ensemble,kde,kde:300 epochs=20 --report page.html",
        _compare,
        "\n\nRuns that are done are skipped and one that was stopped goes on, so the same command\n"
        "can be typed again at any time.",
    ),
    "report": Verb(
        "write one page about one or several runs",
        "shoal report runs/digits-f-kde-m5-s0 -o digits.html\nshoal report runs/demo",
        _report,
    ),
    "fidelity": Verb(
        "measure how far each method is from the true posterior",
        "shoal fidelity --quick\n"
        "shoal fidelity --methods ensemble,f-kde:legacy,f-kde:calibrated --seeds 3 -o runs/mine\n"
        "shoal fidelity --reference",
        _fidelity,
        "\n\nSmall problems whose posterior is known, in closed form or from long Markov chains.\n"
        "Rows that are done are skipped, so the same command can be typed again at any time.",
    ),
    "data": Verb(
        "list the data sets, load one, or say where data files are kept",
        "shoal data list\nshoal data get digits",
        _data,
    ),
    "list": Verb(
        "list everything that has a name, such as methods, kernels and models",
        "shoal list\nshoal list methods",
        _list,
    ),
    "bench": Verb(
        "time training on this machine, beside a plain loop over modules",
        "shoal bench --quick\n"
        "shoal bench --device cuda --check --train-mnist-like -o gpu.json\n"
        "shoal bench --models mlp --methods ensemble,svgd --engines vmap,vmap+compile",
        _bench,
        "\n\nRandom inputs. What cannot run here is shown with the reason. Every line is timed in\n"
        "turns with the others, so that a busy machine disturbs all of them alike.",
    ),
}
"""Every verb; `shoal.app.commands` has a file for each."""

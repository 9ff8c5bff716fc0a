"""What was typed after `shoal`: a verb and its arguments.

Nothing here imports torch, so that help is there at once.
"""

import argparse
import difflib
import sys
from collections.abc import Sequence
from typing import NoReturn

from shoal.app.verbs import VERBS
from shoal.core.errors import ConfigError
from shoal.core.notices import printable
from shoal.core.registry import nearest

__all__ = ["overview", "parse"]


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

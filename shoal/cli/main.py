"""The command line: runs a command, prints its result or one error line, returns its status."""

import gc
import importlib
import os
import sys
import traceback
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import copy_context
from typing import Any

from shoal.cli import ranks
from shoal.cli.parser import overview, parse
from shoal.core.caller import calling
from shoal.core.display.progress import printable, quiet
from shoal.core.errors import ShoalError, ShoalWarning, named_line
from shoal.core.interruption import Interruption
from shoal.core.storage.formats import to_json
from shoal.experiment.config import load_config

__all__ = ["main"]

_FAULT = 70
_INTERRUPTED = 130
_PIPE_CLOSED = 141
_NO_MEMORY = ("not enough memory", "allocate memory", "out of memory")
_RESUMABLE = {
    "fit": "add --resume to continue",
    "compare": "type the same command again to continue",
}
_RESUMABLE |= dict.fromkeys(("grow", "draw"), _RESUMABLE["fit"])
_RESUMABLE |= dict.fromkeys(("demo", "landscape"), _RESUMABLE["compare"])


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        arguments: the words after `shoal`; by default those of this process.

    Returns:
        The exit status: 0 success, 2 usage or config, 65 bad data, 74 input or output, 70 a fault
        in Shoal, 130 and 143 stopped by a signal.
    """
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    try:
        # in a context of its own: `--quiet` holds for this command and not for the caller's next
        status = copy_context().run(_command, arguments)
        sys.stdout.flush()
        return status
    except BrokenPipeError:
        # The reader is gone; buffered output must not raise again when Python exits.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _PIPE_CLOSED
    except KeyboardInterrupt:
        return _stopped(arguments, _INTERRUPTED)
    except SystemExit as stop:
        status = stop.code if isinstance(stop.code, int) else 0
        return _stopped(arguments, status) if status > 128 else status
    except Exception as error:
        if _is_interruption(error):
            return _stopped(arguments, _INTERRUPTED)
        if not isinstance(error, ShoalError):
            return _unforeseen(error, arguments)
        if ranks.speaks(error):
            _complain(str(error))
        _trace(arguments)
        return error.exit_status


def _command(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(overview(), end="")
        return 0
    if arguments[0] == "--version":
        from importlib.metadata import version

        print(f"shoal {version('shoal')}")
        return 0
    options = parse(arguments)
    if ranks.waits(options.command):
        return 0
    quiet.set(options.quiet or options.json or not ranks.speaks())
    if getattr(options, "threads", None) is not None:
        os.environ["OMP_NUM_THREADS"] = str(options.threads)
    if not options.debug:
        warnings.showwarning = _show_warning
    if hasattr(options, "config"):
        # Before torch is imported, so that an error in a config appears at once.
        options.config = load_config(options.config, options.changes)
    # An interrupted import would leave a partly imported library behind.
    with Interruption() as interruption, _nothing_to_collect():
        command = importlib.import_module(f"shoal.cli.commands.{options.command}")
    if interruption.received is not None:
        interruption.stop()
    with calling("command line"):
        outcome = command.run(options)
    if ranks.speaks():
        print(to_json(outcome.value, indent=2) if options.json else printable(outcome.text))
    return outcome.status


@contextmanager
def _nothing_to_collect() -> Iterator[None]:
    """A block of imports: what they make stays, so garbage collection would search in vain."""
    first = "torch" not in sys.modules and gc.isenabled()
    if first:
        gc.disable()
    try:
        yield
    finally:
        if first:
            gc.freeze()
            gc.enable()


def _complain(sentence: str) -> None:
    print(f"shoal: {printable(' '.join(sentence.split()))}", file=sys.stderr)


def _stopped(arguments: list[str], status: int) -> int:
    if not ranks.speaks():
        return status
    advice = _RESUMABLE.get(arguments[0] if arguments else "")
    _complain(f"stopped; {advice}" if advice else "stopped")
    return status


def _is_interruption(error: BaseException | None) -> bool:
    """Whether Ctrl-C caused the error; an import can turn Ctrl-C into another error."""
    while error is not None:
        if isinstance(error, KeyboardInterrupt):
            return True
        error = error.__cause__ or error.__context__
    return False


def _unforeseen(error: Exception, arguments: list[str]) -> int:
    if isinstance(error, MemoryError) or any(words in str(error) for words in _NO_MEMORY):
        _complain(
            "there is not enough memory; use fewer members, smaller networks or smaller batches"
        )
        _trace(arguments)
        return 2
    _complain(f"{named_line(error)}; this is a fault in Shoal; run again with --debug to see where")
    _trace(arguments)
    return _FAULT


def _trace(arguments: list[str]) -> None:
    if "--debug" in arguments:
        traceback.print_exc()


def _show_warning(message: Warning | str, category: type[Warning], *_: Any, **__: Any) -> None:
    """Print a warning of Shoal as one line; warnings of other libraries need --debug."""
    if issubclass(category, ShoalWarning) and ranks.speaks():
        _complain(f"note: {message}")


if __name__ == "__main__":
    sys.exit(main())

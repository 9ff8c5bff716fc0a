"""Help: there at once, for every command, with an example that parses."""

import runpy
import shlex
import subprocess
import sys

import pytest

from shoal.cli.parser import COMMANDS, overview, parse
from shoal.experiment.config import experiments
from shoal.training.folder import provenance

WITHOUT_TORCH = """
import sys
from shoal.cli.main import main

status = [main(arguments) for arguments in {commands}]
heavy = [name for name in ("torch", "numpy", "sklearn", "matplotlib") if name in sys.modules]
sys.exit("imported: " + ", ".join(heavy) if heavy else 0 if set(status) == {{{expected}}} else 1)
"""


def run_python(commands, expected):
    code = WITHOUT_TORCH.format(commands=commands, expected=expected)
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)


def test_help_answers_without_loading_anything_heavy():
    commands = [[], ["--help"], ["--version"], *([name, "--help"] for name in COMMANDS)]
    done = run_python(commands, 0)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("example:") == len(COMMANDS)


def test_mistakes_are_answered_without_loading_anything_heavy():
    commands = [["fti"], ["fit"], ["fit", "digit"], ["fit", "digits", "lr=x"], ["compare", "a"]]
    done = run_python(commands, 2)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    assert len(done.stderr.splitlines()) == len(commands)


def test_the_overview_names_every_command():
    lines = overview().splitlines()
    for name, command in COMMANDS.items():
        assert any(line.split()[:1] == [name] and command.summary in line for line in lines)


@pytest.mark.parametrize("command", COMMANDS)
def test_examples_parse(command):
    for line in COMMANDS[command].example.splitlines():
        program, *arguments = shlex.split(line)
        assert program == "shoal"
        assert parse(arguments).command == command


def test_examples_name_experiments_that_exist():
    words = {
        shlex.split(line)[2]
        for name in ("fit", "compare")
        for line in COMMANDS[name].example.splitlines()
    }
    assert {word for word in words if "/" not in word} <= set(experiments())


def test_changes_and_options_may_be_mixed():
    options = parse(["fit", "--quiet", "digits", "lr=1", "--resume", "seed=2", "-o", "x"])
    assert (options.config, options.changes) == ("digits", ["lr=1", "seed=2"])
    assert options.quiet and options.resume and options.out == "x"


@pytest.mark.parametrize("command", COMMANDS)
def test_help_fits_a_terminal(command, capsys):
    with pytest.raises(SystemExit):
        parse([command, "--help"])
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 100


def test_python_m_shoal_is_recorded_as_the_command(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["/somewhere/shoal/__main__.py", "demo", "-q"])
    monkeypatch.setattr("shoal.cli.start.start", lambda: 0)
    # Another test may have imported the module, about which runpy would warn.
    monkeypatch.delitem(sys.modules, "shoal.__main__", raising=False)
    with pytest.raises(SystemExit):
        runpy.run_module("shoal", run_name="__main__")
    assert provenance.command() == "shoal demo -q"

"""Help: there at once, for every verb, with an example that parses."""

import shlex
import subprocess
import sys

import pytest

from shoal.cli.parser import VERBS, overview, parse
from shoal.experiment.config import experiments

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
    commands = [[], ["--help"], ["--version"], *([verb, "--help"] for verb in VERBS)]
    done = run_python(commands, 0)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("example:") == len(VERBS)


def test_mistakes_are_answered_without_loading_anything_heavy():
    commands = [["fti"], ["fit"], ["fit", "digit"], ["fit", "digits", "lr=x"], ["compare", "a"]]
    done = run_python(commands, 2)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    assert len(done.stderr.splitlines()) == len(commands)


def test_the_overview_names_every_verb():
    lines = overview().splitlines()
    for name, verb in VERBS.items():
        assert any(line.split()[:1] == [name] and verb.summary in line for line in lines)


@pytest.mark.parametrize("verb", VERBS)
def test_examples_parse(verb):
    for line in VERBS[verb].example.splitlines():
        program, *arguments = shlex.split(line)
        assert program == "shoal"
        assert parse(arguments).verb == verb


def test_examples_name_experiments_that_exist():
    words = {
        shlex.split(line)[2]
        for name in ("fit", "compare")
        for line in VERBS[name].example.splitlines()
    }
    assert {word for word in words if "/" not in word} <= set(experiments())


def test_changes_and_options_may_be_mixed():
    options = parse(["fit", "--quiet", "digits", "lr=1", "--resume", "seed=2", "-o", "x"])
    assert (options.config, options.changes) == ("digits", ["lr=1", "seed=2"])
    assert options.quiet and options.resume and options.out == "x"


@pytest.mark.parametrize("verb", VERBS)
def test_help_fits_a_terminal(verb, capsys):
    with pytest.raises(SystemExit):
        parse([verb, "--help"])
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 100

"""The page about clusters: its batch files are valid, its commands exist."""

import re
import shlex
import subprocess
from pathlib import Path

import pytest

from shoal.cli.parser import parse

PAGE = (Path(__file__).parents[2] / "docs" / "several-gpus.md").read_text()
SCRIPTS = re.findall(r"```bash\n(#!/bin/bash\n.*?)```", PAGE, re.DOTALL)


def test_there_is_a_batch_file_for_one_big_run_and_for_a_grid():
    assert any("torchrun" in script and "srun" in script for script in SCRIPTS)
    assert any("shoal compare" in script and "--submit slurm" in script for script in SCRIPTS)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.split("job-name=")[1][:5])
def test_a_batch_file_is_valid_bash(script):
    checked = subprocess.run(["bash", "-n"], input=script, capture_output=True, text=True)
    assert (checked.returncode, checked.stderr) == (0, "")


def commands():
    """Every command of the page, without shell variables that stand for no option."""
    joined = PAGE.replace("\\\n", " ")
    for line in joined.splitlines():
        if (found := re.search(r"\bshoal ((?:compare|fit) [^`]*)", line)) and "..." not in line:
            yield found[1].replace('"${resume[@]}"', "--resume").replace('"$out"', "runs/a")


@pytest.mark.parametrize("command", list(commands()))
def test_a_command_of_the_page_has_known_options(command):
    options = parse(shlex.split(command))
    assert options.config in ("mnist", "digits", "my.toml")


def test_a_command_of_the_page_is_found_at_all():
    assert len(list(commands())) >= 5

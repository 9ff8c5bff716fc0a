"""The loops of docs/loops.md, taken from the page and run."""

import re
from pathlib import Path

import pytest
import torch
from torch import nn

import shoal

PAGE = Path(__file__).parents[2] / "docs" / "loops.md"


def run_loop(number, **names):
    """The names after a loop of the page."""
    code = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)[number]
    exec(compile(code, str(PAGE), "exec"), names)
    return names


def test_members_with_batches_of_their_own_learn():
    torch.manual_seed(0)
    x = torch.randn(100, 2)
    y = (x[:, 0] > 0).long()
    given = {"torch": torch, "shoal": shoal, "x": x, "y": y, "x_test": x}
    names = run_loop(1, build=lambda: nn.Linear(2, 2), **given)
    assert (names["pred"].probs.argmax(-1) == y).float().mean() > 0.9


@pytest.mark.slow
def test_the_agent_of_the_page_learns_to_go_right():
    names = run_loop(-1)
    assert names["policy"][:-1].float().mean() > 0.9
    assert names["info"].loss.isfinite().all()

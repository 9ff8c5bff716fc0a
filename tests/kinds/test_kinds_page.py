"""The guide to networks: its table is the table that the tests train, and its example runs."""

import re
from pathlib import Path

import torch
from kinds_table import KINDS, markdown

PAGE = Path(__file__).parents[2] / "docs" / "networks.md"


def test_the_table_is_that_of_the_tests():
    assert markdown() in PAGE.read_text()
    assert len(KINDS) >= 16


def test_the_example_runs():
    (example,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), flags=re.S)
    names: dict = {"__name__": "example"}
    exec(compile(example, str(PAGE), "exec"), names)
    assert names["pred"].members.shape == (3, 64, 2)
    wanted = names["run"].ensemble.member(1)(**names["x"])["logits"]
    torch.testing.assert_close(names["pred"].members[1], wanted.detach())

"""The loop of docs/loops.md, taken from the page and run."""

import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "loops.md"


@pytest.mark.slow
def test_the_agent_of_the_page_learns_to_go_right():
    code = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)[-1]
    names = {}
    exec(compile(code, str(PAGE), "exec"), names)
    assert names["policy"][:-1].float().mean() > 0.9
    assert names["info"].loss.isfinite().all()

"""Progress over many runs, where there is no terminal."""

import pytest

from shoal.core.display import progress as module
from shoal.core.display.progress import TerminalBar, Ticker


@pytest.fixture
def clock(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    return now


def test_the_time_left_is_that_of_as_many_runs_like_those_so_far(clock, capsys):
    with Ticker(total=5, done=1) as progress:
        clock[0] += 10.0
        progress.tick("first")
        clock[0] += 30.0
        progress.tick("second")
        clock[0] += 1.0
        progress.tick("third")
        progress.tick("fourth")
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "2/5  first; 30.0 s left"
    assert lines[1] == "3/5  second; 40.0 s left"
    assert lines[-1] == "5/5  fourth"


def test_quiet_is_quiet(capsys):
    with Ticker(total=2, show=False) as progress:
        progress.tick("first")
    assert capsys.readouterr().err == ""


def test_several_can_be_done_at_once(clock, capsys):
    with Ticker(total=10) as progress:
        clock[0] += 8.0
        progress.tick("four of them", 4)
    assert capsys.readouterr().err == " 4/10  four of them; 12.0 s left\n"


def test_a_note_is_for_the_bar_alone(capsys):
    with Ticker(total=2) as progress:
        progress.note("first: 10 networks")
    assert capsys.readouterr().err == ""


def test_a_note_stands_beside_the_bar(monkeypatch):
    pytest.importorskip("rich")
    shown = []
    monkeypatch.setattr(module.sys.stderr, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(TerminalBar, "show", lambda bar, words: shown.append(words))
    with Ticker(total=2) as progress:
        progress.note("first: 10 networks")
    assert shown == ["first: 10 networks"]

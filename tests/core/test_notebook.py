"""What a real notebook shows, executed by the kernel of Jupyter."""

import re
import sys

import pytest

from shoal.core.display import progress
from shoal.core.display.progress import NotebookBar, make_bar

TRAINING = """
import torch, shoal
x = torch.randn(40, 3, generator=torch.Generator().manual_seed(0))
ensemble = shoal.Ensemble.init(lambda: torch.nn.Linear(3, 2), members=3)
run = shoal.fit(ensemble, (x, (x[:, 0] > 0).long()), epochs=100, batch_size=10)
"""


@pytest.fixture(scope="module")
def cells():
    """A notebook with a run of 400 steps, the run, and its prediction: the outputs of its cells."""
    nbformat = pytest.importorskip("nbformat", reason="nbformat is not installed")
    nbclient = pytest.importorskip("nbclient", reason="nbclient is not installed")
    pytest.importorskip("ipykernel", reason="ipykernel is not installed")
    lines = [TRAINING, "run", "shoal.predict(run, x)"]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(line) for line in lines])
    nbclient.NotebookClient(notebook, timeout=300, kernel_name="python3").execute()
    return [cell.outputs for cell in notebook.cells]


@pytest.mark.slow
def test_a_run_is_one_output_that_ends_full(cells):
    (shown,) = cells[0]
    assert shown.output_type == "display_data"
    text = shown.data["text/html"]
    assert 'value="400" max="400"' in text
    assert re.search(r"400/400 · [\d.]+ s · loss [\d.]+", text)
    assert "<script" not in text and len(text) < 2000
    assert shown.data["text/plain"].startswith("ensemble 400/400")


@pytest.mark.slow
@pytest.mark.parametrize("cell", [1, 2])
def test_a_result_is_a_table_with_a_figure(cells, cell):
    (shown,) = cells[cell]
    text = shown.data["text/html"]
    assert text.startswith("<table>") and text.count("<svg") == 1
    assert len(text.encode()) < 30_000


class Screen:
    """What a notebook was asked to show: each output by its name, as it was drawn last."""

    def __init__(self, monkeypatch):
        display = pytest.importorskip("IPython.display")
        self.shown, self.drawn = {}, 0
        monkeypatch.setattr(progress, "_in_notebook", lambda: True)
        monkeypatch.setattr(display, "display", self.display)

    def display(self, bundle, *, raw, display_id, update):
        assert raw and update == (display_id in self.shown)
        self.shown[display_id], self.drawn = bundle, self.drawn + 1

    @property
    def last(self):
        return list(self.shown.values())[-1]


@pytest.fixture
def screen(monkeypatch):
    return Screen(monkeypatch)


@pytest.fixture
def clock(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    return now


def test_a_thousand_steps_are_drawn_as_often_as_the_clock_allows(screen, clock):
    bar = make_bar("kde", 1000, 0, stays=True)
    assert isinstance(bar, NotebookBar)
    bar.start()
    for _ in range(1000):
        clock[0] += NotebookBar.PERIOD / 100
        bar.advance()
    bar.stop()
    assert len(screen.shown) == 1 and 10 <= screen.drawn <= 12
    assert 'value="1000"' in screen.last["text/html"]


def test_the_time_left_counts_the_steps_of_this_call(screen, clock):
    bar = make_bar("kde", 100, 90, stays=True)
    bar.start()
    clock[0] += 4.0
    bar.advance(2)
    assert "92/100 · 16.0 s left" in screen.last["text/plain"]


def test_words_are_escaped_and_old_sentences_leave(screen, clock):
    bar = make_bar("<b>kde</b>", 10, 0, stays=True)
    bar.start()
    bar.show("<i>loss</i>")
    for number in range(NotebookBar.SENTENCES + 5):
        bar.say(f"<script>{number}</script>")
    text = screen.last["text/html"]
    assert "&lt;b&gt;kde" in text and "&lt;i&gt;loss" in text and "&lt;script&gt;14" in text
    assert not re.search("<(b|i|script)>", text) and "&lt;script&gt;4&lt;" not in text


def test_outside_of_a_notebook_and_a_terminal_there_is_no_bar(monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: False, raising=False)
    assert make_bar("kde", 10, 0, stays=True) is None

"""No file steers the terminal: control characters are spelled out wherever words are shown."""

import json
import sys
import warnings

import numpy as np
import pytest
from PIL import Image

from shoal.cli.main import main
from shoal.core import errors
from shoal.core.display import progress as notices
from shoal.core.display.progress import Ticker, make_progress, notice, printable
from shoal.core.storage.formats import to_toml

EVIL = "\x1b]0;owned\x07\x1b[2J\x9b31m\r\x08\u202e\x7f"


@pytest.fixture(autouse=True)
def as_before(monkeypatch):
    """A command decides for its process how much is said, and how."""
    monkeypatch.setattr(warnings, "showwarning", warnings.showwarning)
    yield
    notices.quiet.set(False)


def harmless(text):
    return all(letter.isprintable() or letter in "\n\t" for letter in text)


def test_ordinary_words_stay_as_they_are():
    words = "Größe 3 × 5 – 97 %\n\tα/β, 数据 🐟"
    assert printable(words) == words


def test_what_is_spelled_out_can_still_be_read():
    assert printable("cat\x1b[31m") == "cat\\x1b[31m"
    assert harmless(printable(EVIL + "\udc80\u2028\x00"))


@pytest.mark.parametrize("kind", [errors.ShoalError, *errors.ShoalError.__subclasses__()])
def test_errors_and_warnings(kind):
    assert harmless(str(kind(f"there is no class '{EVIL}'")))
    assert harmless(str(errors.ShoalWarning(EVIL)))
    with pytest.warns(errors.ShoalWarning) as caught:
        warnings.warn(EVIL, errors.ShoalWarning, stacklevel=1)
    one = caught[0]
    assert harmless(warnings.formatwarning(one.message, one.category, "file", 1))


def test_notices_and_progress(capsys):
    notice(EVIL)
    make_progress(True, "kde", 10, 0).say(EVIL)
    with Ticker(2) as ticker:
        ticker.tick(EVIL)
    assert harmless(capsys.readouterr().err)


class Terminal:
    """Takes what is written to it for a terminal's."""

    encoding = "utf-8"

    def __init__(self):
        self.text = ""

    def write(self, text):
        self.text += text

    def flush(self):
        pass

    def isatty(self):
        return True


def test_words_beside_a_bar(monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    progress = make_progress(True, "kde", 10, 0)
    progress.say(f"[red]{EVIL}[/red]")
    progress.close()
    assert "\x07" not in terminal.text and "\x9b" not in terminal.text
    assert "\x1b]0;owned" not in terminal.text and "[red]" in terminal.text


@pytest.mark.parametrize("table", [{f"key{EVIL}": 1}, {"data": EVIL}, {"data": "digits", EVIL: 2}])
def test_a_config_from_a_stranger(table, tmp_path, capsys):
    path = tmp_path / "theirs.toml"
    path.write_text(to_toml(table), encoding="utf-8")
    assert main(["fit", str(path), "-o", str(tmp_path / "run")]) == 2
    shown = capsys.readouterr()
    assert "owned" in shown.err and harmless(shown.err + shown.out)


def test_a_run_folder_from_a_stranger(tmp_path, capsys):
    folder = tmp_path / "theirs"
    folder.mkdir()
    (folder / "config.toml").write_text(to_toml({EVIL: 1}), encoding="utf-8")
    assert main(["evaluate", str(folder)]) == 74
    shown = capsys.readouterr().err
    assert "owned" in shown and harmless(shown)


@pytest.mark.parametrize("form", [[], ["--json"]])
def test_class_names_and_other_names_from_folders(form, tmp_path, capsys):
    for name in ("cat", EVIL):
        for index in range(3):
            place = tmp_path / "pets" / name
            place.mkdir(parents=True, exist_ok=True)
            Image.fromarray(np.full((4, 4), 40 * index, np.uint8)).save(place / f"{index}.png")
    config = {"data": {"name": "file", "train": str(tmp_path / "pets")}, "epochs": 1}
    config["data"]["test"] = config["data"]["train"]
    config["data"]["ood"] = [str(tmp_path / "pets" / EVIL)]
    path = tmp_path / "mine.toml"
    path.write_text(to_toml(config | {"members": 2}), encoding="utf-8")
    assert main(["fit", str(path), "-o", str(tmp_path / "run"), "--quiet", *form]) == 0
    shown = capsys.readouterr()
    assert "owned" in shown.out and harmless(shown.out + shown.err)
    if form:
        json.loads(shown.out)

"""Damaged files of every format: an error of ours or content, in bounded time, and nothing runs.

The damage has a fixed seed. SHOAL_FUZZED asks for more files of each format than the usual 60;
`python tests/reliability.py fuzz` reads over 10,000 files.
"""

import os
import sys

import pytest
from fuzzed_files import READERS, attempt, fuzz, resident_peak, watch

FILES = int(os.environ.get("SHOAL_FUZZED", "60"))
SLOWER = {"run folder", "report of a run folder", "page of a forged folder"}


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", READERS)
def test_damaged_files_give_content_or_one_documented_error(name, tmp_path):
    pytest.importorskip("PIL", reason="Pillow is not installed")
    count = FILES // 3 if name in SLOWER else FILES
    found = fuzz(name, count, tmp_path)
    # Rows of a history that cannot be read have no numbers; a run goes on without them.
    assert found["refused"] > 0 or name == "history (JSON lines)"
    assert found["refused"] < count


@pytest.mark.parametrize("event", ["exec", "subprocess", "pickle"])
def test_the_watch_sees_what_runs(event, tmp_path):
    acts = {
        "exec": lambda: exec("1"),
        "subprocess": lambda: __import__("subprocess").run([sys.executable, "-c", ""]),
        "pickle": lambda: __import__("pickle").loads(b"cos\ngetcwd\n."),
    }
    seen = watch()
    seen.on = True
    try:
        acts[event]()
    finally:
        seen.on = False
    assert any(event in name for name, _ in seen.seen)
    seen.seen.clear()


def test_a_foreign_error_is_not_taken_for_ours():
    with pytest.raises(KeyError):
        attempt(lambda: {}["a"])
    assert resident_peak() > 10

"""Run every test that needs a GPU, in a few processes: python tests/gpu_tests.py [--jobs N]

Compiling kernels takes most of the time and one core per process, so the tests are dealt out to
processes. Such a machine has its own torch and seldom every library of the other tests: only files
that name a GPU are collected. Nothing is installed.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PYTEST = (sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-m", "gpu")
PYTEST += ("-W", "ignore::pytest.PytestConfigWarning")
_COUNT = re.compile(r"(\d+) (passed|failed|errors?|skipped)")


def files() -> list[str]:
    """Test files with a mark of triton_ready.py, or another reason that names a GPU."""
    found = sorted((ROOT / "tests").rglob("test_*.py"))
    named = [f for f in found if re.search("triton_ready|GPU", f.read_text(encoding="utf-8"))]
    return [str(file.relative_to(ROOT)) for file in named]


def pytest(*arguments: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    return subprocess.run(
        [*PYTEST, *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def main() -> int:
    parser = argparse.ArgumentParser(description="Run every test that needs a GPU.")
    parser.add_argument("--jobs", type=int, default=min(12, os.cpu_count() or 1))
    jobs = parser.parse_args().jobs
    began = time.monotonic()
    collected = pytest("--collect-only", *files())
    names = [line for line in collected.stdout.splitlines() if "::" in line]
    if collected.returncode or not names:
        print(collected.stdout)
        return 1
    counts: Counter[str] = Counter()
    failed = False
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(jobs) as pool:
        hands = [Path(folder, f"{index}.txt") for index in range(jobs)]
        for index, hand in enumerate(hands):
            hand.write_text("\n".join(names[index::jobs]), encoding="utf-8")
        for done in pool.map(lambda hand: pytest("-rfs", "--tb=short", f"@{hand}"), hands):
            summary = done.stdout.rstrip().rpartition("\n")[2]
            counts.update({kind: int(count) for count, kind in _COUNT.findall(summary)})
            if done.returncode or "skipped" in summary:
                print(done.stdout, flush=True)
            failed |= done.returncode != 0
    told = ", ".join(f"{count} {kind}" for kind, count in sorted(counts.items()))
    print(f"{len(names)} tests: {told}, {time.monotonic() - began:.0f} s in {jobs} processes")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())

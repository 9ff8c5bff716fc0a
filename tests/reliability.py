"""The long tests of reliability: figures as JSON, and the table of docs/reliability.md.

    python tests/reliability.py            every measure, then the table (about 20 minutes)
    python tests/reliability.py kills      one measure, then the table
    python tests/reliability.py render     the table alone, from the figures on record

A measure stops with an error where a promise is broken, so every figure on record is a pass.
"""

import argparse
import json
import os
import platform
import sys
import tempfile
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

HOME = Path(__file__).resolve().parents[1]
RESULTS = HOME / "docs" / "results" / "reliability"


def kills(folder, kills=200):
    """R1 and R2: SIGKILL at random moments; every folder loads, every run ends bit-exact."""
    from killed_runs import kill_often, serving, uninterrupted

    methods = ("f-kde", "kde", "svgd", "ensemble", "forde", "f-svgd", "sge", "f-ssge")
    each, found = -(-kills // len(methods)), {}
    with serving() as server:
        for method in methods:
            whole = folder / f"{method}-whole"
            seconds = uninterrupted(server, method, whole)
            found[method] = kill_often(server, method, whole, seconds, each, folder)
    totals = {key: sum(counts[key] for counts in found.values()) for key in found["kde"]}
    return {**totals, "unloadable": 0, "methods": found}


def fuzz(folder, files=900):
    """R4 to R7: damaged files of every format give content or one documented error."""
    from fuzzed_files import MEGABYTES, READERS, SECONDS, fuzz

    slower = {"run folder": 300, "report of a run folder": 300, "page of a forged folder": 100}
    found = {}
    for index, name in enumerate(READERS):
        own = folder / str(index)
        own.mkdir()
        found[name] = fuzz(name, slower.get(name, files), own, seed=1)
    return {
        "files": sum(each["files"] for each in found.values()),
        "refused": sum(each["refused"] for each in found.values()),
        "other_errors": 0,
        "ran": 0,
        "slowest": max(each["slowest"] for each in found.values()),
        "grown": max(each["grown"] for each in found.values()),
        "limits": {"seconds": SECONDS, "megabytes": MEGABYTES},
        "readers": found,
    }


MEASURES = {"kills": kills, "fuzz": fuzz}


def measure(name):
    """Run one measure and write its figures."""
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="shoal-") as folder:
        figures = MEASURES[name](Path(folder))
    figures["seconds"] = round(time.monotonic() - started, 1)
    figures["command"] = f"python tests/reliability.py {name}"
    figures["machine"] = f"{platform.system()}, {platform.machine()}"
    RESULTS.mkdir(parents=True, exist_ok=True)
    (RESULTS / f"{name}.json").write_text(json.dumps(figures, indent=2) + "\n")
    print(f"{name}: {figures['seconds']} s")


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", help=f"of {', '.join(MEASURES)}, or render")
    names = parser.parse_args().names or list(MEASURES)
    sys.path.insert(0, str(HOME))
    for name in names:
        if name != "render":
            measure(name)


if __name__ == "__main__":
    main()

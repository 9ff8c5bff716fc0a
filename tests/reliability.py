"""The long tests of reliability: figures as JSON, and the table of docs/reliability.md.

    python tests/reliability.py            every measure, then the table (about 20 minutes)
    python tests/reliability.py kills      one measure, then the table
    python tests/reliability.py restarts --count 20    with a number of kills or files
    python tests/reliability.py fuzz --seed 2          with other damage; writes fuzz-seed-2.json
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


def kills(folder, count=200):
    """R1 and R2: SIGKILL at random moments; every folder loads, every run ends bit-exact."""
    from killed_runs import kill_often, serving, uninterrupted

    methods = ("f-kde", "kde", "svgd", "ensemble", "forde", "f-svgd", "sge", "f-ssge")
    each, found = -(-count // len(methods)), {}
    with serving() as server:
        for method in methods:
            whole = folder / f"{method}-whole"
            seconds = uninterrupted(server, method, whole)
            found[method] = kill_often(server, method, whole, seconds, each, folder)
    totals = {key: sum(counts[key] for counts in found.values()) for key in found["kde"]}
    return {**totals, "unloadable": 0, "methods": found}


def fuzz(folder, count=900, seed=1):
    """R4 to R7: damaged files of every format give content or one documented error."""
    from fuzzed_files import MEGABYTES, READERS, SECONDS, fuzz

    slower = {"run folder": 300, "report of a run folder": 300, "page of a forged folder": 100}
    found = {}
    for index, name in enumerate(READERS):
        own = folder / str(index)
        own.mkdir()
        found[name] = fuzz(name, min(count, slower.get(name, count)), own, seed=seed)
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


def determinism(folder):
    """R14: same seed, same machine, same bits, for every engine setting on the CPU."""
    import torch
    from steady_runs import COMPILED, ENGINES, digest, digest_elsewhere

    from shoal.interaction.methods import METHODS

    torch.set_num_threads(1)
    settings = [(method, engine) for method in METHODS for engine in ENGINES]
    different = [each for each in settings if digest(*each) != digest(*each)]
    compiled = [("f-kde", engine) for engine in COMPILED]
    apart = [each for each in compiled if digest(*each) != digest(*each)]
    processes = {digest_elsewhere("f-kde", "vmap", seed) for seed in (1, 2)}
    threads = {digest_elsewhere("f-kde", "vmap", 1, count) for count in (1, 2)}
    assert not different and len(processes) == 1, (different, processes)
    return {
        "settings": len(settings),
        "different": len(different),
        "processes_equal": len(processes) == 1,
        "compiled_equal": not apart,
        "threads_1_and_2_equal": len(threads) == 1,
    }


def memory(folder, count=20_000):
    """R19: the memory of a long run is level."""
    from steady_runs import memory_of

    found = memory_of(count)
    # The first tenth fills the allocator of torch.
    grown = found[-1][1] - found[0][1]
    assert grown < 8, found
    return {
        "steps": count,
        "megabytes_early": found[0][1],
        "megabytes_end": found[-1][1],
        "grown": round(grown, 2),
        "course": found,
    }


def injections(folder):
    """Texts of users and files in a page, in a real browser; the suite runs the same test."""
    import re
    import subprocess

    log = folder / "places.json"
    command = [sys.executable, "-m", "pytest", "-q", "tests/page/test_injection.py"]
    env = {**os.environ, "PYTHONPATH": str(HOME), "SHOAL_PLACES": str(log)}
    done = subprocess.run(command, cwd=HOME, env=env, capture_output=True, text=True)
    assert done.returncode == 0 and not re.search("skipped", done.stdout), done.stdout
    places = json.loads(log.read_text())
    return {"places": len(places), "ran": 0, "requests": 0, "names": places}


def restarts(folder, count=20):
    """R11: one process killed at a random moment; torchrun starts all again, and the run ends."""
    from lost_processes import restart_often

    return restart_often(folder, count)


def ranks(folder):
    """R3: a run goes on with another number of processes."""
    from lost_processes import continued, on

    pairs, one = ((4, 2), (2, 4), (2, 1)), folder / "whole"
    on(1, "precise", one, 6)
    found = [continued("precise", pair, folder / str(i), one) for i, pair in enumerate(pairs)]
    assert max(found) < 1e-10, found
    return {"pairs": pairs, "largest_difference": max(found)}


def processes(folder):
    """Two and four processes, and a grid of two by two, against one process, for every method."""
    from mesh_cases import METHODS, largest_difference, together

    names = (*METHODS, "batch norm", "dropout", "augmentation", "noise", "frozen, svgd")
    found = {}
    for count, mesh in ((2, "2x1"), (4, "4x1"), (4, "2x2")):
        out = folder / mesh
        out.mkdir()
        together(count, out, mesh, *names)
        found[mesh] = {name: largest_difference(out, name, count) for name in names}
    largest = max(max(each.values()) for each in found.values())
    assert largest < 1e-10, found
    return {"largest_difference": largest, "processes": [1, 2, 4], "cases": found}


def traffic(folder):
    """Bytes that all processes received in a run of five steps, predicted and measured."""
    from mesh_cases import TRAFFIC, predicted_bytes, received_bytes, together

    found = {}
    for count in (2, 4):
        out = folder / str(count)
        out.mkdir()
        together(count, out, f"{count}x1", *TRAFFIC)
        for name in TRAFFIC:
            pairs = [
                (
                    predicted_bytes(name, count, rank).total(),
                    received_bytes(out, name, rank).total(),
                )
                for rank in range(count)
            ]
            found[f"{name}, {count} processes"] = [sum(each) for each in zip(*pairs, strict=True)]
    predicted, measured = (sum(each) for each in zip(*found.values(), strict=True))
    assert predicted == measured, found
    return {"bytes_predicted": predicted, "bytes_measured": measured, "cases": found}


MEASURES = {
    "kills": kills,
    "fuzz": fuzz,
    "determinism": determinism,
    "memory": memory,
    "injections": injections,
    "restarts": restarts,
    "ranks": ranks,
    "processes": processes,
    "traffic": traffic,
}
"""Each writes NAME.json; the table of docs/reliability.md reads these files."""


def measure(name, count=None, seed=None):
    """Run one measure, with a count and a seed of its own where given, and write its figures."""
    given = {"count": count, "seed": seed}
    options = {key: value for key, value in given.items() if value is not None}
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="shoal-") as folder:
        figures = MEASURES[name](Path(folder), **options)
    figures["seconds"] = round(time.monotonic() - started, 1)
    words = "".join(f" --{key} {value}" for key, value in options.items())
    figures["command"] = f"python tests/reliability.py {name}{words}"
    figures["date"] = time.strftime("%Y-%m-%d", time.gmtime())
    figures["machine"] = f"{platform.system()}, {platform.machine()}"
    RESULTS.mkdir(parents=True, exist_ok=True)
    name += "" if seed is None else f"-seed-{seed}"
    (RESULTS / f"{name}.json").write_text(json.dumps(figures, indent=2) + "\n")
    print(f"{name}: {figures['seconds']} s")


def render():
    """Write the table of docs/reliability.md from the figures on record."""
    from reliability_table import write

    write(HOME / "docs" / "reliability.md", RESULTS)


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", help=f"of {', '.join(MEASURES)}, or render")
    parser.add_argument("--count", type=int, help="kills, files or steps of the named measures")
    parser.add_argument("--seed", type=int, help="seed of the damage, for fuzz")
    options = parser.parse_args()
    names = options.names or list(MEASURES)
    if options.seed is not None and names != ["fuzz"]:
        parser.error("--seed goes with fuzz alone")
    sys.path.insert(0, str(HOME))
    for name in names:
        if name != "render":
            measure(name, options.count, options.seed)
    render()


if __name__ == "__main__":
    main()

"""Fit models on a half of the suite: one row per set, split and model, and what is there is kept.

python -m studies.tables.run --half development --models shoal,catboost --data FOLDER --out CSV

Every fit is a process of its own with `--threads` threads on cores of its own. A fit that fails or
takes longer than `--limit` seconds leaves a row with the reason. `--settings FILE` adds arms of
Shoal: a JSON object of names, each with keyword arguments of the estimator, and with "task" where
an arm is for one task alone. Without `--models` all arms of the file run beside the default.
`--within SECONDS` ends the command in time: what was running then has no row, and the same command
goes on.
"""

import argparse
import contextlib
import hashlib
import importlib
import json
import os
import signal
import sys
import time
import traceback
from importlib.metadata import version
from pathlib import Path

from studies.tables import sets

SCORES = "crps nll rmse coverage width log_loss error brier ece oof noisy".split()
"""`oof` and `noisy`: CRPS or log-loss of Shoal out-of-fold, and on noisy inputs by `--noisy`."""

SECONDS = "fit_seconds predict_seconds wall_seconds cpu_seconds".split()
HEADER = ["set", "split", "model", "status", *SCORES, *SECONDS, "threads", "device", "version"]
PACKAGES = {"sklearn": "scikit-learn", "bde": "sklearn-contrib-bde"}
"""Names of packages that differ from those of their modules."""

APART = {"bde"}
"""Libraries that must not be imported before a process divides."""


def arguments():
    """The command line."""
    parser = argparse.ArgumentParser(description="Fit models on a half of the suite.")
    parser.add_argument("--half", choices=sets.HALVES, required=True)
    parser.add_argument("--models", help="names, with commas between")
    parser.add_argument("--data", type=Path, required=True, help="folder that sets.py made")
    parser.add_argument("--out", type=Path, required=True, help="CSV file")
    parser.add_argument("--settings", type=Path, help="JSON file of arms of Shoal")
    parser.add_argument("--sets", help="only these sets")
    parser.add_argument("--splits", default="0,1,2")
    parser.add_argument("--jobs", type=int, default=1, help="fits at a time")
    parser.add_argument("--threads", type=int, default=2, help="threads of a fit")
    parser.add_argument("--device", default="cpu", help="of Shoal and pytabkit")
    parser.add_argument("--limit", type=float, default=600, help="seconds of a fit")
    parser.add_argument("--within", type=float, default=float("inf"), help="seconds in all")
    parser.add_argument("--noisy", action="store_true", help="score Shoal on noisy inputs too")
    parser.add_argument("--retry", action="store_true", help="fits that failed once more")
    return parser.parse_args()


def limit_threads(threads):
    """Environment variables that libraries read when they are imported."""
    for name in ("OMP", "OPENBLAS", "MKL", "NUMEXPR", "VECLIB_MAXIMUM", "LOKY_MAX_CPU"):
        os.environ[f"{name}_{'COUNT' if name.startswith('LOKY') else 'NUM_THREADS'}"] = str(threads)
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # a GPU is not touched before the division
    os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={threads}"


def missing(given, read_csv, tasks):
    """Set, split and model of every fit without a row: large sets first within a split."""
    rows = read_csv(given.out, missing_ok=True)
    done = {
        (row["set"], int(row["split"]), row["model"])
        for row in rows
        if row["status"] == "ok" or not given.retry
    }
    only = given.sets.split(",") if given.sets else None
    listed = {row["name"]: int(row["train"]) for row in read_csv(sets.SUITE / "sets.csv")}
    chosen = [s for s in sets.sets() if s.half == given.half and (not only or s.name in only)]
    chosen.sort(key=lambda a_set: -listed[a_set.name])
    return [
        (a_set.name, split, model)
        for split in map(int, given.splits.split(","))
        for a_set in chosen
        for model in given.models.split(",")
        if (a_set.name, split, model) not in done and tasks.get(model, a_set.task) == a_set.task
    ]


def fitted(model, cell, given):
    """Scores and seconds of every row of a fit."""
    from studies.tables.models import Run
    from studies.tables.scores import scores

    name, split, _ = cell
    table = sets.load(given.data, name, split)
    start = time.perf_counter()
    predict = model(table, Run(split, given.threads, given.device, given.noisy))
    middle = time.perf_counter()
    forecasts = predict()
    end = time.perf_counter()
    times = {"fit_seconds": middle - start, "predict_seconds": end - middle}
    return {
        row: (found if isinstance(found, dict) else scores(found, table.y_test)) | times
        for row, found in forecasts.items()
    }


def child(model, cell, given, slot, pipe):
    """The process of a fit: what it finds, or the reason why not, goes into the pipe."""
    os.setsid()
    cores = sorted(os.sched_getaffinity(0))
    mine = {cores[(slot * given.threads + i) % len(cores)] for i in range(given.threads)}
    with contextlib.suppress(OSError):  # some sandboxes do not bind processes to cores
        os.sched_setaffinity(0, mine)
    silence = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silence, 1)
    os.dup2(silence, 2)
    try:
        if "torch" in sys.modules:
            sys.modules["torch"].set_num_threads(given.threads)
        answer = {"rows": fitted(model, cell, given)}
    except BaseException as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        text = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        answer = {"reason": f"{text} ({Path(place.filename).name}:{place.lineno})"}
    os.write(pipe, json.dumps(answer).encode())
    os._exit(0)


class Fits:
    """The running processes."""

    def __init__(self, given, models):
        self.given, self.models = given, models
        self.running, self.free = {}, list(range(given.jobs))[::-1]

    def start(self, cell):
        """Divide this process."""
        read, write = os.pipe()
        slot = self.free.pop()
        sys.stdout.flush()
        pid = os.fork()
        if pid == 0:
            os.close(read)
            child(self.models[cell[2]], cell, self.given, slot, write)
        os.close(write)
        self.running[pid] = cell, slot, read, time.monotonic()

    def ended(self):
        """Rows of the fits that ended or took too long, after waiting for one."""
        rows = []
        while not rows and self.running:
            for pid, (cell, slot, read, started) in list(self.running.items()):
                found, status, usage = os.wait4(pid, os.WNOHANG)
                late = time.monotonic() - started > self.given.limit
                if not found and late:
                    os.killpg(pid, signal.SIGKILL)
                    found, status, usage = os.wait4(pid, 0)
                if found:
                    del self.running[pid]
                    self.free.append(slot)
                    with os.fdopen(read, "rb") as pipe:
                        answer = json.loads(pipe.read() or b"{}")
                    seconds = time.monotonic() - started, usage.ru_utime + usage.ru_stime
                    why = f"more than {self.given.limit:g} s" if late else f"ended by {status}"
                    rows += self.rows(cell, answer, seconds, why)
            time.sleep(0 if rows else 0.05)
            if time.monotonic() > self.given.end:
                break
        return rows

    def rows(self, cell, answer, seconds, why):
        """Rows of the file."""
        name, split, model = cell
        times = dict(zip(SECONDS[2:], seconds, strict=True))
        found = answer.get("rows") or {model: {"status": answer.get("reason", why)}}
        for row, values in found.items():
            held = {"status": "ok"} | values | times
            numbers = [f"{held[key]:.6g}" if key in held else "" for key in (*SCORES, *SECONDS)]
            about = [self.given.threads, self.given.device, self.given.versions[model]]
            yield [name, split, row, held["status"], *numbers, *about]

    def stop(self):
        """End what runs; it gets no row."""
        for pid, (_, _, read, _) in self.running.items():
            os.killpg(pid, signal.SIGKILL)
            os.wait4(pid, 0)
            os.close(read)


def append(path, rows):
    """Add rows to a file; one that was begun with fewer columns keeps to them."""
    from studies.common import append_rows

    columns = HEADER
    if path.exists():
        with path.open() as file:
            columns = file.readline().strip().split(",")
    places = [HEADER.index(column) for column in columns]
    append_rows(path, columns, [[row[place] for place in places] for row in rows])


def source(module):
    """A digest of the code of Shoal: settings may change between two runs of one version."""
    if module is None or module.__name__ != "shoal":
        return ""
    digest = hashlib.sha256()
    for path in sorted(Path(module.__file__).parent.rglob("*.py")):
        digest.update(path.read_bytes())
    return f", code {digest.hexdigest()[:8]}"


def preload(names, libraries):
    """Import what the models need before processes divide; the version of every library."""
    found = {}
    for name in names:
        library = libraries.get(name, "shoal")
        package = PACKAGES.get(library, str(library))
        try:
            known = None if library in APART else importlib.import_module(library)
            own = getattr(known, "__version__", None)  # of a checkout that is not installed
            found[name] = f"{library} {own or version(package)}{source(known)}"
        except ImportError as error:
            sys.exit(f"{name} needs {package}, which could not be imported ({error})")
    return found


def main():
    """Fit what is missing."""
    given = arguments()
    given.end = time.monotonic() + given.within
    limit_threads(given.threads)
    from studies.common import read_csv
    from studies.tables.models import LIBRARIES, models

    arms = json.loads(given.settings.read_text()) if given.settings else {}
    tasks = {name: arm.pop("task") for name, arm in arms.items() if "task" in arm}
    known = models(arms)
    given.models = given.models or ",".join(["shoal", *arms])
    asked = given.models.split(",")
    if unknown := [name for name in asked if name not in known]:
        sys.exit(f"there is no model {unknown[0]!r}; type some of {', '.join(known)}")
    given.versions = preload(asked, LIBRARIES)
    cells, fits = missing(given, read_csv, tasks), Fits(given, known)
    listed = {row["name"]: row["sha256"] for row in read_csv(sets.SUITE / "sets.csv")}
    for name in dict.fromkeys(cell[0] for cell in cells):
        if sets.digest(given.data, name) != listed[name]:
            sys.exit(f"{given.data / name}.npz is not the set of sets.csv; make it by sets.py")
    total = len(cells)
    print(f"{total} fits", flush=True)
    try:
        while cells or fits.running:
            while cells and fits.free and time.monotonic() < given.end:
                fits.start(cells.pop(0))
            rows = fits.ended()
            append(given.out, rows)
            for row in rows:
                place = total - len(cells) - len(fits.running)
                print(f"{place}/{total}", *row[:4], *filter(None, row[4:]), flush=True)
            if time.monotonic() > given.end:
                print(f"time is over; {len(cells) + len(fits.running)} fits are left", flush=True)
                break
    finally:
        fits.stop()


if __name__ == "__main__":
    main()

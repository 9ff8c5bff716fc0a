#!/usr/bin/env python3
"""SLURM for one machine, as far as submitit needs it: sbatch, srun, scontrol, scancel, sacct.

`install` writes a command of each name. Jobs keep their state in the folder FAKE_SLURM.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

COMMANDS = ("sbatch", "srun", "scontrol", "scancel", "sacct")


def install(folder):
    """Write the commands into a folder that is to be put first on PATH."""
    for name in COMMANDS:
        path = folder / name
        path.write_text(f'#!/bin/sh\nexec {sys.executable} {__file__} {name} "$@"\n')
        path.chmod(0o755)


def state():
    return Path(os.environ["FAKE_SLURM"])


def sbatch(script):
    found = re.search(r"--array=0-(\d+)", Path(script).read_text())
    for index in range(int(found[1]) + 1) if found else [None]:
        name = "77" if index is None else f"77_{index}"
        environment = {"SLURM_JOB_ID": "77", "FAKE_JOB": name}
        if index is not None:
            environment |= {"SLURM_ARRAY_JOB_ID": "77", "SLURM_ARRAY_TASK_ID": str(index)}
        (state() / f"{name}.state").write_text("RUNNING")
        subprocess.Popen(
            [sys.executable, __file__, "launch", script],
            env=os.environ | environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
    print("Submitted batch job 77")


def launch(script):
    """Run a job, and again as long as it asks for it."""
    name = os.environ["FAKE_JOB"]
    requeue = state() / f"{name}.requeue"
    while True:
        done = subprocess.run(["bash", script])
        with (state() / f"{name}.starts").open("a") as starts:
            starts.write(f"{done.returncode}\n")
        if not requeue.exists():
            break
        requeue.unlink()
    (state() / f"{name}.state").write_text("FAILED" if done.returncode else "COMPLETED")


def srun(*words):
    start = next(i for i, word in enumerate(words) if "python" in Path(word).name)
    said = dict(zip(words[:start], words[1:start], strict=False))
    job = os.environ["FAKE_JOB"]
    out, err = (
        re.sub("%A_%a|%j", job, said[flag]).replace("%t", "0") for flag in ("--output", "--error")
    )
    with open(out, "a") as stdout, open(err, "a") as stderr:
        sys.exit(subprocess.run(words[start:], stdout=stdout, stderr=stderr).returncode)


def scontrol(action, name):
    assert action == "requeue"
    (state() / f"{name}.requeue").touch()


def scancel(*words):
    raise AssertionError(words)


def sacct(*_):
    print("JobID|State|NodeList")
    for path in state().glob("*.state"):
        print(f"{path.stem}|{path.read_text()}|here")


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])

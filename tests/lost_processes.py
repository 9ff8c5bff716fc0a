"""Runs on several processes that lose one of them, and the process that trains.

python lost_processes.py OUT    one process of `train`, started by torchrun
"""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import mesh_cases
import torch

import shoal
from shoal.core.errors import PeerLost
from shoal.core.storage.files import read_tensors, write_tensors
from shoal.engine.processes.groups import join_processes
from shoal.training.folder.run import RunFolder

TESTS = Path(__file__).resolve().parent
SHARDS = TESTS / "training" / "shards_worker.py"
CASE, STEPS, PROCESSES = "svgd", 20, 2
SOON = 120
_stores = []
"""Stores that processes use as long as they live."""


def environment():
    """Variables of a process that finds this tree and its tests, and uses one core."""
    paths = os.pathsep.join([str(TESTS.parent), str(TESTS)])
    return {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}


def torchrun(processes, *words, restarts=0, **options):
    """Start torchrun; the options are those of `subprocess.Popen`."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--max-restarts={restarts}", f"--nproc-per-node={processes}", *words]
    return subprocess.Popen(command, env=environment(), text=True, **options)


def side_by_side(processes, *words, **options):
    """Start processes as torchrun does, which also holds their store, but without its watch."""
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    _stores.append(store)
    shared = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "WORLD_SIZE": str(processes),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
    }
    return [
        subprocess.Popen(
            [sys.executable, *words],
            env={**environment(), **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            text=True,
            **options,
        )
        for rank in range(processes)
    ]


def wait_for(condition, processes, seconds=SOON):
    """Wait until a condition holds; no process may end before."""
    limit = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < limit, "it took too long"
        ended = [process for process in processes if process.poll() is not None]
        assert not ended, f"ended early: {[p.stderr and p.stderr.read() for p in ended]}"
        time.sleep(0.002)


def expected():
    """The weights of one process that was not killed."""
    return mesh_cases.result(_fit(None))[0]


def _fit(folder):
    make, data, options = mesh_cases.CASES[CASE]
    options = {**options, "steps": STEPS, "save_every": 0, "out": folder, "progress": False}
    return shoal.fit(make(), data(), **options)


def train(out):
    """One process of a run that saves after every step; its number stands in a file at once."""
    torch.set_num_threads(1)
    rank, attempt = os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]
    note = out / f"pid-{attempt}-{rank}"
    note.with_suffix(".new").write_text(str(os.getpid()))
    note.with_suffix(".new").rename(note)
    try:
        join_processes(timeout=60)
        run = _fit(out / "run")
    except PeerLost as error:
        sys.exit(error.exit_status)
    write_tensors(out / f"end-{rank}.safetensors", mesh_cases.result(run)[0])
    torch.distributed.destroy_process_group()


def attempt(out, rank=None, delay=0.0):
    """A run under torchrun that loses a process after a while; whether the kill met the run.

    Args:
        out: empty folder for the run and the result of each process.
        rank: the process that is killed; None for none.
        delay: seconds from the moment at which all processes have their libraries loaded.

    Returns:
        Whether the processes had to be started again, and how many seconds the run took.
    """
    out.mkdir()
    with open(out / "log", "w") as log:
        job = torchrun(
            PROCESSES, __file__, str(out), restarts=1, stdout=log, stderr=subprocess.STDOUT
        )
        notes = [out / f"pid-0-{each}" for each in range(PROCESSES)]
        wait_for(lambda: all(note.exists() for note in notes), [job])
        begun = time.monotonic()
        if rank is not None:
            time.sleep(delay)
            try:
                os.kill(int(notes[rank].read_text()), signal.SIGKILL)
            except ProcessLookupError:
                pass
        status = job.wait(SOON)
    assert status == 0, (out / "log").read_text()[-3000:]
    return (out / "pid-1-0").exists(), time.monotonic() - begun


def difference(out, whole):
    """The largest difference between the weights of any process and those of one process."""
    found = 0.0
    for rank in range(PROCESSES):
        mine = read_tensors(out / f"end-{rank}.safetensors")
        assert mine.keys() == whole.keys()
        found = max(found, *(float((mine[key] - whole[key]).abs().max()) for key in whole))
    return found


def restart_often(folder, count):
    """Kill a random process at a random moment of `count` runs; all must end as one process does.

    Runs that ended before the kill do not count.
    """
    whole, chance, moments, largest = expected(), random.Random(0), [], 0.0
    _, seconds = attempt(folder / "whole")
    while len(moments) < count:
        out = folder / str(len(list(folder.iterdir())))
        rank, delay = chance.randrange(PROCESSES), chance.uniform(0, seconds)
        restarted, _ = attempt(out, rank, delay)
        largest = max(largest, difference(out, whole))
        if restarted:
            moments.append({"rank": rank, "delay": round(delay, 3)})
    assert largest < 1e-10, largest
    return {"tried": count, "picked_up": count, "largest_difference": largest, "kills": moments}


def on(processes, case, folder, last):
    """Train a case of `shards_worker` to a step on so many processes."""
    words = (str(SHARDS), case, str(folder), str(last))
    for process in side_by_side(processes, *words, stderr=subprocess.PIPE):
        _, trouble = process.communicate(timeout=SOON)
        assert process.returncode == 0, trouble


def continued(case, worlds, folder, one, total=6):
    """Stop a run on some processes half way, go on with others; difference from one process.

    Args:
        case: of `shards_worker`.
        worlds: numbers of processes, before and after.
        folder: new folder of the run.
        one: folder of the whole run of one process.
        total: steps.
    """
    for world, last in zip(worlds, (total // 2, total), strict=True):
        on(world, case, folder, last)
    found = 0.0
    expected, other = (RunFolder(path).checkpoint().parts for path in (one, folder))
    for part in ("ensemble", "optimizer", "tracker"):
        assert expected[part].keys() == other[part].keys()
        for name, tensor in expected[part].items():
            apart = (other[part][name].double() - tensor.double()).abs()
            found = max(found, float(apart.max()) if apart.numel() else 0.0)
    return found


if __name__ == "__main__":
    train(Path(sys.argv[1]))

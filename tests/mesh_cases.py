"""Small runs that several processes and one process must train alike, and the process that does."""

import json
import os
import signal
import subprocess
import sys
import warnings
from collections import Counter
from pathlib import Path

import torch
from torch import nn

import shoal
from shoal.core.errors import PeerLost, ShoalError
from shoal.core.storage.files import read_tensors, write_json, write_tensors
from shoal.engine.processes.groups import join_processes, restarted, traffic

STEPS = 5
METHODS = ("ensemble", "kde", "sge", "ssge", "svgd", "f-kde", "f-sge", "f-ssge", "f-svgd", "forde")


class Perceptron(nn.Sequential):
    """Seven inputs, three classes."""

    def __init__(self, *more):
        super().__init__(nn.Linear(6, 5), nn.Tanh(), *more, nn.Linear(5, 3))


class Trunk(nn.Module):
    """A trunk that members share, and a head each."""

    def __init__(self):
        super().__init__()
        self.trunk, self.head = nn.Linear(6, 5), nn.Linear(5, 3)

    def forward(self, x):
        return self.head(self.trunk(x).tanh())


class Images(nn.Module):
    """A convolution over small images."""

    def __init__(self):
        super().__init__()
        self.conv, self.head = nn.Conv2d(1, 2, 3), nn.Linear(2 * 16, 3)

    def forward(self, x):
        return self.head(self.conv(x).tanh().flatten(1))


def vectors(n=23):
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(n, 6, generator=draw, dtype=torch.float64)
    return x, torch.randint(0, 3, (n,), generator=draw)


def images():
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(20, 1, 6, 6, generator=draw, dtype=torch.float64)
    return x, torch.randint(0, 3, (20,), generator=draw)


def numbers():
    x, _ = vectors()
    return x, x[:, :1].sin() + 0.1 * x[:, 1:2]


def loaders():
    """Loaders of five members."""
    data = torch.utils.data.TensorDataset(*numbers())
    return [torch.utils.data.DataLoader(data, 8, shuffle=True) for _ in range(5)]


def members(build=Perceptron, count=7, **options):
    pairs = build if isinstance(build, list) else [(build, count)]
    return shoal.Ensemble.init(pairs, seed=3, **options).to(torch.float64)


def one_diverges():
    ensemble = members()
    with torch.no_grad():
        ensemble.weights["2.weight"][5].fill_(torch.inf)
    return ensemble


def _case(make, data, **options):
    return make, data, {"steps": STEPS, "batch_size": 8, "lr": 0.05, **options}


def _norm():
    return Perceptron(nn.BatchNorm1d(5))


def _dropout():
    return Perceptron(nn.Dropout(0.3))


class Normalised(nn.Module):
    """Normalised convolutions with dropout of elements and of channels."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(1, 2, 3, bias=False), nn.BatchNorm2d(2, affine=False)
        self.channels, self.elements = nn.Dropout2d(0.3), nn.Dropout(0.3)
        self.last, self.head = nn.BatchNorm1d(32, track_running_stats=False), nn.Linear(32, 3)

    def forward(self, x):
        x = self.channels(self.norm(self.conv(x)).tanh()).flatten(1)
        return self.head(self.elements(self.last(x)))


class SequenceFirst(nn.Module):
    """Dropout over [T, B, C], whose first axis is not the batch."""

    def __init__(self):
        super().__init__()
        self.first, self.drop, self.head = nn.Linear(2, 5), nn.Dropout(0.3), nn.Linear(5, 3)

    def forward(self, x):
        steps = self.first(x.view(len(x), 3, 2)).tanh().transpose(0, 1)
        return self.head(self.drop(steps).sum(0))


class Counting(Perceptron):
    """A buffer of its own, which every pass writes."""

    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        self.seen.add_(x.detach().square().sum())
        return super().forward(x)


class Mixing(Perceptron):
    """Outputs of a row depend on the other rows."""

    def forward(self, x):
        return super().forward(x - x.mean(0))


def _regressor():
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 1))


def _wide():
    return nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 3))


STRONG = {"strength": 30.0}
CASES = {
    "ensemble": _case(members, vectors, method="ensemble"),
    **{n: _case(members, vectors, method=n, **STRONG) for n in METHODS if n != "ensemble"},
    "batch norm": _case(lambda: members(_norm), vectors, method="f-kde", batch_size=9),
    "batch norm, forde": _case(lambda: members(_norm), vectors, method="forde", batch_size=9),
    "dropout": _case(lambda: members(_dropout), vectors, method="svgd", **STRONG),
    "dropout, f-svgd": _case(lambda: members(_dropout), vectors, method="f-svgd"),
    "dropout, forde": _case(lambda: members(_dropout), vectors, method="forde", **STRONG),
    "batch norm, loop": _case(
        lambda: members(_norm), vectors, method="f-svgd", batch_size=9, engine="loop"
    ),
    "batch norm, forde, loop": _case(
        lambda: members(_norm), vectors, method="forde", batch_size=9, engine="loop", **STRONG
    ),
    "normalised images": _case(lambda: members(Normalised), images, method="kde", batch_size=7),
    "normalised images, forde": _case(
        lambda: members(Normalised), images, method="forde", batch_size=7, **STRONG
    ),
    "sequence first": _case(lambda: members(SequenceFirst), vectors, method="f-kde"),
    "own buffer": _case(lambda: members(Counting), vectors, method="f-kde"),
    "mixed rows": _case(lambda: members(Mixing), vectors, method="f-kde", **STRONG),
    "augmentation": _case(
        lambda: members(Images), images, method="f-kde", augment={"name": "crop-flip", "padding": 1}
    ),
    "augmentation by member": _case(
        lambda: members(Images), images, method="kde",
        augment={"name": "crop-flip", "padding": 1, "per_member": True},
    ),
    "noise": _case(members, vectors, method="kde", noise=1.0, optimizer="sgd"),
    "clip": _case(members, vectors, method="f-kde", clip=0.01),
    "annealing": _case(members, vectors, method="svgd", annealing="linear"),
    "learned noise": _case(lambda: members(_regressor), numbers, method="f-kde"),
    "adversarial": _case(members, vectors, method="f-svgd", adversarial=0.05),
    "one neighbour": _case(
        members, vectors, method="kde", adversarial={"epsilon": 0.05, "shared": True}
    ),
    "function-space prior": _case(members, vectors, method="f-kde", prior="function-space"),
    "diverged": _case(one_diverges, vectors, method="f-kde", **STRONG),
    "diverged, svgd": _case(one_diverges, vectors, method="svgd", **STRONG),
    "mixed architectures": _case(
        lambda: members([(Perceptron, 3), (_wide, 4)]), vectors, method="f-kde", **STRONG
    ),
    "shared trunk": _case(
        lambda: members(Trunk, shared=("trunk.*",)), vectors, method="f-kde", noise=1.0,
        optimizer="sgd",
    ),
    "shared trunk, svgd": _case(
        lambda: members(Trunk, shared=("trunk.*",)), vectors, method="svgd", clip=0.05
    ),
    "frozen": _case(members, vectors, method="f-kde", frozen=3, **STRONG),
    "frozen, kde": _case(members, vectors, method="kde", frozen=2, **STRONG),
    "frozen, svgd": _case(members, vectors, method="svgd", frozen=2, **STRONG),
    "frozen, f-svgd": _case(members, vectors, method="f-svgd", frozen=2, **STRONG),
    "frozen, forde": _case(members, vectors, method="forde", frozen=2, **STRONG),
    "chunks": _case(members, vectors, method="f-kde", engine="chunk:2"),
    "calibrated": _case(members, vectors, method="kde", calibrated=True),
    "layerwise": _case(
        members, vectors, method=shoal.Repulsion(shoal.spaces.Layerwise(), strength=30.0)
    ),
    "last layer": _case(
        members, vectors, method=shoal.Repulsion(shoal.spaces.LastLayer(), strength=30.0)
    ),
    "fraction": _case(
        members, vectors, method=shoal.Repulsion(shoal.spaces.InputGradients(fraction=0.5)),
    ),
    "batch norm, fraction": _case(
        lambda: members(_norm), vectors, batch_size=9,
        method=shoal.Repulsion(shoal.spaces.InputGradients(fraction=0.5), strength=30.0),
    ),
    "validation": _case(
        lambda: members([(Perceptron, 4), (_wide, 5)]), vectors, method="f-kde", frozen=2, lr=0.2,
        steps=None, epochs=6, validation=0.3, patience=2,
    ),
    "folds": _case(
        lambda: members([(Perceptron, 4), (_wide, 5)]), vectors, frozen=2, lr=0.2, steps=None,
        epochs=8, folds=3, patience=3,
    ),
    "folds, learned noise": _case(
        lambda: members(_regressor), numbers, lr=0.2, steps=None, epochs=5, folds=2
    ),
    "own batches": _case(lambda: members(_norm), vectors, batches="own", batch_size=9),
    "own batches, svgd": _case(members, vectors, batches="own", method="svgd", **STRONG),
    "own batches, f-kde": _case(members, vectors, batches="own", method="f-kde", **STRONG),
    "own batches, forde": _case(members, vectors, batches="own", method="forde", **STRONG),
    "own batches, frozen": _case(
        members, vectors, batches="own", method="f-kde", frozen=2, engine="chunk:2", **STRONG
    ),
    "own loaders, frozen, learned noise": _case(
        lambda: members(_regressor), loaders, batches="own", frozen=2
    ),
    "own batches, learned noise": _case(lambda: members(_regressor), numbers, batches="own"),
    "own batches, augmentation": _case(
        lambda: members(Images), images, batches="own", method="kde",
        augment={"name": "crop-flip", "padding": 1},
    ),
    "points": _case(
        members, vectors, method=shoal.Repulsion(shoal.spaces.Outputs(), points="noise")
    ),
    "placebo, kde": _case(members, vectors, method={"name": "kde", "placebo": True}, **STRONG),
    "placebo, f-kde": _case(members, vectors, method={"name": "f-kde", "placebo": True}, **STRONG),
}  # fmt: skip


def trained(name, mesh=None, **more):
    """The run of a case."""
    make, data, options = CASES[name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", shoal.ShoalWarning)
        return shoal.fit(make(), data(), **options, **more, mesh=mesh, progress=False)


def result(run):
    """Everything that processes must agree on, as tensors and as plain values."""
    state = {name: t.detach().double() for name, t in run.ensemble.state.items()}
    learned = {f"likelihood/{n}": t.double() for n, t in run.likelihood.state.items()}
    rows = [{k: v for k, v in row.items() if k != "seconds"} for row in run.history]
    return state | learned, rows


def started(processes, out, *words, restarts=0, script=__file__):
    """This file, or another one, in several processes."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--max-restarts={restarts}"]
    command += [f"--nproc-per-node={processes}", script, str(out), *words]
    here = Path(__file__).resolve().parent
    paths = os.pathsep.join([str(here.parent), str(here)])
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)


def together(processes, out, *words, script=__file__):
    """Run cases in several processes; returns their folder."""
    done = started(processes, out, *words, script=script)
    assert done.returncode == 0, done.stderr[-3000:]
    return out


def largest_difference(out, name, processes):
    """Between the weights of any of several processes and those of one process."""
    expected, largest = result(trained(name))[0], 0.0
    for rank in range(processes):
        found = read_tensors(out / f"{name}-{rank}.safetensors")
        assert found.keys() == expected.keys()
        apart = [(found[key] - tensor).abs().max() for key, tensor in expected.items()]
        largest = max(largest, *(float(each) for each in apart))
    return largest


WEIGHTS = 6 * 5 + 5 + 5 * 3 + 3
BATCHES = (8, 8, 7, 8, 8)
TRAFFIC = {
    "ensemble": (None, False, 0),
    "f-kde": ("outputs", False, 3),
    "f-svgd": ("outputs", True, 3),
    "forde": ("gradients", False, 6),
    "kde": ("weights", False, None),
    "svgd": ("weights", True, None),
}
"""Space, whether drives are mixed, and coordinates per data point (None: all weights)."""


def predicted_bytes(name, processes, rank):
    """Bytes that a process receives in a run of seven members, by kind."""
    base, mixes, numbers = TRAFFIC[name]
    found = Counter()
    for points in BATCHES:
        size = WEIGHTS if numbers is None else numbers * points
        found.update(
            traffic(base, 7, processes, rank, numbers=size, outputs=3 * points, mixes=mixes, size=8)
        )
    return found


def received_bytes(out, name, rank):
    """Bytes that a process received in the steps of a run, by kind."""
    received = Counter(json.loads((out / f"{name}-{rank}.json").read_text())["received"])
    received.pop("history")
    return received


def stop_once(event):
    """A callback: a signal reaches this process after the first epoch."""
    if event.epoch == 1:
        os.kill(os.getpid(), signal.SIGTERM)


RESUMED = ("mixed architectures", "frozen, svgd", "shared trunk", "learned noise", "validation",
           "own batches, f-kde", "folds, learned noise")  # fmt: skip


def stopped(name, folder, mesh=None, stops=True):
    """A run that stops in its second epoch and leaves a folder."""
    make, data, options = CASES[name]
    callbacks = [stop_once if stops else lambda event: None]
    kept = {"out": folder, "keep_every": 1, "callbacks": callbacks, "loggers": ["csv"]}
    try:
        shoal.fit(make(), data(), **options, **kept, mesh=mesh, progress=False)
    except SystemExit as stop:
        assert stop.code == 128 + signal.SIGTERM
        return
    raise AssertionError("the run did not stop")


def resumed(name, folder, mesh=None):
    """The rest of a run that was stopped."""
    make, data, options = CASES[name]
    kept = {"out": folder, "keep_every": 1, "resume": True, "loggers": ["csv"]}
    return shoal.fit(make(), data(), **options, **kept, mesh=mesh, progress=False)


def resumed_folders(out, mesh):
    """Stop and resume here; stop here for one process; resume here what one process stopped."""
    rank = torch.distributed.get_rank()
    last = torch.distributed.get_world_size() - 1
    for name in RESUMED:
        for folder in (f"here {name}", f"for one {name}"):
            stopped(name, out / folder, mesh, stops=rank == last)
        for folder in (f"here {name}", f"from one {name}"):
            tensors, rows = result(resumed(name, out / folder, mesh))
            write_tensors(out / f"{folder}-{rank}.safetensors", tensors)
            write_json(out / f"{folder}-{rank}.json", {"rows": rows})


def killed(out):
    """A run that loses its last process once, in its first attempt, by SIGKILL."""
    torch.set_num_threads(1)
    join_processes(timeout=60)
    last = torch.distributed.get_rank() == torch.distributed.get_world_size() - 1

    def die(event):
        if last and not restarted() and event.epoch == 1:
            os.kill(os.getpid(), signal.SIGKILL)

    make, data, options = CASES["f-svgd"]
    kept = {"out": Path(out) / "run", "save_every": 0, "callbacks": [die], "progress": False}
    try:
        run = shoal.fit(make(), data(), **options, **kept)
    except PeerLost as error:
        write_json(Path(out) / "lost.json", {"said": str(error), "status": error.exit_status})
        sys.exit(error.exit_status)
    write_tensors(Path(out) / f"f-svgd-{int(last)}.safetensors", result(run)[0])


def main(out, mesh=None, *names):
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    rank = torch.distributed.get_rank()
    if not names:
        resumed_folders(Path(out), None if mesh == "-" else mesh)
    for name in names or CASES:
        try:
            run = trained(name, mesh if mesh != "-" else None)
            tensors, rows = result(run)
            received = run.provenance["received"]
            write_tensors(Path(out) / f"{name}-{rank}.safetensors", tensors)
            write_json(Path(out) / f"{name}-{rank}.json", {"rows": rows, "received": received})
        except Exception as error:
            write_json(Path(out) / f"{name}-{rank}.json", {"error": repr(error)})
            if not isinstance(error, ShoalError):
                raise
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    killed(sys.argv[1]) if sys.argv[2:] == ["killed"] else main(*sys.argv[1:])

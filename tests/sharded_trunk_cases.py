"""Small runs with a trunk in shards, and the process that trains them among others."""

import signal
import sys
import warnings
import weakref
from pathlib import Path

import torch
from mesh_cases import images, members, result, stop_once, vectors
from torch import nn

import shoal
from shoal.core.storage.files import write_json, write_tensors
from shoal.engine.processes.mesh import Mesh


class Deep(nn.Module):
    """A trunk of two layers that members share, and a head each."""

    def __init__(self, *more, frozen=False):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), *more, nn.Linear(5, 7), nn.Tanh())
        self.head = nn.Linear(7, 3)
        if frozen:  # equal in all members, so that it is stored once
            draw = torch.Generator().manual_seed(5)
            for weight in self.trunk.parameters():
                weight.data = torch.randn(weight.shape, generator=draw) / 2
                weight.requires_grad_(False)

    def forward(self, x):
        return self.head(self.trunk(x))


class Mixing(Deep):
    """Outputs of a row depend on the other rows, so that replicas repeat the batch."""

    def forward(self, x):
        return super().forward(x - x.mean(0))


class Adapted(nn.Module):
    """Frozen layers with a trained low-rank adapter each: no layer runs once for all members."""

    def __init__(self):
        super().__init__()
        draw = torch.Generator().manual_seed(5)
        self.first, self.second, self.head = nn.Linear(6, 7), nn.Linear(7, 7), nn.Linear(7, 3)
        self.down, self.up = nn.Linear(6, 2), nn.Linear(2, 7)
        for layer in (self.first, self.second):
            for weight in layer.parameters():
                weight.data = torch.randn(weight.shape, generator=draw) / 2
                weight.requires_grad_(False)

    def forward(self, x):
        x = (self.first(x) + self.up(self.down(x))).tanh()
        return self.head(self.second(x).tanh() + x)


class Convolved(nn.Module):
    """Shared convolutions; the head reads the first filters once more, as tied weights."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4)
        self.head = nn.Linear(4 * 16, 3)

    def forward(self, x):
        x = self.norm(self.conv(x).tanh())
        return self.head(x.flatten(1)) + self.conv.weight.square().sum()


class Attentive(nn.Module):
    """Shared attention, which reads the weights of its inner layer itself."""

    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(2, 1, batch_first=True)
        self.head = nn.Linear(6, 3)

    def forward(self, x):
        x = x.view(len(x), 3, 2)
        return self.head(self.attention(x, x, x, need_weights=False)[0].flatten(1))


def one_diverges():
    ensemble = deep()
    with torch.no_grad():
        ensemble.weights["head.weight"][2].fill_(torch.inf)
    return ensemble


def deep(build=Deep, *shared, count=5):
    return members(build, count, shared=shared or ("trunk.*",))


def fixed():
    return members(lambda: Deep(frozen=True), 5)


def _dropout():
    return deep(lambda: Deep(nn.Dropout(0.3)))


def _case(make, data=vectors, **options):
    return make, data, {"steps": 4, "batch_size": 8, "lr": 0.05, **options}


CASES = {
    "frozen": _case(fixed, method="f-kde", strength=30.0),
    "frozen, forde": _case(fixed, method="forde", strength=30.0),
    "frozen, loop": _case(fixed, method="kde", engine="loop"),
    "trained": _case(deep, method="f-kde", strength=30.0),
    "trained, svgd": _case(deep, method="svgd", clip=0.02),
    "trained, forde": _case(deep, method="forde", strength=30.0),
    "trained, loop": _case(deep, method="f-svgd", engine="loop"),
    "trained, chunks": _case(deep, method="f-kde", engine="chunk:1"),
    "noise": _case(deep, method="kde", noise=1.0, optimizer="sgd"),
    "dropout": _case(_dropout, method="f-kde"),
    "dropout, loop": _case(_dropout, method="f-kde", engine="loop"),
    "adapters": _case(lambda: members(Adapted, 5), method="kde", strength=30.0),
    "adapters, forde": _case(lambda: members(Adapted, 5), method="forde"),
    "mixed rows": _case(lambda: deep(Mixing), method="f-kde"),
    "convolutions": _case(lambda: deep(Convolved, "conv.*"), images, batch_size=7),
    # The keys' bias has no gradient, and Adam would divide its rounding error by itself.
    "attention": _case(lambda: deep(Attentive, "attention.*"), optimizer="sgd"),
    "adversarial": _case(deep, method="f-kde", adversarial=0.05),
    "frozen members": _case(deep, method="f-kde", frozen=1, strength=30.0),
    "function-space prior": _case(deep, method="f-kde", prior="function-space"),
    "fan-in prior": _case(deep, method="kde", prior="fan-in", optimizer="adamw"),
    "diverged": _case(one_diverges, method="f-kde"),
}


def trained(name, **more):
    """The run of a case."""
    make, data, options = CASES[name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", shoal.ShoalWarning)
        return shoal.fit(make(), data(), **options, **more, progress=False)


def stopped(name, folder, stops=True, **more):
    """A run that stops in its second epoch and leaves a folder."""
    callbacks = [stop_once if stops else lambda run: None]
    kept = {"out": folder, "keep_every": 1, "callbacks": callbacks}
    try:
        trained(name, **kept, **more)
    except SystemExit as stop:
        assert stop.code == 128 + signal.SIGTERM
        return
    raise AssertionError("the run did not stop")


def resumed(name, folder, **more):
    """The rest of a run that was stopped."""
    return trained(name, out=folder, keep_every=1, resume=True, **more)


RESUMED = ("frozen", "trained")


class Tall(nn.Module):
    """Eight layers that members share, with a private scale before each: none runs for all."""

    LAYERS, WIDTH = 8, 32

    def __init__(self):
        super().__init__()
        self.trunk = nn.ModuleList(nn.Linear(self.WIDTH, self.WIDTH) for _ in range(self.LAYERS))
        self.scales = nn.Parameter(torch.randn(self.LAYERS))
        self.first, self.head = nn.Linear(6, self.WIDTH), nn.Linear(self.WIDTH, 3)

    def forward(self, x):
        x = self.first(x)
        for layer, scale in zip(self.trunk, self.scales, strict=True):
            x = layer(scale * x).tanh()
        return self.head(x)


def gathered_memory(**here):
    """Bytes of the shards of a tall trunk, and the most bytes of gathered tensors at a time."""
    alive, most, held = {}, [0], []
    gather = Mesh.gather_shards

    def watched(mesh, own, total, kind="trunk"):
        arrival = gather(mesh, own, total, kind)
        if kind == "trunk":  # the run's result is whole again
            buffer, number = arrival._buffer, len(held)
            alive[number] = buffer.numel() * buffer.element_size()
            weakref.finalize(buffer, alive.pop, number)
            held.append(own.numel() * own.element_size())
            most[0] = max(most[0], sum(alive.values()))
        return arrival

    Mesh.gather_shards = watched
    try:
        options = {"method": "f-kde", "steps": 4, "batch_size": 8, "progress": False}
        shoal.fit(deep(Tall, "trunk.*", count=2), vectors(), **options, **here)
    finally:
        Mesh.gather_shards = gather
    return {"shard": max(held), "peak": most[0]}


def main(out, mesh, *names):
    """Every case here; then runs that stop here, and runs that one process stopped."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    rank, out = torch.distributed.get_rank(), Path(out)
    here = {"mesh": mesh, "trunk": "sharded"}
    for name in names:
        run = trained(name, **here)
        tensors, rows = result(run)
        write_tensors(out / f"{name}-{rank}.safetensors", tensors)
        received = run.provenance["received"]
        write_json(out / f"{name}-{rank}.json", {"rows": rows, "received": received})
    for name in RESUMED if (out / f"from one {RESUMED[0]}").exists() else ():
        stopped(name, out / f"for one {name}", stops=rank == 0, **here)
        write_tensors(
            out / f"from one {name}-{rank}.safetensors",
            result(resumed(name, out / f"from one {name}", **here))[0],
        )
    write_json(out / f"memory-{rank}.json", gathered_memory(**here))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])

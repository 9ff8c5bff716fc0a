"""Searches that several processes and one process must end alike, and the process that takes part.

python auto_cases.py OUT MESH [NAME...]    one process of several, started by torchrun
python auto_cases.py OUT killed            the same, and one process is lost during the search
"""

import json
import os
import signal
import sys
import warnings
from pathlib import Path

import torch
from mesh_cases import Perceptron, members, result, stop_once, vectors
from sharded_trunk_cases import Deep
from torch import nn

import shoal
from shoal.core.errors import PeerLost
from shoal.core.storage.files import write_json, write_tensors
from shoal.engine.processes.groups import join_processes, restarted
from shoal.training import fit as fit_module
from shoal.training.search import candidates as search_candidates


class _Once(torch.autograd.Function):
    """The identity, which cannot be differentiated twice."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x):
        return x.clone()

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, gradient):
        if torch.is_grad_enabled():
            raise RuntimeError("no second derivative here")
        return gradient


class Once(Perceptron):
    """A network that input gradients cannot train."""

    def forward(self, x):
        return super().forward(_Once.apply(x))


class Explosive(Perceptron):
    """Large weights make its outputs infinite."""

    def forward(self, x):
        return super().forward(x).exp()


class Interrupted:
    """A constant learning rate; at one step of the search, one process does something else."""

    def __init__(self, at, act):
        self.left, self.act = at, act

    def __call__(self, step, steps):
        self.left -= 1
        if self.left == 0 and _rank() == 1:
            self.act()
        return 1.0


def _rank():
    return torch.distributed.get_rank() if torch.distributed.is_initialized() else 0


def _fail():
    raise RuntimeError("this process has had enough")


def _lose_contact():
    if not restarted():
        os.kill(os.getpid(), signal.SIGKILL)


def _data():
    return vectors(120)  # labels of chance: repulsion keeps members from learning them


def _trunk():
    return Deep(frozen=True)


KDE = {"method": "kde", "strength": "auto"}
USUAL = {"batch_size": 24, "lr": 0.05, "epochs": 12, "progress": False}
CASES = {
    "auto": (members, {"method": "auto"}),
    "kde": (members, KDE),
    "frozen": (members, {"method": "f-svgd", "strength": "auto", "frozen": 2}),
    "validation": (members, {"method": "f-kde", "strength": "auto", "validation": 0.2,
                             "schedule": "plateau"}),
    "batch norm": (lambda: members(lambda: Perceptron(nn.BatchNorm1d(5))), KDE),
    "mixed": (lambda: members([(Perceptron, 4), (Once, 3)]), {"method": "auto"}),
    "diverges": (lambda: members(Explosive), {**KDE, "optimizer": "sgd"}),
    "fails late": (members, {"method": "auto", "schedule": lambda: Interrupted(12, _fail)}),
}  # fmt: skip
SHARDED = {
    "sharded": (lambda: members(_trunk), {"method": "auto", "trunk": "sharded"}),
    "sharded, fails": (lambda: members(_trunk), {"method": "auto", "trunk": "sharded",
                       "schedule": lambda: Interrupted(12, _fail)}),
}  # fmt: skip


def searched(name, ensemble=None, data=None, **more):
    """The run of a case."""
    make, options = (CASES | SHARDED)[name]
    options = {key: value() if callable(value) else value for key, value in options.items()}
    strengths = search_candidates.STRENGTHS
    if name == "diverges":
        search_candidates.STRENGTHS = {**strengths, "weights": (1e2, 1e15)}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", shoal.ShoalWarning)
            given = {**USUAL, **options, **more}
            return shoal.fit(ensemble or make(), data or _data(), **given)
    finally:
        search_candidates.STRENGTHS = strengths


def chosen(run):
    """The options that a search chose."""
    return {name: run.config.get(name) for name in ("method", "strength")}


def unhurt(name):
    """The schedule of a case, without its failure."""
    return {"schedule": Interrupted(0, _fail)} if "fails" in name else {}


def kept(out, name, run, **more):
    """Store what this process found."""
    tensors, rows = result(run)
    write_tensors(out / f"{name}-{_rank()}.safetensors", tensors)
    found = {"choice": run.choice.table(), "rows": rows, **more}
    write_json(out / f"{name}-{_rank()}.json", found)


def same(run, other):
    """Whether two runs are equal bit for bit, and received as many bytes in their steps.

    A trunk in shards also travels for small passes that are made once for an ensemble.
    """
    (tensors, rows), (expected, others) = result(run), result(other)
    equal = all(torch.equal(tensors[name], expected[name]) for name in tensors)
    received, usual = ({**r.provenance["received"], "trunk": 0} for r in (run, other))
    return equal and received == usual and tensors.keys() == expected.keys() and rows == others


def refused(to, name, **options):
    """Store the sentence with which this process refuses a search."""
    try:
        searched("auto", **options)
    except shoal.ConfigError as error:
        write_json(to / f"{name}-{_rank()}.json", {"error": str(error)})


def with_folder(out):
    """A run that a signal stops after its search goes on with its choice; others are refused."""
    stop = stop_once if _rank() == 1 else lambda event: None
    try:
        searched("auto", callbacks=[stop], out=out / "run")
    except SystemExit as signalled:
        assert signalled.code == 128 + signal.SIGTERM
    started = json.loads((out / "run" / "choice.json").read_text())
    run = searched("auto", out=out / "run", resume=True)
    kept(out, "resumed", run, searches=started["seconds"] != run.choice.seconds)
    refused(out, "taken", out=out / "run")
    refused(out, "other", out=out / "run", resume=True, **KDE)
    refused(out, "once", data=iter([_data()] * 9), steps=9, epochs=None, validation=_data(), **KDE)


def divided(out):
    """An ensemble of which this process has drawn its own members alone."""
    ensemble = shoal.Ensemble.init([(Perceptron, 7)], seed=3, divided=True).to(torch.float64)
    kept(out, "divided", searched("auto", ensemble=ensemble))


def killed(out):
    """A run that loses a process during its search, once."""
    join_processes(timeout=60)
    fit_module.TIMEOUT = 30.0
    schedule = Interrupted(12, _lose_contact)
    try:
        run = searched("kde", schedule=schedule, out=out / "run")
    except PeerLost as error:
        sys.exit(error.exit_status)
    kept(out, "killed", run)


def main(out, mesh, *names):
    torch.set_num_threads(1)
    out = Path(out)
    if mesh == "killed":
        return killed(out)
    torch.distributed.init_process_group("gloo")
    mesh = None if mesh == "-" else mesh
    if not names:
        with_folder(out)
        divided(out)
    for name in names or CASES:
        run = searched(name, mesh=mesh)
        given = searched(name, mesh=mesh, **chosen(run), **unhurt(name))
        kept(out, name, run, equal=same(run, given))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])

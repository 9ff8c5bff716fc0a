"""Wherever members live, they take the steps that they take on the device.

Each implementation of `Members`, and their compositions, against `OnDevice`. Two and four real
processes are in `test_mesh` and `test_mesh_sharded_trunk`, whole runs of offloaded members in
`test_offload`.
"""

import ast
import copy
import inspect
from dataclasses import replace

import pytest
import torch
from torch import nn

import shoal
from shoal.engine.members.member_runner import MemberRunner
from shoal.engine.processes.mesh import Mesh
from shoal.inference.likelihoods import Categorical
from shoal.inference.posterior import Posterior
from shoal.inference.priors import Gaussian
from shoal.interaction.methods import get
from shoal.training.members.chunks import InChunks
from shoal.training.members.frozen import WithFrozen
from shoal.training.members.processes import OverProcesses
from shoal.training.step import drive, stages, velocity
from shoal.training.step.drive import OnDevice, StepContext
from shoal.training.step.velocity import velocity_of

METHODS = ("ensemble", "kde", "sge", "svgd", "f-kde", "f-svgd", "forde-identity")
MEMBERS, STEPS, RATE = 5, 4, 0.1


def perceptron():
    return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 4))


def members(count=MEMBERS, seed=0):
    return shoal.Ensemble.init(perceptron, members=count, seed=seed).to("cpu", torch.float64)


def batch():
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(12, 3, generator=draw, dtype=torch.float64)
    return x, torch.randint(0, 4, (12,), generator=draw)


def one_process(total=MEMBERS):
    """A mesh of one process: nothing is sent, and every exchange is computed."""
    return Mesh(total, (1, 1), 0, (None, None, None))


def trajectory(method, where, chunk=None):
    """The weights after each of some steps along the velocity."""
    ensemble = members()
    context = StepContext(
        posterior=Posterior(Categorical(), Gaussian(1.0), 120),
        repulsion=get(method).repulsion,
        mapping=MemberRunner(chunk=chunk),
        members=where,
    )
    states = []
    for step in range(STEPS):
        moved, info = velocity_of(replace(context, step=step), ensemble, batch())
        with torch.no_grad():
            for name, weight in ensemble.weights.items():
                weight += RATE * moved[name]
        states.append({n: t.detach().clone() for n, t in ensemble.weights.items()})
        states[-1]["loss"], states[-1]["measures"] = info.loss, info.measures.double()
    return states


def check_same(states, expected):
    for one, other in zip(states, expected, strict=True):
        for name, tensor in other.items():
            close = 1e-6 if name == "measures" else 1e-12  # measures are kept in float32
            torch.testing.assert_close(one[name], tensor, rtol=close, atol=close, msg=name)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("chunk", [1, 2, 3, 5])
def test_in_chunks(method, chunk):
    check_same(trajectory(method, InChunks(OnDevice()), chunk), trajectory(method, OnDevice()))


@pytest.mark.parametrize("method", METHODS)
def test_over_processes(method):
    where = OverProcesses(InChunks(OnDevice()), one_process())
    check_same(trajectory(method, where), trajectory(method, OnDevice()))
    check_same(trajectory(method, where, chunk=2), trajectory(method, OnDevice()))


@pytest.mark.parametrize("method", METHODS)
def test_beside_frozen_members(method):
    """Frozen members have the same effect on members on the device, in chunks, over processes."""
    frozen = members(2, seed=9)
    frozen.train(False)
    expected = trajectory(method, WithFrozen(OnDevice(), frozen))
    check_same(trajectory(method, WithFrozen(InChunks(OnDevice()), frozen), chunk=2), expected)
    apart = OverProcesses(WithFrozen(InChunks(OnDevice()), frozen), one_process())
    check_same(trajectory(method, apart), expected)
    if method != "ensemble":
        alone = trajectory(method, OnDevice())
        assert not torch.equal(alone[-1]["0.weight"], expected[-1]["0.weight"])


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("frozen", [0, 1])
def test_on_the_host(method, frozen):
    def run(resident):
        ensemble = copy.deepcopy(members())
        options = {"optimizer": "sgd", "lr": RATE, "steps": STEPS, "batch_size": 12}
        options |= {"method": method, "frozen": frozen, "resident": resident, "progress": False}
        return shoal.fit(ensemble, batch(), **options).ensemble

    expected = run(None)
    for name, tensor in run(2).weights.items():
        torch.testing.assert_close(tensor, expected.weights[name], rtol=1e-12, atol=1e-12)


PLACES = ("mesh", "chunk", "offload", "shard", "replica", "resident", "process")


@pytest.mark.parametrize("module", [drive, stages, velocity], ids=lambda m: m.__name__)
def test_the_equation_names_no_place(module):
    """No name in the code of a step says where members live."""
    names = {
        name.lower()
        for node in ast.walk(ast.parse(inspect.getsource(module)))
        for name in (getattr(node, field, None) for field in ("id", "attr", "arg", "name"))
        if isinstance(name, str)
    }
    assert not {name for name in names if any(place in name for place in PLACES)}

"""Methods that are compiled one after another in a process do not disturb each other."""

import pytest
import torch
from torch import nn

import shoal
from shoal.core.errors import DataError, ShoalWarning
from shoal.interaction.methods import METHODS
from shoal.training.step import compiled_stages as compilation
from shoal.training.step.stages import Stages

X = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
Y = torch.arange(6) % 3


def mlp():
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))


def trained(method, engine):
    """Weights after two steps."""
    run = shoal.fit(
        shoal.Ensemble.init(mlp, 3, seed=1), (X, Y), steps=2, batch_size=6,
        method=shoal.methods.get(method).with_strength(3.0), engine=engine, seed=3, lr=0.05,
        optimizer="sgd", progress=False,
    )  # fmt: skip
    return run.ensemble.weights


@pytest.fixture
def fresh_compiler(monkeypatch):
    """Stages are traced anew, and run without a compiler, which not every machine has."""
    compile = torch.compile
    torch._dynamo.reset()
    compilation._compiled_once.cache_clear()
    traced = lambda stage, **_: compile(stage, dynamic=False, backend="aot_eager")  # noqa: E731
    monkeypatch.setattr(torch, "compile", traced)
    yield
    compilation._compiled_once.cache_clear()
    torch._dynamo.reset()


def check_in_one_process(names):
    for name in names:
        found, expected = trained(name, "vmap+compile"), trained(name, "vmap")
        for weight, tensor in expected.items():
            torch.testing.assert_close(
                found[weight], tensor, rtol=1e-5, atol=1e-6, msg=lambda m, name=name: f"{name}: {m}"
            )


@pytest.mark.parametrize(
    "order",
    [
        ["ensemble", "svgd", "f-kde", "forde", "f-kde", "svgd", "ensemble"],
        pytest.param(list(METHODS), marks=pytest.mark.nightly),
        pytest.param(list(METHODS)[::-1], marks=pytest.mark.nightly),
    ],
    ids=["one of each kind", "there", "back"],
)
def test_every_pair_of_methods_compiles_in_one_process(order, fresh_compiler):
    """Both orders together have each method before and after each other one."""
    check_in_one_process(order)


@pytest.fixture
def broken_compiler(monkeypatch):
    def broken(*_):
        raise torch._dynamo.exc.BackendCompilerFailed(None, RuntimeError("no backend"), None)

    monkeypatch.setattr(compilation, "_compiled_once", lambda: Stages(*[broken] * len(Stages())))


def test_a_stage_that_the_compiler_rejects_runs_uncompiled_with_one_warning(broken_compiler):
    with pytest.warns(ShoalWarning, match="output_stage.*uncompiled") as caught:
        found = trained("f-kde", "vmap+compile")
    assert len(caught) == 1
    assert all(torch.equal(found[name], t) for name, t in trained("f-kde", "vmap").items())


def test_a_mistake_in_the_data_stays_an_error_of_its_own(broken_compiler):
    stages = compilation.compiled_stages()

    class Refusing:
        likelihood = shoal.likelihoods.Categorical()

        def log_likelihood(self, outputs, y):
            raise DataError("targets of another shape")

    with pytest.raises(DataError, match="another shape"):
        stages.output_stage(
            Refusing(), None, torch.zeros(2, 3, 1), Y, torch.ones(2).bool(), 1, None
        )

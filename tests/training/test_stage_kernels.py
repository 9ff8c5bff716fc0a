"""Steps by kernels of whole stages against the same steps by the formulas of the stages."""

import pytest
import torch
from torch import nn
from triton_ready import runs_kernels

import shoal
from shoal.data.batches.sources import ArrayBatches
from shoal.engine.kernels import fused
from shoal.interaction import cloud
from shoal.interaction import kernels as radial
from shoal.interaction.bandwidths import Fixed, Median
from shoal.training.loop.trainer import Trainer
from shoal.training.options.options import Options
from shoal.training.options.settings import Settings
from shoal.training.step import stage_kernels
from shoal.training.step.stages import Stages

pytestmark = [
    runs_kernels(fused.step_kernels),
    pytest.mark.filterwarnings("ignore:Conversion of an array"),  # Triton's interpreter
    pytest.mark.filterwarnings("ignore:invalid value"),
]

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
MEMBERS = 5


@pytest.fixture(autouse=True)
def everywhere(monkeypatch):
    """Triton's interpreter takes tensors on the CPU."""
    monkeypatch.setattr(fused, "DEVICES", (DEVICE,))


@pytest.fixture
def launched(monkeypatch):
    """Names of the kernels that have run."""
    names = []
    known = {
        fused.interaction_kernels: ("matrices",),
        fused.likelihood_kernels: ("categorical", "many_categorical"),
        fused.step_kernels: ("measures", "add_to_history"),
        cloud.cloud_kernels: ("gram", "gram_and_matrices", "plus_product", "move"),
    }
    for module, functions in known.items():
        for name in functions:
            call = getattr(module, name)
            monkeypatch.setattr(
                module, name, lambda *a, _n=name, _c=call, **k: names.append(_n) or _c(*a, **k)
            )
    return names


def perceptron():
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))


def data():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(12, 6, generator=generator)
    return x.to(DEVICE), torch.randint(3, (12,), generator=generator).to(DEVICE)


def velocity(repulsion, prior=None, annealing=1.0, frozen=None, spoilt=None):
    ensemble = shoal.Ensemble.init(perceptron, MEMBERS, seed=1).to(DEVICE)
    if spoilt is not None:
        ensemble.weights["0.bias"].data[spoilt, 3] = float("nan")
    posterior = shoal.Posterior(
        shoal.likelihoods.Categorical(), prior or shoal.priors.Gaussian(), 50
    )
    if frozen is not None:
        frozen = shoal.Ensemble.init(perceptron, frozen, seed=2).to(DEVICE).eval()
    return shoal.forces(ensemble, posterior, repulsion, data(), annealing=annealing, frozen=frozen)


def same(monkeypatch, *given, **settings):
    found, info = velocity(*given, **settings)
    monkeypatch.setattr(fused, "ENABLED", False)
    want, about = velocity(*given, **settings)
    alive = about.alive
    assert torch.equal(info.alive, alive) and alive.any()
    torch.testing.assert_close(info.measures, about.measures, rtol=1e-4, atol=1e-7)
    torch.testing.assert_close(info.loss[alive], about.loss[alive], rtol=1e-5, atol=1e-7)
    for name, tensor in want.items():
        torch.testing.assert_close(
            found[name][alive], tensor[alive], rtol=1e-3, atol=1e-6, msg=name
        )


@pytest.mark.parametrize("legacy", [False, True])
@pytest.mark.parametrize("name", ["kde", "f-kde", "svgd", "f-svgd", "sge", "f-ssge"])
def test_every_method_moves_as_by_the_formulas(name, legacy, launched, monkeypatch):
    same(monkeypatch, shoal.methods.get(name, legacy=legacy).repulsion)
    assert {"categorical", "measures"} < set(launched)
    assert {"matrices", "gram_and_matrices"} & set(launched)


def test_a_plain_ensemble_moves_as_by_the_formulas(launched, monkeypatch):
    same(monkeypatch, None)
    assert launched == ["categorical", "measures"]


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.head = nn.Embedding(7, 4), nn.Linear(4, 3)

    def forward(self, x):
        return self.head(self.words(x).tanh())


@pytest.mark.parametrize("name", ["ensemble", "f-kde", "kde"])
@pytest.mark.parametrize("ignore", [None, 2])
def test_labels_of_tokens_move_members_as_by_the_formulas(name, ignore, launched, monkeypatch):
    generator = torch.Generator().manual_seed(0)
    x, y = (
        torch.randint(7, (4, 5), generator=generator),
        torch.randint(3, (4, 5), generator=generator),
    )
    batch = x.to(DEVICE), y.to(DEVICE)

    def moved():
        ensemble = shoal.Ensemble.init(Tagger, 3, seed=1).to(DEVICE)
        likelihood = shoal.likelihoods.Categorical(ignore_index=ignore)
        posterior = shoal.Posterior(likelihood, shoal.priors.Gaussian(), 50)
        return shoal.forces(ensemble, posterior, shoal.methods.get(name).repulsion, batch)

    found, info = moved()
    assert "many_categorical" in launched
    monkeypatch.setattr(fused, "ENABLED", False)
    want, about = moved()
    torch.testing.assert_close(info.loss, about.loss, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(info.measures, about.measures, rtol=1e-4, atol=1e-7)
    for weight, tensor in want.items():
        torch.testing.assert_close(found[weight], tensor, rtol=1e-3, atol=1e-6, msg=weight)


@pytest.mark.parametrize("kernel", [radial.Laplace(), radial.IMQ(), radial.Matern(2.5)])
@pytest.mark.parametrize("bandwidth", [Fixed(3.0), Median(scale="unit")])
@pytest.mark.parametrize("space", [shoal.spaces.Outputs(), shoal.spaces.Weights()])
def test_every_radial_kernel_and_bandwidth(space, kernel, bandwidth, launched, monkeypatch):
    same(monkeypatch, shoal.Repulsion(space, kernel, bandwidth, strength=5.0))
    assert {"matrices", "gram_and_matrices"} & set(launched)


@pytest.mark.parametrize("name", ["kde", "f-kde", "svgd", "f-svgd"])
def test_frozen_and_diverged_members(name, monkeypatch):
    same(monkeypatch, shoal.methods.get(name).repulsion, frozen=2, spoilt=3)


@pytest.mark.parametrize("annealing", [0.5, torch.tensor(0.5)])
@pytest.mark.parametrize("prior", [shoal.priors.FanIn(2.0), shoal.priors.Flat()])
@pytest.mark.parametrize("name", ["kde", "f-kde"])
def test_priors_and_annealing(name, prior, annealing, monkeypatch):
    annealing = annealing.to(DEVICE) if isinstance(annealing, torch.Tensor) else annealing
    same(monkeypatch, shoal.methods.get(name).repulsion, prior, annealing)


@pytest.mark.parametrize(
    "repulsion",
    [
        shoal.Repulsion(shoal.spaces.Outputs(), calibrated=True),
        shoal.Repulsion(shoal.spaces.Outputs(probabilities=True)),
        shoal.Repulsion(shoal.spaces.Normalised(shoal.spaces.Weights())),
    ],
)
def test_other_repulsions_still_run(repulsion, monkeypatch):
    same(monkeypatch, repulsion)


OPTIMIZERS = [
    "sgd",
    {"name": "sgd", "momentum": 0.9, "dampening": 0.1, "weight_decay": 0.3},
    {"name": "sgd", "momentum": 0.9, "nesterov": True},
    {"name": "adam", "weight_decay": 0.3},
    {"name": "adamw", "weight_decay": 0.3, "betas": (0.8, 0.99)},
]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("members", [5, 14])  # with members as vectors, and as a matrix
def test_one_kernel_pushes_and_moves_as_the_optimiser(members, optimizer, launched, monkeypatch):
    def trained(dtype):
        ensemble = shoal.Ensemble.init(perceptron, members, seed=1).to(DEVICE, dtype)
        given = dict(method="kde", strength=20.0, likelihood="categorical", lr=0.1, steps=4,
                     batch_size=12, prior="gaussian", optimizer=optimizer,
                     engine="vmap")  # fmt: skip
        x, y = data()
        batches = ArrayBatches(x.to(dtype), y, 12)
        trainer = Trainer(ensemble, Settings.resolve(Options.of(given)), batches)
        for _ in trainer.run():
            pass
        states = [s for each in trainer.mover.optimizer.state.values() for s in each.values()]
        return trainer.tracker.state, [*ensemble.weights.values(), *states]

    history, tensors = trained(torch.float32)
    moves = launched.count("move") + launched.count("plus_product")
    assert "move" in launched and moves >= launched.count("add_to_history") > 1
    monkeypatch.setattr(fused, "ENABLED", False)
    usual, exact = trained(torch.float32)[1], trained(torch.float64)
    for each in zip(tensors, usual, exact[1], strict=True):
        found, torchs, want = (tensor.detach() for tensor in each)
        rounding = float((torchs - want).abs().max())  # of torch's own optimiser
        bound = max(3e-6 * float(want.abs().max()), 2 * rounding)
        torch.testing.assert_close(found.double(), want.double(), rtol=0, atol=bound)
    torch.testing.assert_close(history["sums"], exact[0]["sums"], rtol=1e-4, atol=1e-6)


def test_a_member_that_diverges_in_the_passes_repels_nobody(launched, monkeypatch):
    """The Gram matrix is found before the passes, from weights that are all finite."""

    class Logarithm(nn.Linear):
        def forward(self, x):
            return super().forward(x) + (9.0 - self.weight[0, 0]).log()

    def moved():
        ensemble = shoal.Ensemble.init(lambda: Logarithm(6, 3), MEMBERS, seed=1).to(DEVICE)
        ensemble.weights["weight"].data[1, 0, 0] = 10.0
        posterior = shoal.Posterior(shoal.likelihoods.Categorical(), shoal.priors.Gaussian(), 50)
        repulsion = shoal.Repulsion(shoal.spaces.Weights(), strength=5.0)
        return shoal.forces(ensemble, posterior, repulsion, data())

    found, info = moved()
    assert "gram" in launched and info.alive.tolist() == [True, False, True, True, True]
    monkeypatch.setattr(fused, "ENABLED", False)
    want, about = moved()
    torch.testing.assert_close(info.measures, about.measures, rtol=1e-4, atol=1e-7)
    for name, tensor in want.items():
        torch.testing.assert_close(found[name][2:], tensor[2:], rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize(
    ("method", "batches"),
    [("ensemble", "common"), ("kde", "common"), ("f-kde", "common"), ("f-kde", "own")],
)
def test_training_has_the_same_history(method, batches, launched, monkeypatch):
    def trained():
        ensemble = shoal.Ensemble.init(perceptron, MEMBERS, seed=1).to(DEVICE)
        given = dict(method=method, likelihood="categorical", lr=0.1, steps=3, batch_size=5,
                     prior="gaussian", optimizer="adam", engine="vmap",
                     batches=batches)  # fmt: skip
        trainer = Trainer(ensemble, Settings.resolve(Options.of(given)), ArrayBatches(*data(), 5))
        for _ in trainer.run():
            pass
        return trainer.tracker.state, ensemble.weights

    history, weights = trained()
    assert "add_to_history" in launched
    monkeypatch.setattr(fused, "ENABLED", False)
    want, others = trained()
    for name, tensor in want.items():
        torch.testing.assert_close(history[name], tensor, rtol=1e-4, atol=1e-5)
    for name, tensor in others.items():
        torch.testing.assert_close(weights[name], tensor, rtol=1e-3, atol=1e-4)


def test_compiled_stages_are_asked_only_where_there_is_no_kernel(monkeypatch):
    asked = []

    def compiled(name):
        return lambda *given: asked.append(name) or getattr(Stages(), name)(*given)

    stages = stage_kernels.kernels_first(Stages(*map(compiled, Stages._fields)), Stages())
    for name in ("kde", "f-kde", "sge"):
        ensemble = shoal.Ensemble.init(perceptron, MEMBERS, seed=1).to(DEVICE)
        posterior = shoal.Posterior(shoal.likelihoods.Categorical(), shoal.priors.Flat(), 50)
        repulsion = shoal.methods.get(name).repulsion
        shoal.forces(ensemble, posterior, repulsion, data(), stages=stages)
    assert asked == ["weight_stage"]  # of the estimator: at flat weights, `f-kde` has no such stage

"""Members compared at other points than the batch: literal updates, engines, limits of what works.

The points of a step are drawn again with the key of the step, and given to the textbook.
"""

import dataclasses

import numpy as np
import pytest
import reference
import torch
from torch import nn

import shoal
from shoal.core.errors import ConfigError, DataError
from shoal.core.random import key
from shoal.core.structure import Structured, Weighted
from shoal.data.batches.sources import ArrayBatches
from shoal.engine.members.member_runner import MemberRunner
from shoal.models import MLP
from shoal.training.mover.prepare import prepared
from shoal.training.options.points import resolved

pytestmark = pytest.mark.usefixtures("double")

MEMBERS, BATCH, N, SEED, STEP = 4, 6, 40, 11, 5
GAMMA, T, STRENGTH, PRIOR_STD = 0.7, 1.3, 0.6, 0.8
TOLERANCE = {"rtol": 1e-10, "atol": 1e-10}
ENGINES = {
    "vmap": MemberRunner(),
    "loop": MemberRunner("loop"),
    "chunk": MemberRunner(chunk=3),
    "loop in chunks": MemberRunner("loop", chunk=1),
}


def network(outputs=3):
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, outputs))


def training_data(seed=1, outputs=3):
    generator = torch.Generator().manual_seed(seed)
    x = 0.3 + torch.linspace(0.5, 2, 4) * torch.randn(N, 4, generator=generator)
    return x, torch.randint(outputs, (N,), generator=generator)


def negated(x, key):
    return -x


def elsewhere(rows=9):
    return torch.randn(rows, 4, generator=torch.Generator().manual_seed(8))


def other_data():
    split = shoal.Split(elsewhere(), torch.zeros(9, dtype=torch.int64))
    return shoal.Dataset("elsewhere", split)


POINTS = {
    "augmented": lambda: shoal.points.Augmented(negated),
    "augmented, few": lambda: shoal.points.Augmented(negated, count=4),
    "unlabelled": lambda: shoal.points.Unlabelled(elsewhere()),
    "unlabelled, many": lambda: shoal.points.Unlabelled(elsewhere().numpy(), count=8),
    "dataset": lambda: shoal.points.OtherData(other_data()),
    "noise": lambda: shoal.points.Noise(0.5),
    "noise, few": lambda: shoal.points.Noise(count=3),
    "uniform": lambda: shoal.points.Uniform(),
    "mixup": lambda: shoal.points.Mixup(),
    "mixup, many": lambda: shoal.points.Mixup(0.4, count=9),
}


def ready(name, points, x, **how):
    """The repulsion of a method with these points, prepared as `fit` does."""
    method = shoal.methods.get(name, points=points, **how).with_strength(STRENGTH)
    ensemble = shoal.Ensemble.init(network, 1)
    method = resolved(method, ensemble, lambda: x)
    source = ArrayBatches(x, torch.zeros(len(x)), 7)
    return prepared(method, source, None, torch.float64)[0]


def posterior(likelihood=None):
    likelihood = likelihood or shoal.likelihoods.Categorical()
    return shoal.Posterior(likelihood, shoal.priors.Gaussian(PRIOR_STD), N, temperature=T)


def textbook(modules, batch, likelihood=("categorical", 1.0), **options):
    settings = {"annealing": GAMMA, "temperature": T, "strength": STRENGTH, "prior_std": PRIOR_STD}
    return reference.Textbook(modules, batch, N, likelihood, **(settings | options))


def ensemble_and_members(build=network, members=MEMBERS):
    ensemble = shoal.Ensemble.init(build, members, seed=3)
    return ensemble, [ensemble.member(i) for i in range(members)]


def forces(ensemble, repulsion, batch, target=None, **how):
    how = {"annealing": GAMMA, "seed": SEED, "step": STEP} | how
    return shoal.forces(ensemble, target or posterior(), repulsion, batch, **how)


def drawn(repulsion, x):
    return repulsion.points.draw(x, key(SEED, "points", STEP))


@pytest.mark.parametrize("name", ["f-kde", "f-sge", "f-svgd"])
@pytest.mark.parametrize("kind", POINTS)
def test_the_update_in_function_space_is_the_literal_one(kind, name):
    x, y = training_data()
    batch = x[:BATCH], y[:BATCH]
    repulsion = ready(name, POINTS[kind](), x)
    ensemble, modules = ensemble_and_members()
    velocity, info = forces(ensemble, repulsion, batch)
    points = drawn(repulsion, batch[0]).x
    book = textbook(modules, batch)
    target = book.function_space(name.removeprefix("f-"), False, points=points) / N
    torch.testing.assert_close(reference.flat_velocity(velocity, modules), target, **TOLERANCE)
    at_batch = book.function_space(name.removeprefix("f-"), False) / N
    assert (target - at_batch).norm() > 1e-3 * at_batch.norm()
    assert info.push > 1e-3 * info.drive


@pytest.mark.parametrize("name", ["forde", "forde-identity"])
@pytest.mark.parametrize("kind", POINTS)
def test_the_update_of_input_gradients_is_the_literal_one(kind, name):
    x, y = training_data()
    batch = x[:BATCH], y[:BATCH]
    repulsion = ready(name, POINTS[kind](), x)
    ensemble, modules = ensemble_and_members()
    velocity, _ = forces(ensemble, repulsion, batch)
    points = drawn(repulsion, batch[0])
    X = (x - x.mean(0)).numpy()
    U = np.linalg.svd(X, full_matrices=True)[2].T
    spread = ((X @ U) ** 2).sum(0) / ((X**2).sum() / X.shape[1])
    axes = (None, None) if name == "forde-identity" else (torch.tensor(U), torch.tensor(spread))
    book = textbook(modules, batch)
    target = book.gradient_space(False, *axes, points=(points.x, batch[1][points.rows])) / N
    torch.testing.assert_close(reference.flat_velocity(velocity, modules), target, **TOLERANCE)
    assert (target - book.gradient_space(False, *axes) / N).norm() > 1e-3 * target.norm()


def test_regression_and_points():
    x, _ = training_data()
    batch = x[:BATCH], torch.randn(BATCH, 1, generator=torch.Generator().manual_seed(2))
    likelihood = shoal.likelihoods.Gaussian(0.3)
    for name in ("f-kde", "forde-identity"):
        repulsion = ready(name, "mixup", x)
        ensemble, modules = ensemble_and_members(lambda: network(1))
        velocity, _ = forces(ensemble, repulsion, batch, posterior(likelihood))
        book, points = textbook(modules, batch, ("gaussian", 0.3)), drawn(repulsion, batch[0])
        if name == "f-kde":
            target = book.function_space("kde", False, points=points.x) / N
        else:
            target = book.gradient_space(points=(points.x, batch[1][points.rows])) / N
        torch.testing.assert_close(reference.flat_velocity(velocity, modules), target, **TOLERANCE)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", ["f-kde", "f-svgd", "forde"])
@pytest.mark.parametrize("norm", [None, "batch"], ids=str)
def test_every_engine_gives_the_same_update(norm, name, engine):
    x, y = training_data()
    repulsion = ready(name, "noise", x)

    def velocity(mapping):
        build = lambda: MLP((6,), "tanh", norm=norm).build((4,), 3)  # noqa: E731
        ensemble = shoal.Ensemble.init(build, MEMBERS, seed=3).train()
        before = {n: t.clone() for n, t in ensemble.buffers.items()}
        found, info = forces(ensemble, repulsion, (x[:BATCH], y[:BATCH]), mapping=mapping)
        statistics = {n: t for n, t in ensemble.buffers.items() if "mean" in n}
        assert all(not torch.equal(t, before[n]) for n, t in statistics.items())
        return found | statistics, info

    (expected, info), (found, again) = velocity(MemberRunner()), velocity(ENGINES[engine])
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(again.measures, info.measures, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("name", ["f-kde", "forde-identity"])
def test_points_do_not_move_the_running_statistics(name):
    x, y = training_data()
    build = lambda: MLP((6,), "tanh", norm="batch").build((4,), 3)  # noqa: E731

    def statistics(points):
        ensemble = shoal.Ensemble.init(build, MEMBERS, seed=3).train()
        forces(ensemble, ready(name, points, x), (x[:BATCH], y[:BATCH]))
        return ensemble.buffers

    torch.testing.assert_close(statistics("noise"), statistics("batch"), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", ["f-kde", "f-sge", "f-svgd", "forde-identity"])
def test_a_point_that_comes_twice_counts_once(name):
    """No number of points rescales the push: T / N stays, as a density of functions asks."""
    x, y = training_data()
    batch, pool = (x[:BATCH], y[:BATCH]), elsewhere(1)
    ensemble, _ = ensemble_and_members()
    once, twice = (
        forces(ensemble, ready(name, shoal.points.Unlabelled(pool, count), x), batch)[0]
        for count in (1, 2)
    )
    if name == "forde-identity":  # its targets are drawn by row: the same row for both points
        fixed = dataclasses.replace(
            ready(name, shoal.points.Unlabelled(pool), x), points=Same(pool)
        )
        doubled = dataclasses.replace(fixed, points=Same(pool.repeat(2, 1)))
        once, twice = (forces(ensemble, each, batch)[0] for each in (fixed, doubled))
    torch.testing.assert_close(twice, once, **TOLERANCE)


@dataclasses.dataclass(frozen=True, eq=False)
class Same:
    """Points that are the same at every step, all with the target of the first row."""

    x: torch.Tensor

    def draw(self, x, key):
        return shoal.points.Drawn(self.x, torch.zeros(len(self.x), dtype=torch.int64))


@pytest.mark.parametrize("name", ["f-kde", "f-svgd", "forde-identity"])
def test_the_batch_given_as_points_is_the_batch(name):
    x, y = training_data()
    ensemble, _ = ensemble_and_members()
    usual = ready(name, "batch", x)
    rows = torch.arange(BATCH)

    class Given:
        def draw(self, x, key):
            return shoal.points.Drawn(x.clone(), rows)

    for per in ("data", "batch"):
        for weight in (None, torch.ones(BATCH)):
            y_ = y[:BATCH] if weight is None else Weighted.of_pair(y[:BATCH], weight)
            old = dataclasses.replace(usual, per=per)
            new = dataclasses.replace(old, points=Given())
            expected, info = forces(ensemble, old, (x[:BATCH], y_))
            found, again = forces(ensemble, new, (x[:BATCH], y_))
            torch.testing.assert_close(found, expected, **TOLERANCE)
            torch.testing.assert_close(again.measures, info.measures, rtol=1e-6, atol=1e-9)


def test_weights_of_rows_weigh_the_drive_and_not_the_points():
    x, y = training_data()
    ensemble, modules = ensemble_and_members()
    repulsion = ready("f-kde", shoal.points.Unlabelled(elsewhere()), x)
    weight = torch.tensor([1.0, 2, 0, 1, 1, 1])
    repeated = torch.tensor([0, 1, 1, 3, 4, 5])
    found, _ = forces(ensemble, repulsion, (x[:BATCH], Weighted.of_pair(y[:BATCH], weight)))
    expected, _ = forces(ensemble, repulsion, (x[repeated], y[repeated]))
    torch.testing.assert_close(found, expected, **TOLERANCE)


@pytest.mark.parametrize("name", ["f-kde", "f-sge", "f-svgd", "forde-identity"])
def test_frozen_members_repel_at_the_points(name):
    """The last members move as they do in the whole ensemble."""
    x, y = training_data()
    batch = x[:BATCH], y[:BATCH]
    repulsion = ready(name, "mixup", x)
    whole = shoal.Ensemble.init(network, MEMBERS, seed=3)
    expected, _ = forces(whole, repulsion, batch)
    frozen, moving = whole.slice_members(0, 2), whole.slice_members(2, MEMBERS)
    found, _ = forces(moving, repulsion, batch, frozen=frozen)
    torch.testing.assert_close(found, {n: t[2:] for n, t in expected.items()}, **TOLERANCE)


@pytest.mark.parametrize("shared", [False, True])
def test_adversarial_training_and_points(shared):
    x, y = training_data()
    batch = x[:BATCH], y[:BATCH]
    repulsion = ready("f-kde", "uniform", x)
    ensemble, modules = ensemble_and_members()
    how = {"adversarial": shoal.Adversarial(0.05, shared=shared)}
    velocity, _ = forces(ensemble, repulsion, batch, **how)
    book = textbook(modules, batch, adversarial=(0.05, shared))
    target = book.function_space("kde", False, points=drawn(repulsion, batch[0]).x) / N
    torch.testing.assert_close(reference.flat_velocity(velocity, modules), target, **TOLERANCE)


def test_several_architectures_and_dropout():
    x, y = training_data()
    wide = lambda: nn.Sequential(nn.Linear(4, 7), nn.Dropout(0.5), nn.Linear(7, 3))  # noqa: E731
    for name in ("f-kde", "forde-identity"):
        repulsion = ready(name, "noise", x)
        ensemble = shoal.Ensemble.init([(network, 2), (wide, 2)], seed=1).train()
        one, two = (
            forces(ensemble, repulsion, (x[:BATCH], y[:BATCH]), mapping=ENGINES[engine])
            for engine in ("vmap", "chunk")
        )
        torch.testing.assert_close(one[0], two[0], rtol=1e-9, atol=1e-11)
        assert bool(one[1].alive.all())


class Pair(nn.Module):
    """A network with two inputs, one real and one of tokens."""

    def __init__(self):
        super().__init__()
        self.embedding, self.out = nn.Embedding(5, 3), nn.Linear(7, 2)

    def forward(self, real, tokens):
        return self.out(torch.cat([real, self.embedding(tokens).mean(1)], -1)).tanh()


def structured(rows, seed=0):
    generator = torch.Generator().manual_seed(seed)
    real = torch.randn(rows, 4, generator=generator)
    return {"real": real, "tokens": torch.randint(5, (rows, 6), generator=generator)}


@pytest.mark.parametrize("kind", ["noise", "uniform", "mixup", "unlabelled"])
@pytest.mark.parametrize("name", ["f-kde", "forde-identity"])
def test_structured_inputs(name, kind):
    x, y = structured(N), torch.randint(2, (N,))
    points = shoal.points.Unlabelled(structured(5, seed=1)) if kind == "unlabelled" else kind
    run = shoal.fit(
        shoal.Ensemble.init(Pair, 3), (x, y), method={"name": name, "points": points},
        epochs=1, batch_size=10, progress=False,
    )  # fmt: skip
    assert np.isfinite(run.history[-1]["loss"]) and run.history[-1]["push"] > 0


def test_a_structure_keeps_the_tokens_of_its_rows():
    x = Structured.of(structured(8))
    for kind in ("noise", "uniform", "mixup"):
        points = ready_points(kind, x)
        found = points.draw(x, key(0, "points", 0))
        assert torch.equal(found.x.tensors["tokens"], x.tensors["tokens"][found.rows])
        assert not torch.equal(found.x.tensors["real"], x.tensors["real"][found.rows])


def ready_points(kind, x):
    method = resolved(
        shoal.methods.get("f-kde", points=kind), shoal.Ensemble.init(Pair, 1), lambda: x
    )
    source = ArrayBatches(x, torch.zeros(len(x)), 4)
    return prepared(method, source, None, torch.float64)[0].points


def test_tokens_have_points_of_the_users_and_no_noise():
    build = lambda: nn.Sequential(nn.Embedding(5, 3), nn.Flatten(), nn.Linear(12, 2))  # noqa: E731
    x, y = torch.randint(5, (N, 4)), torch.randint(2, (N,))

    def trained(points):
        return shoal.fit(
            shoal.Ensemble.init(build, 3), (x, y), method={"name": "f-kde", "points": points},
            epochs=1, progress=False,
        )  # fmt: skip

    assert trained(torch.randint(5, (7, 4))).history[-1]["push"] > 0
    for kind in ("noise", "uniform", "mixup"):
        with pytest.raises(DataError, match=f"points '{kind}' change real inputs"):
            trained(kind)


def test_points_that_no_step_can_use_are_refused():
    with pytest.raises(ConfigError, match="weights are compared without inputs"):
        shoal.methods.get("kde", points="noise")
    with pytest.raises(ConfigError, match="has no|compares no members"):
        shoal.methods.get("ensemble", points="noise")
    with pytest.raises(ConfigError, match="set the count of the points"):
        shoal.methods.get("forde", points="noise", fraction=0.5)
    x, y = training_data()
    for kind in ("noise", "uniform", "unlabelled", "dataset", "augmented"):
        with pytest.raises(ConfigError, match="prepared before training"):
            forces(shoal.Ensemble.init(network, 2), shoal.Repulsion(points=kind), (x, y))

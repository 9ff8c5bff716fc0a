"""Repulsion of input gradients against its literal definition, and in every way it can be run."""

import dataclasses
from functools import cache

import numpy as np
import pytest
import reference
import torch
from ready import ready
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import shoal
from shoal.core.errors import ConfigError, DataError
from shoal.engine.members.member_runner import MemberRunner
from shoal.inference.network_pass import random_rows
from shoal.interaction.axes import cosines
from shoal.interaction.repulsion import interact
from shoal.models import MLP, SmallCNN
from shoal.training.step import velocity as fraction

pytestmark = pytest.mark.usefixtures("double")

MEMBERS, BATCH, N, CLASSES = 4, 6, 40, 3
GAMMA, T, STRENGTH, PRIOR_STD = 0.7, 1.3, 0.6, 0.8
TOLERANCE = {"rtol": 1e-8, "atol": 1e-10}
NAMES = [name for name in shoal.methods.METHODS if name.startswith("forde")]
ENGINES = {
    "vmap": MemberRunner(),
    "loop": MemberRunner("loop"),
    "chunk": MemberRunner(chunk=3),
    "loop in chunks": MemberRunner("loop", chunk=1),
}


def attentive():
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    return nn.Sequential(layer, nn.Flatten(), nn.Linear(32, CLASSES))


NETWORKS = {
    "mlp": (lambda: MLP((7, 6), "tanh").build((5,), CLASSES), (5,)),
    "cnn with batch norm": (
        lambda: SmallCNN((3, 4), "softplus", norm="batch").build((2, 4, 4), CLASSES),
        (2, 4, 4),
    ),
    "layer norm": (lambda: MLP((7, 6), "gelu", norm="layer").build((5,), CLASSES), (5,)),
    "relu": (lambda: MLP((9, 8), "relu").build((5,), CLASSES), (5,)),
    "attention": (attentive, (4, 8)),
}


def training_data(shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    spread = torch.linspace(0.5, 2.0, int(np.prod(shape))).reshape(shape)
    x = 0.3 + spread * torch.randn(N, *shape, generator=generator)
    return x, torch.randint(CLASSES, (N,), generator=generator)


def by_numpy(name, legacy, x, alpha=0.2):
    """Axes and weights of the kernel, from the singular values of the data."""
    if name == "forde-identity":
        return None, None
    X = x.flatten(1).numpy()
    X = X if legacy and name != "forde-dct" else X - X.mean(0)
    dct = name == "forde-dct"
    U = cosines(tuple(x.shape[1:])).numpy() if dct else np.linalg.svd(X, full_matrices=True)[2].T
    spread = ((X @ U) ** 2).sum(0) / ((X**2).sum() / X.shape[1])
    if name == "forde-tuned":
        spread = spread / (alpha + (1 - alpha) * spread)
    return torch.tensor(U), torch.tensor(spread)


def prepared(method, x):
    return ready(method.repulsion, x)


def posterior(likelihood=None, prior=None):
    likelihood = likelihood or shoal.likelihoods.Categorical()
    return shoal.Posterior(likelihood, prior or shoal.priors.Gaussian(PRIOR_STD), N, temperature=T)


def textbook(modules, batch, **options):
    settings = {"annealing": GAMMA, "temperature": T, "strength": STRENGTH, "prior_std": PRIOR_STD}
    return reference.Textbook(modules, batch, N, **(settings | options))


def ensemble_and_members(build, members=MEMBERS, seed=3):
    ensemble = shoal.Ensemble.init(build, members, seed=seed).train()
    return ensemble, [ensemble.member(i).train() for i in range(members)]


def buffers(ensemble):
    return {name: tensor.clone() for name, tensor in ensemble.buffers.items()}


@cache
def literal_update(network, name, legacy):
    """The velocity by the definition, and without repulsion."""
    build, shape = NETWORKS[network]
    x, y = training_data(shape)
    with sdpa_kernel(SDPBackend.MATH):  # no other attention has a second derivative
        book = textbook(ensemble_and_members(build)[1], (x[:BATCH], y[:BATCH]))
        target = book.gradient_space(legacy, *by_numpy(name, legacy, x)) / N
        return target, book.weight_space("ensemble", False) / N


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("legacy", [False, True], ids=["corrected", "published"])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("network", NETWORKS)
def test_the_update_is_the_literal_definition(network, name, legacy, engine):
    build, shape = NETWORKS[network]
    x, y = training_data(shape)
    ensemble, modules = ensemble_and_members(build)
    batch = x[:BATCH], y[:BATCH]
    method = shoal.methods.get(name, legacy=legacy).with_strength(STRENGTH)
    velocity, info = shoal.forces(
        ensemble, posterior(), prepared(method, x), batch,
        annealing=GAMMA, mapping=ENGINES[engine],
    )  # fmt: skip
    target, plain = literal_update(network, name, legacy)
    torch.testing.assert_close(reference.flat_velocity(velocity, modules), target, **TOLERANCE)
    assert (target - plain).norm() > 1e-3 * plain.norm()
    assert info.push > 1e-3 * info.drive


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_published_repulsion_of_members_that_coincide(dtype):
    """Three of five are equal: their median is 0, and 1e-12 alone is left of the bandwidth."""
    build, shape = NETWORKS["mlp"]
    x, y = training_data(shape)
    ensemble, _ = ensemble_and_members(build, 5)
    with torch.no_grad():
        for tensor in ensemble.weights.values():
            tensor[1:3] = tensor[0]
    modules = [ensemble.member(i).train() for i in range(5)]
    repulsion = shoal.methods.get("forde-identity", legacy=True).with_strength(STRENGTH).repulsion
    book = textbook(modules, (x[:BATCH], y[:BATCH]))
    target = book.gradient_space(True) / N
    corrected = book.gradient_space(False) / N
    batch = x[:BATCH].to(dtype), y[:BATCH]
    velocity, _ = shoal.forces(ensemble.to(dtype), posterior(), repulsion, batch, annealing=GAMMA)
    flat = reference.flat_velocity(velocity, modules).double()
    close = TOLERANCE if dtype == torch.float64 else {"rtol": 1e-4, "atol": 1e-5}
    torch.testing.assert_close(flat, target, **close)
    assert (target - corrected)[:3].norm() > 1e-2 * target[:3].norm()


@pytest.mark.parametrize(
    "changes",
    [{}, {"fraction": 0.5}, {"fraction": 0.5, "own_statistics": True},
     {"fraction": 0.5, "coupled": False}],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("engine", ENGINES)
def test_running_statistics_follow_the_batch_once(engine, changes):
    build, shape = NETWORKS["cnn with batch norm"]
    x, y = training_data(shape)
    after = {}
    for name in ("ensemble", "forde"):
        ensemble, _ = ensemble_and_members(build)
        method = shoal.methods.get(name, **(changes if name == "forde" else {}))
        repulsion = None if method.repulsion is None else prepared(method, x)
        shoal.forces(
            ensemble, posterior(), repulsion, (x[:BATCH], y[:BATCH]), mapping=ENGINES[engine]
        )
        after[name] = buffers(ensemble)
    assert any((tensor != 0).any() for tensor in after["forde"].values())
    for name, tensor in after["ensemble"].items():
        torch.testing.assert_close(after["forde"][name], tensor)


@pytest.mark.parametrize("place", ["here", "as on a GPU", "rows first"])
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("target", ["logit", "log-probability"])
@pytest.mark.parametrize(
    ("network", "rule"),
    [("mlp", {})]
    + [("cnn with batch norm", rule) for rule in ({"own": True}, {"coupled": True}, {})],
)
def test_a_fraction_compares_members_on_a_part_of_the_batch(
    monkeypatch, network, rule, target, engine, place
):
    if place != "here":  # the part is shown twice
        monkeypatch.setattr(fraction, "_divisible", lambda drive, ensemble: False)
    if place == "rows first":
        monkeypatch.setattr(fraction, "_reads_the_batch", lambda drive, ensemble, x: True)
    build, shape = NETWORKS[network]
    x, y = training_data(shape)
    ensemble, _ = ensemble_and_members(build)
    modules = [ensemble.member(i).train() for i in range(MEMBERS)]
    batch = x[:BATCH], y[:BATCH]
    changes = {"fraction": 0.5, "target": target, "coupled": "coupled" in rule}
    changes["own_statistics"] = "own" in rule
    method = shoal.methods.get("forde", **changes).with_strength(STRENGTH)
    velocity, info = shoal.forces(
        ensemble, posterior(), prepared(method, x), batch,
        annealing=GAMMA, mapping=ENGINES[engine], seed=5, step=9,
    )  # fmt: skip
    rows, rest = random_rows(0.5, BATCH, 5, 9, x.device)
    assert sorted([*rows.tolist(), *rest.tolist()]) == list(range(BATCH))
    assert len(set(rows.tolist())) == 3
    axes = by_numpy("forde", False, x)
    book = textbook(modules, batch)
    wanted = book.gradient_space(False, *axes, target=target, rows=rows, **rule) / N
    torch.testing.assert_close(reference.flat_velocity(velocity, modules), wanted, **TOLERANCE)
    assert info.push > 0 and info.h2 > 0 and 1 < info.effective <= MEMBERS


@pytest.mark.parametrize("adversarial", [None, shoal.Adversarial(0.1)], ids=["", "adversarial"])
@pytest.mark.parametrize("share", [1.0, 0.5])
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("network", ["mlp", "cnn with batch norm"])
def test_drive_and_push_are_told_apart_at_the_last_layer(network, engine, share, adversarial):
    build, shape = NETWORKS[network]
    x, y = training_data(shape)
    found = {}
    for strength in (0.0, STRENGTH):
        ensemble, _ = ensemble_and_members(build)
        method = shoal.methods.get("forde", fraction=share).with_strength(strength)
        velocity, info = shoal.forces(
            ensemble, posterior(prior=shoal.priors.Flat()), prepared(method, x),
            (x[:BATCH], y[:BATCH]), mapping=ENGINES[engine], adversarial=adversarial,
        )  # fmt: skip
        found[strength] = torch.cat([velocity[name].flatten(1) for name in ensemble.heads], 1)
    drive, push = found[0.0], found[STRENGTH] - found[0.0]
    for told, vectors in ((info.drive, drive), (info.push, push)):
        wanted = vectors.square().sum(1).mean().sqrt().float()
        torch.testing.assert_close(told, wanted, rtol=1e-5, atol=0)


@pytest.mark.parametrize("engine", ENGINES)
def test_the_push_of_a_part_is_the_same_beside_worst_cases(engine):
    """Adversarial training changes the drive alone."""
    build, shape = NETWORKS["cnn with batch norm"]
    x, y = training_data(shape)
    found = {}
    for strength in (0.0, STRENGTH):
        for adversarial in (None, shoal.Adversarial(0.1)):
            ensemble, _ = ensemble_and_members(build)
            method = shoal.methods.get("forde", fraction=0.5).with_strength(strength)
            found[strength, adversarial is None], _ = shoal.forces(
                ensemble, posterior(), prepared(method, x), (x[:BATCH], y[:BATCH]),
                mapping=ENGINES[engine], adversarial=adversarial,
            )  # fmt: skip
    for name, tensor in found[STRENGTH, True].items():
        plain = tensor - found[0.0, True][name]
        torch.testing.assert_close(found[STRENGTH, False][name] - found[0.0, False][name], plain)
        assert not torch.equal(found[0.0, False][name], found[0.0, True][name])


def test_architectures_that_differ_compare_the_same_part():
    shape = NETWORKS["cnn with batch norm"][1]
    x, y = training_data(shape)
    builds = [(lambda w=w: SmallCNN((w, 4), "softplus", norm="batch").build(shape, CLASSES), 2)
              for w in (3, 5)]  # fmt: skip
    method = shoal.methods.get("forde", fraction=0.5).with_strength(STRENGTH)
    found = []
    for mapping in ENGINES.values():
        ensemble = shoal.Ensemble.init(builds, seed=3).train()
        velocity, info = shoal.forces(
            ensemble, posterior(), prepared(method, x), (x[:BATCH], y[:BATCH]), mapping=mapping
        )
        found.append(velocity)
        assert info.push > 1e-3 * info.drive
    for other in found[1:]:
        for name, tensor in found[0].items():
            torch.testing.assert_close(other[name], tensor, **TOLERANCE)


@pytest.mark.parametrize("mapping", [ENGINES["vmap"], ENGINES["chunk"]], ids=["vmap", "chunk"])
def test_dropout_masks_are_those_of_one_batch_that_the_fraction_leads(mapping):
    """Divided or not: the rest does not get the masks of the fraction again."""
    x, y = training_data((5,))
    batch, method = (x[:BATCH], y[:BATCH]), shoal.methods.get("forde", fraction=0.5)
    ensemble, _ = ensemble_and_members(
        lambda: nn.Sequential(nn.Linear(5, 9), nn.Tanh(), nn.Dropout(0.5), nn.Linear(9, CLASSES))
    )
    order = torch.cat(random_rows(0.5, BATCH, 5, 9, x.device))
    given = {"mapping": mapping, "seed": 5, "step": 9}
    ordered = batch[0][order], batch[1][order]
    wanted, _ = shoal.forces(ensemble, posterior(), None, ordered, **given)
    still = prepared(method.with_strength(0.0), x)
    found, _ = shoal.forces(ensemble, posterior(), still, batch, **given)
    for name, tensor in wanted.items():
        torch.testing.assert_close(found[name], tensor, **TOLERANCE)


def test_a_network_that_cannot_be_shown_a_part_is_answered():
    class Uneven(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.last = nn.BatchNorm1d(5), nn.Linear(5, CLASSES)

        def forward(self, x):
            return self.last(self.norm(x) if len(x) == BATCH else x)

    x, y = training_data((5,))
    ensemble, _ = ensemble_and_members(Uneven)
    repulsion = shoal.methods.get("forde-identity", fraction=0.5).repulsion
    with pytest.raises(ConfigError, match="other normalisation layers"):
        shoal.forces(ensemble, posterior(), repulsion, (x[:BATCH], y[:BATCH]))


def test_the_part_is_drawn_anew_at_each_step_and_evenly():
    device = torch.device("cpu")
    draws = torch.stack([random_rows(0.25, 16, 0, step, device)[0] for step in range(400)])
    assert draws.shape == (400, 4)
    assert (draws.sort(1).values.diff(dim=1) > 0).all()
    counts = torch.bincount(draws.flatten(), minlength=16)
    assert (counts - 100).abs().max() < 45  # about five standard deviations of a binomial
    same = random_rows(0.25, 16, 0, torch.tensor(7), device)[0]
    assert torch.equal(same, random_rows(0.25, 16, 0, 7, device)[0])


@pytest.mark.parametrize("target", ["logit", "log-probability"])
def test_what_the_gradient_is_taken_of(target):
    build, shape = NETWORKS["mlp"]
    x, y = training_data(shape)
    ensemble, modules = ensemble_and_members(build)
    method = shoal.methods.get("forde-identity", target=target).with_strength(STRENGTH)
    velocity, _ = shoal.forces(
        ensemble, posterior(), method.repulsion, (x[:BATCH], y[:BATCH]), annealing=GAMMA
    )
    book = textbook(modules, (x[:BATCH], y[:BATCH]))
    flat = reference.flat_velocity(velocity, modules)
    torch.testing.assert_close(flat, book.gradient_space(target=target) / N, **TOLERANCE)
    others = {"logit": "log-probability", "log-probability": "logit"}
    assert (flat - book.gradient_space(target=others[target]) / N).abs().max() > 1e-6


@pytest.mark.parametrize("columns", [1, 2])
def test_regression_takes_the_gradient_of_the_predicted_means(columns):
    x, _ = training_data((5,))
    y = torch.randn(BATCH, columns, generator=torch.Generator().manual_seed(4))
    ensemble, modules = ensemble_and_members(lambda: MLP((7,), "tanh").build((5,), columns))
    method = shoal.methods.get("forde").with_strength(STRENGTH)
    likelihood = shoal.likelihoods.Gaussian(0.3)
    velocity, _ = shoal.forces(
        ensemble, posterior(likelihood), prepared(method, x), (x[:BATCH], y), annealing=GAMMA
    )
    book = textbook(modules, (x[:BATCH], y), likelihood=("gaussian", 0.3))
    target = book.gradient_space(False, *by_numpy("forde", False, x)) / N
    torch.testing.assert_close(reference.flat_velocity(velocity, modules), target, **TOLERANCE)


def smooth():
    """Convolutions and batch statistics without a kink, for finite differences."""
    layers = [nn.Conv2d(2, 3, 3, padding=1), nn.BatchNorm2d(3), nn.Softplus()]
    layers += [nn.Conv2d(3, 3, 3), nn.BatchNorm2d(3), nn.Tanh(), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(12, CLASSES))


def directions(module, batch):
    return reference._directions(module, *batch, None, None, "logit").detach()


def bandwidths(z):
    sites = [torch.stack([own[b].detach() for own in z]) for b in range(len(z[0]))]
    return [reference.median_h2(points, False, "log") for points in sites]


def test_the_push_is_the_finite_difference_of_its_energy():
    x, y = training_data((2, 4, 4))
    ensemble, modules = ensemble_and_members(smooth)
    batch = x[:BATCH], y[:BATCH]
    repulsion = shoal.methods.get("forde-identity").repulsion
    pushed, _ = shoal.forces(ensemble, posterior(), repulsion, batch)
    plain, _ = shoal.forces(ensemble, posterior(), None, batch)
    still = [directions(module, batch) for module in modules]
    h2 = bandwidths(still)

    def energy(z):
        """log sum_j k_ij, where the other members and the bandwidth are held fixed."""
        sites = [reference.rbf(z[b], other[b], h2[b]) for other in still for b in range(BATCH)]
        return torch.log(sum(sites) / BATCH)

    generator = torch.Generator().manual_seed(8)
    for member, module in enumerate(modules):
        names = dict(module.named_parameters())
        along = {n: torch.randn(p.shape, generator=generator) for n, p in names.items()}
        values = []
        for step in (1e-5, -1e-5):
            with torch.no_grad():
                for n, p in names.items():
                    p += step * along[n]
            values.append(energy(directions(module, batch)))
            with torch.no_grad():
                for n, p in names.items():
                    p -= step * along[n]
        slope = (values[0] - values[1]) / 2e-5
        ours = sum(((plain[n] - pushed[n])[member] * along[n]).sum() for n in names)
        torch.testing.assert_close(ours, T / BATCH * slope, rtol=1e-6, atol=1e-9)


def test_gradients_of_another_scale_push_the_same_way():
    build, shape = NETWORKS["mlp"]
    x, y = training_data(shape)
    repulsion = prepared(shoal.methods.get("forde"), x)
    gradients = torch.randn(MEMBERS, BATCH, 5, generator=torch.Generator().manual_seed(0))
    scale = torch.rand(MEMBERS, BATCH, 1, generator=torch.Generator().manual_seed(1)) + 0.1
    everyone = torch.ones(MEMBERS, dtype=torch.bool)
    first = interact(repulsion, repulsion.space({"gradients": gradients}), everyone)
    other = interact(repulsion, repulsion.space({"gradients": scale * gradients}), everyone)
    torch.testing.assert_close(first.K, other.K, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(first.B, other.B, rtol=1e-12, atol=1e-12)


def test_identity_is_the_principal_basis_with_unit_weights():
    build, shape = NETWORKS["cnn with batch norm"]
    x, y = training_data(shape)
    ensemble, _ = ensemble_and_members(build)
    batch = x[:BATCH], y[:BATCH]
    unit = {"factor": "identity"}
    changes = {
        "forde": unit,
        "forde-identity": {},
        "forde-tuned": {"alpha": 0.0},
        "forde-dct": unit,
    }
    found = {}
    for name, settings in changes.items():
        method = shoal.methods.get(name, **settings)
        found[name] = shoal.forces(ensemble, posterior(), prepared(method, x), batch)[0]
    for name in found:
        for key, tensor in found["forde-identity"].items():
            torch.testing.assert_close(found[name][key], tensor, rtol=1e-9, atol=1e-12)


def test_tuned_goes_from_identity_to_principal_components():
    build, shape = NETWORKS["mlp"]
    x, y = training_data(shape)
    ensemble, _ = ensemble_and_members(build)
    one, other = (
        shoal.forces(ensemble, posterior(), prepared(method, x), (x[:BATCH], y[:BATCH]))[0]
        for method in (shoal.methods.get("forde-tuned", alpha=1.0), shoal.methods.get("forde"))
    )
    for key, tensor in other.items():
        torch.testing.assert_close(one[key], tensor, rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("engine", ENGINES)
def test_dropout_is_the_same_in_every_way_of_running(engine):
    build = lambda: MLP((9, 8), "tanh", dropout=0.3).build((5,), CLASSES)  # noqa: E731
    x, y = training_data((5,))
    ensemble, _ = ensemble_and_members(build)
    repulsion = prepared(shoal.methods.get("forde"), x)
    batch = x[:BATCH], y[:BATCH]
    first, _ = shoal.forces(ensemble, posterior(), repulsion, batch, seed=2, step=4)
    other, _ = shoal.forces(
        ensemble, posterior(), repulsion, batch, seed=2, step=4, mapping=ENGINES[engine]
    )
    for key, tensor in first.items():
        torch.testing.assert_close(other[key], tensor)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("shared", [False, True])
def test_adversarial_neighbours_are_trained_on_but_not_compared_at(shared, engine):
    build, shape = NETWORKS["mlp"]
    x, y = training_data(shape)
    ensemble, modules = ensemble_and_members(build)
    batch = x[:BATCH], y[:BATCH]
    method = shoal.methods.get("forde").with_strength(STRENGTH)
    velocity, _ = shoal.forces(
        ensemble, posterior(), prepared(method, x), batch, annealing=GAMMA,
        adversarial=shoal.Adversarial(0.05, shared), mapping=ENGINES[engine],
    )  # fmt: skip
    book = textbook(modules, batch, adversarial=(0.05, shared))
    target = book.gradient_space(False, *by_numpy("forde", False, x)) / N
    torch.testing.assert_close(reference.flat_velocity(velocity, modules), target, **TOLERANCE)


def mixed_ensemble():
    small, large = (lambda: MLP((4,), "tanh").build((5,), CLASSES)), NETWORKS["mlp"][0]
    return shoal.Ensemble.init([(small, 2), (large, 2)], seed=1).train()


@pytest.mark.parametrize("engine", ENGINES)
def test_members_of_different_architectures_are_compared(engine):
    x, y = training_data((5,))
    ensemble = mixed_ensemble()
    modules = [ensemble.member(i).train() for i in range(4)]
    repulsion = prepared(shoal.methods.get("forde"), x)
    velocity, info = shoal.forces(
        ensemble, posterior(), repulsion, (x[:BATCH], y[:BATCH]), mapping=ENGINES[engine]
    )
    book = textbook(modules, (x[:BATCH], y[:BATCH]), annealing=1.0, strength=1.0)
    rows = book.gradient_rows(False, *by_numpy("forde", False, x))
    for i in range(4):
        group, place = divmod(i, 2)
        own = [velocity[f"group{group}.{n}"][place] for n, _ in modules[i].named_parameters()]
        flat = torch.cat([tensor.flatten() for tensor in own])
        torch.testing.assert_close(flat, rows[i] / N, **TOLERANCE)
    assert info.push > 0


def test_a_functional_prior_goes_with_it():
    build, shape = NETWORKS["mlp"]
    x, y = training_data(shape)
    ensemble, _ = ensemble_and_members(build)
    prior = shoal.priors.FunctionSpace(shoal.priors.Gaussian(1.0), draws=8)
    batch = x[:BATCH], y[:BATCH]
    repulsion = prepared(shoal.methods.get("forde"), x)

    def velocity(repulsion, prior, mapping=MemberRunner()):  # noqa: B008
        target = posterior(prior=prior)
        return shoal.forces(ensemble, target, repulsion, batch, mapping=mapping)[0]

    flat = shoal.priors.Flat()
    for mapping in ENGINES.values():
        both = velocity(repulsion, prior, mapping)
        for key, tensor in both.items():
            parts = velocity(repulsion, flat)[key] + velocity(None, prior)[key]
            torch.testing.assert_close(tensor, parts - velocity(None, flat)[key])


def test_a_member_that_died_does_not_touch_the_others():
    build, shape = NETWORKS["mlp"]
    x, y = training_data(shape)
    ensemble, _ = ensemble_and_members(build)
    with torch.no_grad():
        ensemble.weights["1.weight"][1] = torch.nan
    repulsion = prepared(shoal.methods.get("forde"), x)
    velocity, info = shoal.forces(ensemble, posterior(), repulsion, (x[:BATCH], y[:BATCH]))
    assert info.alive.tolist() == [True, False, True, True]
    assert all(tensor[[0, 2, 3]].isfinite().all() for tensor in velocity.values())
    assert info.measures.isfinite().all()


@pytest.mark.parametrize("members", [1, 2])
def test_small_ensembles(members):
    build, shape = NETWORKS["relu"]
    x, y = training_data(shape)
    for legacy in (False, True):
        ensemble, _ = ensemble_and_members(build, members)
        repulsion = prepared(shoal.methods.get("forde", legacy=legacy), x)
        velocity, info = shoal.forces(ensemble, posterior(), repulsion, (x[:BATCH], y[:BATCH]))
        assert all(tensor.isfinite().all() for tensor in velocity.values())
        assert (info.push > 0) == (members > 1)


def test_members_whose_gradients_vanish_stay_finite():
    def build():
        network = MLP((7,), "relu").build((5,), CLASSES)
        nn.init.zeros_(network[-1].weight)
        return network

    x, y = training_data((5,))
    ensemble, _ = ensemble_and_members(build)
    velocity, info = shoal.forces(
        ensemble, posterior(), prepared(shoal.methods.get("forde"), x), (x[:BATCH], y[:BATCH])
    )
    assert info.push == 0
    assert all(tensor.isfinite().all() for tensor in velocity.values())


def test_the_stein_flow_mixes_what_the_outputs_ask_for():
    build, shape = NETWORKS["mlp"]
    x, y = training_data(shape)
    ensemble, _ = ensemble_and_members(build)
    space = shoal.methods.get("forde-identity").repulsion.space
    repulsion = shoal.Repulsion(space, flow=shoal.flows.Stein(), bandwidth=shoal.kernels.Fixed(1e9))
    velocity, _ = shoal.forces(
        ensemble, posterior(prior=shoal.priors.Flat()), repulsion, (x[:BATCH], y[:BATCH])
    )
    # With an infinitely wide kernel every member follows the mean of all drives at the outputs.
    outputs = ensemble(x[:BATCH])
    logits = outputs.detach().requires_grad_()
    value = shoal.likelihoods.Categorical().log_prob(logits, y[:BATCH]).mean(-1).sum()
    drive = torch.autograd.grad(value, logits)[0].mean(0).expand_as(outputs)
    weights = ensemble.weights
    target = torch.autograd.grad(outputs, list(weights.values()), drive)
    for tensor, wanted in zip(velocity.values(), target, strict=True):
        torch.testing.assert_close(tensor, wanted, rtol=1e-6, atol=1e-9)
    part = dataclasses.replace(
        repulsion, space=shoal.methods.get("forde-identity", fraction=0.5).repulsion.space
    )
    with pytest.raises(ConfigError, match="Stein flow mixes drives of whole batches"):
        shoal.forces(ensemble, posterior(), part, (x[:BATCH], y[:BATCH]))


class Reader(nn.Module):
    """Tokens, positions, attention and a mean."""

    def __init__(self):
        super().__init__()
        self.positions = nn.Embedding(6, 8)
        self.tokens = nn.Embedding(11, 8)
        self.layer = nn.TransformerEncoderLayer(8, 2, 12, dropout=0.0, batch_first=True)
        self.head = nn.Linear(8, CLASSES)

    def embed(self, x):
        return self.tokens(x) + self.positions(torch.arange(x.shape[1]))

    def forward(self, x):
        return self.head(self.layer(self.embed(x)).mean(1))


class AfterEmbedding(nn.Module):
    """The same network from the embedding on."""

    def __init__(self, reader):
        super().__init__()
        self.reader = reader

    def forward(self, e):
        h = e + self.reader.positions(torch.arange(e.shape[1]))
        return self.reader.head(self.reader.layer(h).mean(1))


@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")
@pytest.mark.parametrize("share", [1.0, 0.5])
@pytest.mark.parametrize("place", ["here", "as on a GPU"])
@pytest.mark.parametrize("engine", ENGINES)
def test_tokens_are_compared_at_their_embedding(monkeypatch, engine, place, share):
    if place == "as on a GPU":
        monkeypatch.setattr(fraction, "_divisible", lambda drive, ensemble: False)
    generator = torch.Generator().manual_seed(2)
    x = torch.randint(11, (BATCH, 6), generator=generator)
    y = torch.randint(CLASSES, (BATCH,), generator=generator)
    ensemble, modules = ensemble_and_members(Reader)
    repulsion = shoal.methods.get("forde-identity", fraction=share).repulsion
    rows = torch.arange(BATCH) if share == 1 else random_rows(share, BATCH, 0, 0, x.device)[0]
    pushed, _ = shoal.forces(ensemble, posterior(), repulsion, (x, y), mapping=ENGINES[engine])
    z = []
    with sdpa_kernel(SDPBackend.MATH):
        plain, _ = shoal.forces(ensemble, posterior(), None, (x, y))
        for module in modules:
            e = module.tokens(x[rows])
            e = e if e.requires_grad else e.requires_grad_()
            outputs = AfterEmbedding(module)(e)
            scores = outputs[range(len(rows)), y[rows]]
            g = torch.autograd.grad(scores.sum(), e, create_graph=True)[0].flatten(1)
            z.append(g / g.norm(dim=1, keepdim=True))
    h2 = bandwidths(z)
    for i, module in enumerate(modules):
        row = sum(
            sum(reference.rbf(z[i][b], z[j][b].detach(), h2[b]) for b in range(len(rows)))
            / len(rows)
            for j in range(MEMBERS)
        )
        push = reference._flat_grad(torch.log(row), module, retain_graph=True)
        names = [name for name, _ in module.named_parameters()]
        ours = torch.cat([(plain[n] - pushed[n])[i].flatten() for n in names])
        torch.testing.assert_close(ours, T / BATCH * push, rtol=1e-8, atol=1e-11)


def test_inputs_that_have_no_gradient_are_answered():
    x, y = torch.randint(5, (BATCH, 5)), torch.randint(CLASSES, (BATCH,))

    class Counts(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(5, CLASSES)

        def forward(self, x):
            return self.linear(x.double())

    ensemble, _ = ensemble_and_members(Counts)
    repulsion = shoal.methods.get("forde-identity").repulsion
    with pytest.raises(DataError, match="no nn.Embedding as its first layer"):
        shoal.forces(ensemble, posterior(), repulsion, (x, y))
    with pytest.raises(DataError, match="'pca' needs real inputs.*forde-identity"):
        prepared(shoal.methods.get("forde"), x)

    deaf = shoal.Ensemble.init(Deaf, 3)
    with pytest.raises(DataError, match="have no gradient with respect to its inputs"):
        shoal.forces(deaf, posterior(), repulsion, (torch.randn(BATCH, 5), y))


class Deaf(nn.Module):
    """Answers without listening."""

    def __init__(self):
        super().__init__()
        self.bias = nn.Parameter(torch.randn(CLASSES))

    def forward(self, x):
        return self.bias.expand(len(x), CLASSES)

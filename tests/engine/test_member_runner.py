"""Together, in chunks or one after another: the same forces, the same statistics afterwards."""

import pytest
import torch
from ready import ready
from torch import nn

import shoal
from shoal.core.errors import ConfigError, ShoalWarning
from shoal.engine.members.member_runner import MemberRunner, parse_runner
from shoal.training.options.adversarial import Adversarial

pytestmark = [
    pytest.mark.usefixtures("double"),
    pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning"),
]

MEMBERS, BATCH, CLASSES = 5, 6, 3
MAPPINGS = [
    MemberRunner(chunk=1),
    MemberRunner(chunk=2),
    MemberRunner(chunk=3),
    MemberRunner("loop"),
]
METHODS = list(shoal.methods.METHODS)


class Residual(nn.Module):
    """Convolutions, batch statistics, dropout of channels and elements, one layer used twice."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(2, 4, 3, padding=1)
        self.norm, self.again = nn.BatchNorm2d(4), nn.BatchNorm2d(4, momentum=0.3)
        self.conv = nn.Conv2d(4, 4, 3, padding=1, bias=False)
        self.channels, self.drop = nn.Dropout2d(0.3), nn.Dropout(0.4)
        self.head = nn.Linear(4 * 4 * 4, CLASSES)

    def forward(self, x):
        h = torch.tanh(self.norm(self.stem(x)))
        h = h + self.drop(self.channels(self.again(self.conv(h))))
        return self.head(self.drop(h).flatten(1))


class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.norm = nn.Embedding(11, 6), nn.LayerNorm(6)
        self.head = nn.Linear(6, CLASSES)

    def forward(self, x):
        return self.head(self.norm(self.table(x)).mean(1))


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.attend = nn.MultiheadAttention(4, 2, batch_first=True)
        self.head = nn.Linear(4, CLASSES)

    def forward(self, x):
        h = x.unflatten(1, (2, 4))
        return self.head(self.attend(h, h, h, need_weights=False)[0].mean(1))


def mlp():
    return nn.Sequential(nn.Linear(8, 7), nn.Tanh(), nn.Linear(7, CLASSES))


def dropped():
    return nn.Sequential(
        nn.Linear(8, 9), nn.Dropout(0.5), nn.Tanh(), nn.Linear(9, 9), nn.Dropout(0.2),
        nn.Linear(9, CLASSES),
    )  # fmt: skip


def dropped_by_one_layer():
    drop = nn.Dropout(0.5)
    return nn.Sequential(nn.Linear(8, 9), drop, nn.Linear(9, 9), drop, nn.Linear(9, CLASSES))


def normalised():
    return nn.Sequential(
        nn.Linear(8, 6), nn.BatchNorm1d(6), nn.GELU(), nn.Linear(6, 6), nn.LayerNorm(6),
        nn.Unflatten(1, (6, 1)), nn.GroupNorm(2, 6), nn.Flatten(), nn.Linear(6, CLASSES),
    )  # fmt: skip


BUILDS = {
    "mlp": mlp,
    "dropout": dropped,
    "one dropout layer in two places": dropped_by_one_layer,
    "convolutions": Residual,
    "normalised": normalised,
    "embedding": Words,
    "attention": Attention,
    "mixed": [(mlp, 2), (dropped, 1), (normalised, 2)],
}


def batch(name, seed=0):
    generator = torch.Generator().manual_seed(seed)
    y = torch.randint(CLASSES, (BATCH,), generator=generator)
    if name == "embedding":
        return torch.randint(11, (BATCH, 4), generator=generator), y
    shape = (BATCH, 2, 4, 4) if name == "convolutions" else (BATCH, 8)
    return torch.randn(shape, generator=generator), y


def two_steps(name, method, mapping, adversarial=None, prior=None):
    """Forces at two steps in training mode, and everything the ensemble carries afterwards."""
    build = BUILDS[name]
    ensemble = shoal.Ensemble.init(build, None if isinstance(build, list) else MEMBERS, seed=2)
    ensemble.train()
    prior = prior or shoal.priors.Gaussian(0.9)
    posterior = shoal.Posterior(shoal.likelihoods.Categorical(), prior, 30)
    repulsion = ready(shoal.methods.get(method).repulsion, batch(name)[0])
    found = []
    for step in range(2):
        velocity, info = shoal.forces(
            ensemble, posterior, repulsion, batch(name, step),
            mapping=mapping, adversarial=adversarial, seed=5, step=step,
        )  # fmt: skip
        assert info.alive.all()
        found.append({f"v.{key}": tensor for key, tensor in velocity.items()})
        found.append({"loss": info.loss})
        with torch.no_grad():
            for key, tensor in ensemble.weights.items():
                tensor += 0.1 * velocity[key]
    carried = ensemble.weights | ensemble.buffers
    return [*found, {key: tensor.detach() for key, tensor in carried.items()}]


def same(found, other):
    for one, two in zip(found, other, strict=True):
        assert one.keys() == two.keys()
        for key in one:
            torch.testing.assert_close(one[key], two[key], rtol=1e-12, atol=1e-12, msg=key)


@pytest.mark.parametrize("name", BUILDS)
def test_every_mapping_of_every_architecture(name):
    for method in ["f-kde"] if name == "mixed" else ["f-kde", "svgd"]:
        together = two_steps(name, method, MemberRunner())
        for mapping in MAPPINGS:
            same(two_steps(name, method, mapping), together)


@pytest.mark.parametrize("method", METHODS)
def test_every_method(method):
    together = two_steps("convolutions", method, MemberRunner())
    for mapping in (MemberRunner(chunk=2), MemberRunner("loop")):
        same(two_steps("convolutions", method, mapping), together)


@pytest.mark.parametrize("shared", [False, True], ids=["own", "shared"])
@pytest.mark.parametrize("method", ["kde", "svgd", "f-svgd"])
@pytest.mark.parametrize("name", ["mlp", "convolutions", "mixed"])
def test_adversarial_neighbours(name, method, shared):
    if name == "mixed":
        method = "f-kde"
    adversarial = Adversarial(0.05, shared)
    together = two_steps(name, method, MemberRunner(), adversarial)
    for mapping in (MemberRunner(chunk=2), MemberRunner("loop")):
        same(two_steps(name, method, mapping, adversarial), together)


@pytest.mark.parametrize("name", ["convolutions", "mixed"])
def test_functional_prior(name):
    prior = shoal.priors.FunctionSpace()
    together = two_steps(name, "f-kde", MemberRunner(), prior=prior)
    for mapping in (MemberRunner(chunk=2), MemberRunner("loop")):
        same(two_steps(name, "f-kde", mapping, prior=prior), together)


def test_a_functional_prior_leaves_the_statistics_alone():
    with_prior = two_steps(
        "convolutions", "ensemble", MemberRunner(), prior=shoal.priors.FunctionSpace()
    )
    without = two_steps("convolutions", "ensemble", MemberRunner())
    counted = "norm.num_batches_tracked"
    assert with_prior[-1][counted].tolist() == without[-1][counted].tolist() == [2] * MEMBERS


def test_statistics_move_in_training():
    state = two_steps("convolutions", "kde", MemberRunner())[-1]
    assert (state["norm.running_mean"] != 0).all()
    assert not torch.equal(state["norm.running_mean"][0], state["norm.running_mean"][1])
    assert (state["again.num_batches_tracked"] == 2).all()


def test_a_stacked_step_is_that_of_lone_networks():
    """Batch statistics, forces: member by member with plain modules and plain autograd."""
    build = BUILDS["normalised"]
    ensemble = shoal.Ensemble.init(build, 3, seed=2)
    modules = [ensemble.member(i).train() for i in range(3)]
    x, y = batch("normalised")
    posterior = shoal.Posterior(shoal.likelihoods.Categorical(), shoal.priors.Flat(), 30)
    velocity, _ = shoal.forces(ensemble.train(), posterior, None, (x, y))
    for i, module in enumerate(modules):
        loss = nn.functional.cross_entropy(module(x), y)
        gradients = torch.autograd.grad(loss, list(module.parameters()))
        for (key, _), gradient in zip(module.named_parameters(), gradients, strict=True):
            torch.testing.assert_close(velocity[key][i], -gradient, rtol=1e-11, atol=1e-12)
        for key, buffer in module.named_buffers():
            torch.testing.assert_close(ensemble.buffers[key][i], buffer, rtol=1e-12, atol=1e-12)


def test_a_network_that_fails_under_vmap_has_the_same_forces():
    class Choosing(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.drop = nn.BatchNorm1d(8), nn.Dropout(0.3)
            self.one, self.two = nn.Linear(8, CLASSES), nn.Linear(8, CLASSES)

        def forward(self, x):
            h = self.drop(self.norm(x))
            return self.one(h) if self.one(h).sum() > 0 else self.two(h)

    BUILDS["choosing"] = Choosing
    try:
        with pytest.warns(ShoalWarning, match="one after another") as caught:
            together = two_steps("choosing", "f-kde", MemberRunner())
        assert len(caught) == 1
        same(two_steps("choosing", "f-kde", MemberRunner("loop")), together)
        assert together[-1]["norm.num_batches_tracked"].tolist() == [2] * MEMBERS
    finally:
        del BUILDS["choosing"]


@pytest.mark.parametrize(
    ("name", "mapping"),
    [
        ("auto", MemberRunner()),
        ("vmap", MemberRunner()),
        ("loop", MemberRunner("loop")),
        ("chunk:1", MemberRunner(chunk=1)),
        ("chunk:12", MemberRunner(chunk=12)),
    ],
)
def test_names_of_mappings(name, mapping):
    assert parse_runner(name) == mapping


@pytest.mark.parametrize(
    "name", ["", "fast", "chunk", "chunk:", "chunk:0", "chunk:-2", "chunk:2.5"]
)
def test_other_names_are_refused(name):
    with pytest.raises(ConfigError, match="engine must be 'auto', 'vmap', 'loop' or 'chunk:SIZE'"):
        parse_runner(name)

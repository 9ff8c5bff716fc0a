"""Networks whose members share trained tensors: formulas, declarations, and a literal loop."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import shoal
from shoal.models import (
    MLP,
    BatchEnsemble,
    Blueprint,
    MultiHead,
    RankOneConv2d,
    RankOneLinear,
    SmallCNN,
    TabM,
)

pytestmark = pytest.mark.usefixtures("double")

IMAGES = (1, 4, 4)
CASES = [
    (MultiHead(MLP(hidden=(6, 5))), (4,)),
    (MultiHead(SmallCNN(channels=(3, 4))), IMAGES),
    (BatchEnsemble(MLP(hidden=(6, 5), norm="layer")), (4,)),
    (BatchEnsemble(SmallCNN(channels=(3, 4)), factors="normal"), IMAGES),
    (TabM(hidden=(6, 5), dropout=0.0), (4,)),
    (TabM(hidden=(6, 5), dropout=0.0, mini=True), (4,)),
]
PRIVATE = [
    {"head.weight", "head.bias"},
    {"head.weight", "head.bias"},
    {f"{i}.{n}" for i in (1, 4, 7) for n in "rs"}
    | {"1.bias", "4.bias", "7.bias", "2.weight", "2.bias", "5.weight", "5.bias"},
    {f"{i}.{n}" for i in (0, 3, 6) for n in ("r", "s", "bias")},
    {f"{i}.{n}" for i in (1, 3) for n in ("r", "s", "bias")} | {"5.weight", "5.bias"},
    {"1.r", "6.weight", "6.bias"},
]


def test_rank_one_layers_are_layers_with_a_weight_times_a_rank_one_matrix():
    x, images = torch.randn(5, 4), torch.randn(5, 4, 6, 6)
    layer = RankOneLinear(4, 3, r="normal", s="normal")
    weight = layer.weight * torch.outer(layer.s, layer.r)
    torch.testing.assert_close(layer(x), F.linear(x, weight, layer.bias))
    filters = RankOneConv2d(4, 3, 3, r="normal", s="signs", stride=2, padding=1)
    weight = filters.weight * torch.outer(filters.s, filters.r)[..., None, None]
    wanted = F.conv2d(images, weight, filters.bias, stride=2, padding=1)
    torch.testing.assert_close(filters(images), wanted)
    plain = RankOneLinear(4, 3, r="ones", s="ones", bias=False)
    torch.testing.assert_close(plain(x), x @ plain.weight.T)


def test_factors_are_drawn_as_published():
    signs = BatchEnsemble(MLP(hidden=(1000,))).build((2,), 1)[1].s
    assert set(signs.tolist()) == {-1.0, 1.0} and abs(signs.mean()) < 0.15
    normal = BatchEnsemble(MLP(hidden=(4000,)), factors="normal").build((2,), 1)[1].s
    assert normal.mean().item() == pytest.approx(1, abs=0.05)
    assert normal.std().item() == pytest.approx(0.5, abs=0.05)
    table = TabM(hidden=(8, 8, 8)).build((50,), 1)
    first, *rest = [layer for layer in table if isinstance(layer, RankOneLinear)]
    assert set(first.r.tolist()) == {-1.0, 1.0} and bool((first.s == 1).all())
    assert len(rest) == 2 and all(bool((f == 1).all()) for m in rest for f in (m.r, m.s))


def test_tabm_is_its_equations():
    x = torch.randn(5, 4)
    full = TabM(hidden=(6,), activation="tanh", dropout=0.0).build((4,), 2)
    _, layer, _, last = full
    hidden = (layer.s * ((layer.r * x) @ layer.weight.T) + layer.bias).tanh()
    torch.testing.assert_close(full(x), last(hidden))
    mini = TabM(hidden=(6,), activation="tanh", dropout=0.0, mini=True).build((4,), 2)
    torch.testing.assert_close(mini(x), mini[4](mini[2](mini[1].r * x).tanh()))


@pytest.mark.parametrize("case, private", list(zip(CASES, PRIVATE, strict=True)))
def test_what_is_private_and_what_all_members_train(case, private):
    config, shape = case
    ensemble = shoal.Ensemble.init(Blueprint(config, shape, 3), members=4)
    assert set(ensemble.weights) == private
    names = {name for name, _ in ensemble.member(0).named_parameters()}
    assert set(ensemble.trained_shared) == names - private
    assert set(ensemble.shared) == names - private and not ensemble.buffers


@pytest.mark.parametrize("config, shape", CASES)
def test_steps_are_those_of_a_loop_over_networks_with_one_parameter(config, shape):
    """A shared tensor moves by the mean of the members' gradients, a private one by its own."""
    members, rate = 3, 0.1
    x, y = torch.randn(7, *shape), torch.arange(7) % 3
    ensemble = shoal.Ensemble.init(Blueprint(config, shape, 3), members=members, seed=5)
    networks = [ensemble.member(i).train() for i in range(members)]
    common = {n: nn.Parameter(t.detach().clone()) for n, t in ensemble.trained_shared.items()}
    for network in networks:
        for name, parameter in common.items():
            owner, _, last = name.rpartition(".")
            setattr(network.get_submodule(owner), last, parameter)
    own = [p for n in networks for name, p in n.named_parameters() if name not in common]
    optimizer = torch.optim.SGD([*own, *common.values()], rate)
    for _ in range(3):
        optimizer.zero_grad()
        sum(F.cross_entropy(network(x), y) for network in networks).backward()
        for parameter in common.values():
            parameter.grad /= members
        optimizer.step()
    options = {"method": "ensemble", "prior": "flat", "optimizer": "sgd", "lr": rate, "steps": 3}
    shoal.fit(ensemble, [(x, y)], progress=False, **options)
    for name, parameter in common.items():
        torch.testing.assert_close(ensemble.shared[name], parameter, msg=name)
    for index, network in enumerate(networks):
        for name, parameter in network.named_parameters():
            if name not in common:
                torch.testing.assert_close(ensemble.weights[name][index], parameter, msg=name)


@pytest.mark.parametrize("config", [TabM((32, 32)), TabM((32, 32), mini=True)])
def test_tabm_learns_a_small_table(config, tmp_path):
    """Beside the mean of the targets, and restored from its folder."""
    torch.manual_seed(0)
    x = torch.rand(300, 4) * 2 - 1
    y = (2 * x[:, 0]).sin() + x[:, 1] * x[:, 2] + 0.05 * torch.randn(300)
    build = Blueprint(config, (4,), 1)
    ensemble = shoal.Ensemble.init(build, members=6)
    likelihood = {"name": "gaussian", "noise_std": 0.1}
    run = shoal.fit(
        ensemble, (x[:200], y[:200]), method="f-kde", likelihood=likelihood, epochs=60, lr=3e-3,
        batch_size=50, out=tmp_path, progress=False,
    )  # fmt: skip
    found = shoal.predict(run, x[200:]).mean.squeeze()
    assert (found - y[200:]).square().mean() < 0.1 * y.var()
    again = shoal.load(tmp_path)
    assert torch.equal(shoal.predict(again, x[200:]).mean.squeeze(), found)


def test_statistics_of_a_shared_trunk_are_shared():
    config = MultiHead(SmallCNN(channels=(3, 4), norm="batch"))
    ensemble = shoal.Ensemble.init(Blueprint(config, IMAGES, 3), members=3)
    assert not ensemble.buffers
    before = ensemble.shared["trunk.1.running_mean"].clone()
    x = torch.randn(12, *IMAGES)
    shoal.fit(ensemble, (x, torch.arange(12) % 3), steps=3, batch_size=6, progress=False)
    assert not torch.equal(ensemble.shared["trunk.1.running_mean"], before)
    torch.testing.assert_close(ensemble(x)[1], ensemble.member(1)(x))

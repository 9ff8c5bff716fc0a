"""An ensemble where people expect a module, and where they expect a sequence of members."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import shoal
from shoal.core.errors import ConfigError
from shoal.inference.ensemble import Ensemble

MEMBERS = 4


def network():
    return nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 2))


@pytest.fixture
def ensemble():
    return Ensemble.init(network, MEMBERS, seed=0)


@pytest.fixture
def x():
    return torch.randn(7, 3, generator=torch.Generator().manual_seed(0))


def test_parameters_are_those_of_a_network_for_all_members(ensemble):
    wanted = {name: (MEMBERS, *p.shape) for name, p in network().named_parameters()}
    assert {name: tuple(p.shape) for name, p in ensemble.named_parameters()} == wanted
    assert [id(p) for p in ensemble.parameters()] == [id(p) for _, p in ensemble.named_parameters()]
    assert {name for name, _ in ensemble.named_buffers()} == {
        n for n, _ in network().named_buffers()
    }


def test_a_plain_loop_with_an_optimiser_of_torch_trains_every_member(ensemble, x):
    y = (x[:, 0] > 0).long()
    optimizer = torch.optim.Adam(ensemble.parameters(), lr=0.05)
    ensemble.train()

    def losses():
        outputs = ensemble(x).flatten(0, 1)
        return (
            F.cross_entropy(outputs, y.repeat(MEMBERS), reduction="none").view(MEMBERS, -1).mean(1)
        )

    before = losses().detach()
    for _ in range(30):
        ensemble.zero_grad()
        losses().sum().backward()
        optimizer.step()
    assert (losses() < before).all()
    ensemble.zero_grad()
    assert all(p.grad is None for p in ensemble.parameters())


def test_a_state_dict_goes_into_another_ensemble(ensemble, x):
    ensemble.alive[2] = False
    other = Ensemble.init(network, MEMBERS, seed=1)
    assert not torch.equal(other(x), ensemble(x))
    keys = other.load_state_dict(ensemble.state_dict())
    assert keys.missing_keys == keys.unexpected_keys == []
    assert torch.equal(other(x), ensemble(x))
    assert other.alive.tolist() == [True, True, False, True]
    assert ensemble.state_dict()["0.weight"].shape == (MEMBERS, 5, 3)
    assert not any(tensor.requires_grad for tensor in ensemble.state_dict().values())


def test_a_state_dict_that_does_not_fit_is_refused_and_leaves_no_trace(ensemble, x):
    before = ensemble(x)
    state = Ensemble.init(network, MEMBERS, seed=1).state_dict()
    whole = dict(state)
    del state["3.bias"]
    with pytest.raises(ConfigError, match=r"3\.bias"):
        ensemble.load_state_dict(state)
    with pytest.raises(ConfigError, match="shape"):
        ensemble.load_state_dict(whole | {"3.bias": torch.zeros(MEMBERS, 9)})
    assert torch.equal(ensemble(x), before)
    assert ensemble.load_state_dict(state, strict=False).missing_keys == ["3.bias"]


def test_members_are_counted_indexed_and_iterated(ensemble, x):
    outputs = ensemble(x)
    assert len(ensemble) == MEMBERS
    for index, module in enumerate(ensemble):
        assert isinstance(module, nn.Module)
        torch.testing.assert_close(module(x), outputs[index])
    torch.testing.assert_close(ensemble[-1](x), outputs[-1])
    torch.testing.assert_close(ensemble[1:3](x), outputs[1:3])
    for wrong in (MEMBERS, -MEMBERS - 1, slice(3, 1), slice(0, 4, 2)):
        with pytest.raises(IndexError):
            ensemble[wrong]


def test_modes_and_places(ensemble):
    assert ensemble.train() is ensemble and ensemble.training
    assert ensemble.eval() is ensemble and not ensemble.training
    assert ensemble.to(torch.float64).dtype == torch.float64
    assert ensemble.to("cpu", torch.float32).cpu().dtype == torch.float32
    with pytest.raises(ConfigError, match="floating point"):
        ensemble.to(torch.int64)


def _objects():
    x, y = torch.randn(40, 3), torch.arange(40) % 2
    ensemble = Ensemble.init(network, 2, seed=0)
    run = shoal.fit(ensemble, (x, y), epochs=1, progress=False)
    data = shoal.Dataset("<points>", shoal.Split(x, y), ood={"far": shoal.Split(x)})
    objects = [run, ensemble, shoal.predict(run, x), shoal.methods.forde, data, data.train]
    return {type(value).__name__: value for value in objects}


@pytest.mark.parametrize("name", ["Run", "Ensemble", "Predictive", "Method", "Dataset", "Split"])
def test_the_main_objects_are_shown_in_one_short_line(name):
    value = _objects()[name]
    assert repr(value).startswith(f"{name}(")
    assert len(repr(value)) < 160 and "\n" not in repr(value)
    if name != "Split":
        assert value._repr_html_().startswith("<table>")
        assert "<points>" not in value._repr_html_()


def test_methods_are_attributes_and_nothing_else_is_listed():
    assert "f_kde" in dir(shoal.methods) and "replace" not in dir(shoal.methods)
    for name in dir(shoal.methods):
        assert getattr(shoal.methods, name) is shoal.methods.METHODS[name.replace("_", "-")]
    with pytest.raises(AttributeError, match="f-kde"):
        _ = shoal.methods.f_kd


def test_the_package_says_its_version():
    assert shoal.__version__[0].isdigit() or shoal.__version__ == "unknown"

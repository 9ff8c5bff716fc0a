"""Trained networks become members: copies that compute what the networks compute."""

import copy
import warnings

import pytest
import torch
from small_runs import assert_one_sentence, both, normed, plain
from torch import nn

from shoal.core.errors import ShoalError, ShoalWarning
from shoal.inference.ensemble import Ensemble


def networks(build=plain, count=3, seed=0):
    torch.manual_seed(seed)
    return [build() for _ in range(count)]


def used(build, count=3):
    """Networks whose running statistics have moved."""
    found = networks(build, count)
    for index, network in enumerate(found):
        for _ in range(3):
            network.train()(torch.randn(20, 3) * (index + 1))
    return found


def literal(modules, x):
    with torch.no_grad():
        return torch.stack([copy.deepcopy(module).eval()(x) for module in modules])


class Scaled(nn.Module):
    def __init__(self, scale):
        super().__init__()
        self.layer, self.scale = nn.Linear(3, 4), scale

    def forward(self, x):
        return self.scale * self.layer(x)


@pytest.mark.parametrize("build", [plain, normed, both])
def test_outputs_are_those_of_each_network(build):
    modules, x = used(build), torch.randn(7, 3)
    ensemble = Ensemble.of(modules)
    torch.testing.assert_close(ensemble(x).detach(), literal(modules, x), rtol=1e-5, atol=1e-6)
    for i, module in enumerate(modules):
        assert all(
            torch.equal(mine, theirs)
            for mine, theirs in zip(
                ensemble.member(i).state_dict().values(), module.state_dict().values(), strict=True
            )
        )


def test_the_networks_stay_untouched_and_share_no_memory():
    modules = used(normed)
    modules[1].eval()
    before = [copy.deepcopy(module.state_dict()) for module in modules]
    modes = [module.training for module in modules]
    ensemble = Ensemble.of(modules)
    with torch.no_grad():
        for tensor in [*ensemble.weights.values(), *ensemble.buffers.values()]:
            tensor += 1
    ensemble.train()(torch.randn(5, 3))
    for module, state in zip(modules, before, strict=True):
        assert all(torch.equal(t, state[name]) for name, t in module.state_dict().items())
        assert all(p.requires_grad and p.grad is None for p in module.parameters())
    assert [module.training for module in modules] == modes


def test_networks_frozen_for_inference_count_as_trained():
    modules = [module.requires_grad_(False) for module in networks()]
    ensemble = Ensemble.of(modules)
    assert ensemble.weights.keys() == dict(modules[0].named_parameters()).keys()
    assert all(tensor.requires_grad for tensor in ensemble.weights.values())
    assert not any(p.requires_grad for module in modules for p in module.parameters())


def test_a_frozen_trunk_stays_frozen():
    modules = networks()
    for module in modules:
        module[0].requires_grad_(False)
    ensemble = Ensemble.of(modules)
    assert set(ensemble.weights) == {"2.weight", "2.bias"}
    assert set(ensemble.buffers) == {"0.weight", "0.bias"}, "the networks have different trunks"


def test_a_common_frozen_trunk_is_kept_once():
    modules, x = networks(), torch.randn(5, 3)
    for module in modules:
        module[0] = copy.deepcopy(modules[0][0]).requires_grad_(False)
    ensemble = Ensemble.of(modules)
    assert set(ensemble.shared) == {"0.weight", "0.bias"} and not ensemble.buffers
    torch.testing.assert_close(ensemble(x).detach(), literal(modules, x))


def test_networks_that_were_trained_apart_share_no_trained_tensor():
    class Heads(nn.Sequential):
        shared_tensors = ("0.*",)

    torch.manual_seed(0)
    modules, x = [Heads(nn.Linear(3, 4), nn.Linear(4, 2)) for _ in range(2)], torch.randn(5, 3)
    torch.testing.assert_close(Ensemble.of(modules)(x).detach(), literal(modules, x))


def test_networks_of_several_architectures_stay_together_in_their_order():
    small = networks(lambda: nn.Linear(3, 4), 2)
    large = networks(plain, 3)
    given = [large[0], small[0], large[1], small[1], large[2]]
    x = torch.randn(6, 3)
    with pytest.warns(ShoalWarning, match=r"\[0, 2, 4, 1, 3\]"):
        ensemble = Ensemble.of(given)
    torch.testing.assert_close(ensemble(x).detach(), literal([*large, *small], x))


def test_networks_in_order_of_architecture_give_no_warning():
    given = [*networks(plain, 2), *networks(normed, 2)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ensemble = Ensemble.of(given)
    assert [group.members for group in ensemble.groups] == [2, 2]


def test_settings_without_tensors_tell_architectures_apart():
    modules = [Scaled(1.0), Scaled(3.0)]
    x = torch.randn(5, 3)
    with pytest.warns(ShoalWarning, match="different settings"):
        ensemble = Ensemble.of(modules)
    torch.testing.assert_close(ensemble(x).detach(), literal(modules, x))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_wrappers_are_taken_off():
    inner, x = networks(plain, 3), torch.randn(4, 3)
    wrapped = [nn.DataParallel(inner[0]), torch.compile(inner[1]), inner[2]]
    ensemble = Ensemble.of(wrapped)
    assert set(ensemble.weights) == set(dict(inner[0].named_parameters()))
    torch.testing.assert_close(ensemble(x).detach(), literal(inner, x))


def test_weights_that_a_hook_computes_are_copied():
    x = torch.randn(4, 3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        modules = [nn.Sequential(nn.utils.weight_norm(nn.Linear(3, 4))) for _ in range(2)]
    for module in modules:
        module(x).sum().backward()
    outputs = torch.stack([module(x) for module in modules])
    torch.testing.assert_close(Ensemble.of(modules)(x), outputs)


def test_equal_members_are_allowed_and_told():
    first, second = networks(plain, 2)
    with pytest.warns(ShoalWarning, match=r"members \[2\]"):
        ensemble = Ensemble.of([first, second, copy.deepcopy(first)])
    assert torch.equal(ensemble(torch.ones(2, 3))[0], ensemble(torch.ones(2, 3))[2])


def test_equal_weights_with_other_statistics_are_other_functions():
    first = used(normed, 1)[0]
    second = copy.deepcopy(first)
    second.train()(10 * torch.randn(9, 3))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Ensemble.of([first, second])


def test_networks_that_are_not_finite_are_left_out():
    modules = networks()
    with torch.no_grad():
        modules[1][0].weight[0, 0] = torch.nan
    with pytest.warns(ShoalWarning, match=r"members \[1\]"):
        assert Ensemble.of(modules).alive.tolist() == [True, False, True]


def twice():
    network = plain()
    return [network, plain(), network]


def other_type():
    return [plain(), plain().double()]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (list, ["empty"]),
        (lambda: plain(), ["[network]"]),
        (lambda: 3, ["int"]),
        (lambda: [plain(), 3], ["network 1", "int"]),
        (lambda: [plain], ["network 0", "call the function"]),
        (twice, ["0 and 2", "same object"]),
        (lambda: [nn.LazyLinear(3)], ["lazy"]),
        (lambda: [nn.ReLU()], ["no parameters"]),
        (lambda: [plain().to("meta")], ["meta"]),
        (other_type, ["float32", "float64"]),
        (lambda: [torch.jit.script(plain())], ["TorchScript"]),
    ],
)
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:Lazy modules")
def test_wrong_things_get_one_sentence(given, words):
    with pytest.raises(ShoalError) as error:
        Ensemble.of(given())
    assert_one_sentence(error.value, *words)


def test_a_saved_ensemble_loads_with_a_factory_that_freezes_other_parameters(tmp_path):
    modules, x = networks(), torch.randn(4, 3)
    for module in modules:
        module[0].requires_grad_(False)
    ensemble = Ensemble.of(modules)
    ensemble.save(tmp_path / "members.safetensors")
    for build in (plain, lambda: plain().requires_grad_(False)):
        loaded = Ensemble.load(tmp_path / "members.safetensors", build)
        assert loaded.builds == [build]
        assert loaded.weights.keys() == ensemble.weights.keys()
        torch.testing.assert_close(loaded(x), ensemble(x))

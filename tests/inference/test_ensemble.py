"""An ensemble is its members: stacked, taken apart, moved, saved and loaded."""

import warnings

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations
from triton_ready import needs_gpu

import shoal
from shoal.core.errors import ConfigError, DataError, ShoalError, ShoalWarning

# Torch has no batching rule for weight_norm and says so; spectral_norm cannot be batched at all.
pytestmark = [
    pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning"),
    pytest.mark.filterwarnings("ignore:members run one after another.*div.out"),
]


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell, self.head = nn.LSTM(3, 5, batch_first=True), nn.Linear(5, 2)

    def forward(self, x):
        return self.head(self.cell(x)[0][:, -1])


class Choosing(nn.Module):
    """Takes one of two ways by the size of its own hidden layer."""

    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Linear(3, 2), nn.Linear(3, 2)

    def forward(self, x):
        if self.left(x).sum() > 0:
            return self.left(x)
        return self.right(x)


class Tied(nn.Module):
    """One matrix used in two places, under two names."""

    def __init__(self):
        super().__init__()
        self.there, self.back = nn.Linear(3, 3, bias=False), nn.Linear(3, 3)
        self.back.weight = self.there.weight

    def forward(self, x):
        return self.back(torch.tanh(self.there(x)))


def half_frozen():
    module = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    module[0].requires_grad_(False)
    return module


def batch_norm():
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 2))


def reparametrised():
    return nn.Sequential(parametrizations.weight_norm(nn.Linear(3, 4)), nn.Tanh(), nn.Linear(4, 2))


def spectral():
    return nn.Sequential(parametrizations.spectral_norm(nn.Linear(3, 4)), nn.Linear(4, 2))


def with_embedding():
    return nn.Sequential(nn.Embedding(10, 4), nn.Flatten(), nn.Linear(12, 2))


BUILDS = {
    "linear": lambda: nn.Linear(3, 2),
    "mlp": lambda: nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)),
    "batch norm": batch_norm,
    "layer norm": lambda: nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2)),
    "dropout": lambda: nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.Linear(4, 2)),
    "frozen": half_frozen,
    "tied": Tied,
    "weight norm": reparametrised,
    "spectral norm": spectral,
    "embedding": with_embedding,
}


def inputs(name, points=6, seed=0):
    generator = torch.Generator().manual_seed(seed)
    if name == "embedding":
        return torch.randint(10, (points, 3), generator=generator)
    return torch.randn(points, 3, generator=generator)


def warned(call):
    """What the call returns, and the warnings it gave."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = call()
    return result, [w for w in caught if issubclass(w.category, ShoalWarning)]


@pytest.mark.parametrize("name", BUILDS)
def test_row_i_is_member_i(name):
    ensemble = shoal.Ensemble.init(BUILDS[name], 4)
    x = inputs(name)
    outputs = ensemble(x)
    assert outputs.shape == (4, 6, ensemble.member(0)(x).shape[1])
    for i in range(4):
        torch.testing.assert_close(ensemble.member(i)(x), outputs[i], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", BUILDS)
def test_member_i_is_what_the_factory_makes(name):
    """Members hold the tensors of modules, whole: every parameter and every buffer."""
    ensemble = shoal.Ensemble.init(BUILDS[name], 3)
    template = BUILDS[name]()
    for i in range(3):
        state = ensemble.member(i).state_dict()
        assert {k: v.shape for k, v in state.items()} == {
            k: v.shape for k, v in template.state_dict().items()
        }
    first, second = ensemble.member(0), ensemble.member(1)
    assert any(
        not torch.equal(p, q) for p, q in zip(first.parameters(), second.parameters(), strict=True)
    )


def test_a_member_is_a_copy_in_evaluation_mode():
    ensemble = shoal.Ensemble.init(batch_norm, 2).train()
    member = ensemble.member(1)
    assert not member.training
    with torch.no_grad():
        for tensor in [*member.parameters(), *member.buffers()]:
            tensor.fill_(9)
    assert all((tensor != 9).any() for tensor in ensemble.weights.values())
    assert all((tensor != 9).any() for tensor in ensemble.buffers.values())


def test_a_member_is_laid_out_as_a_module_is():
    """Vectors of parameters, views and files of other libraries want contiguous tensors."""
    for name, build in BUILDS.items():
        member = shoal.Ensemble.init(build, 2).member(1)
        assert nn.utils.parameters_to_vector(member.parameters()).ndim == 1, name
        assert all(tensor.is_contiguous() for tensor in member.state_dict().values()), name


def test_a_member_is_an_ordinary_module():
    ensemble = shoal.Ensemble.init(BUILDS["dropout"], 2)
    kinds = [type(module) for module in ensemble.member(0)]
    assert kinds == [nn.Linear, nn.Dropout, nn.Linear]


def test_running_statistics_are_per_member():
    ensemble = shoal.Ensemble.init(batch_norm, 3).train()
    for step in range(3):
        ensemble(inputs("batch norm", points=16, seed=step))
    mean = ensemble.buffers["1.running_mean"]
    assert not torch.equal(mean[0], mean[1])
    assert ensemble.buffers["1.num_batches_tracked"].tolist() == [3, 3, 3]
    for i in range(3):
        # The statistics that a lone network would have gathered.
        lone = shoal.Ensemble.init(batch_norm, 3).member(i).train()
        for step in range(3):
            lone(inputs("batch norm", points=16, seed=step))
        member = ensemble.member(i)
        torch.testing.assert_close(member[1].running_mean, lone[1].running_mean)
        torch.testing.assert_close(member[1].running_var, lone[1].running_var)
        assert member[1].num_batches_tracked == 3


def test_evaluation_leaves_statistics_alone():
    ensemble = shoal.Ensemble.init(batch_norm, 2)
    before = {name: tensor.clone() for name, tensor in ensemble.buffers.items()}
    ensemble(inputs("batch norm"))
    assert all(torch.equal(before[name], tensor) for name, tensor in ensemble.buffers.items())


def test_statistics_by_cumulative_average_are_counted_once():
    """momentum=None asks for a number in the middle of vmap, after the counter has gone up."""
    build = lambda: nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4, momentum=None))  # noqa: E731
    ensemble = shoal.Ensemble.init(build, 2).train()
    x = inputs("batch norm", points=16)
    _, caught = warned(lambda: ensemble(x))
    assert len(caught) <= 1
    assert ensemble.buffers["1.num_batches_tracked"].tolist() == [1, 1]
    hidden = torch.stack([ensemble.member(i)[0](x) for i in range(2)])
    torch.testing.assert_close(ensemble.buffers["1.running_mean"], hidden.mean(1).detach())


@pytest.mark.parametrize("build", [Recurrent, Choosing], ids=["lstm", "control flow"])
def test_networks_that_cannot_be_batched_run_one_after_another(build):
    ensemble = shoal.Ensemble.init(build, 6, seed=1)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(*((4, 7, 3) if build is Recurrent else (4, 3)), generator=generator)
    outputs, caught = warned(lambda: ensemble(x))
    assert len(caught) == 1
    assert "one after another" in str(caught[0].message)
    for i in range(6):
        torch.testing.assert_close(outputs[i], ensemble.member(i)(x))

    def again():
        ensemble.train()
        ensemble(x)
        with torch.no_grad():
            ensemble(x)
        y = torch.zeros(4, dtype=torch.long)
        posterior = shoal.Posterior(shoal.likelihoods.Categorical(), shoal.priors.Gaussian(), 9)
        functional = shoal.Posterior(
            shoal.likelihoods.Categorical(), shoal.priors.FunctionSpace(), 9
        )
        for target in (posterior, functional):
            velocity, info = shoal.forces(
                ensemble, target, shoal.methods.get("f-kde").repulsion, (x, y)
            )
            assert info.alive.all() and all(t.isfinite().all() for t in velocity.values())

    assert warned(again)[1] == []


def test_both_ways_of_the_choosing_network_are_taken():
    ensemble = shoal.Ensemble.init(Choosing, 6, seed=1)
    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))
    signs = [bool(ensemble.member(i).left(x).sum() > 0) for i in range(6)]
    assert len(set(signs)) == 2


# Mixed architectures.


def mixed(seed=0):
    return shoal.Ensemble.init([(BUILDS["linear"], 2), (batch_norm, 3)], seed=seed)


def test_mixed_architectures_run_in_order():
    ensemble = mixed()
    x = inputs("mlp")
    outputs = ensemble(x)
    assert ensemble.members == 5
    assert [type(ensemble.member(i)) for i in range(5)] == [nn.Linear] * 2 + [nn.Sequential] * 3
    for i in range(5):
        torch.testing.assert_close(ensemble.member(i)(x), outputs[i])


def test_inputs_of_their_own():
    for ensemble in (mixed(), shoal.Ensemble.init(BUILDS["mlp"], 5)):
        x = torch.randn(5, 6, 3, generator=torch.Generator().manual_seed(0))
        outputs = ensemble(x, own_inputs=True)
        for i in range(5):
            torch.testing.assert_close(ensemble.member(i)(x[i]), outputs[i])


def test_architectures_must_agree_on_their_outputs():
    ensemble = shoal.Ensemble.init([(lambda: nn.Linear(3, 2), 1), (lambda: nn.Linear(3, 4), 1)])
    with pytest.raises(DataError, match="must give the same outputs"):
        ensemble(inputs("mlp"))


# Shapes.


def test_a_network_may_return_one_number_a_point():
    ensemble = shoal.Ensemble.init(lambda: nn.Sequential(nn.Linear(3, 1), nn.Flatten(0)), 2)
    assert ensemble(inputs("mlp")).shape == (2, 6, 1)


@pytest.mark.parametrize("points", [1, 2])
def test_small_batches(points):
    ensemble = shoal.Ensemble.init(BUILDS["mlp"], 3)
    assert ensemble(inputs("mlp", points=points)).shape == (3, points, 2)


class Sum(nn.Linear):
    """A network that forgets its batch."""

    def __init__(self):
        super().__init__(3, 2)

    def forward(self, x):
        return super().forward(x).sum()


@pytest.mark.parametrize("kind", ["inputs", "outputs"])
def test_wrong_shapes_are_refused_in_a_sentence(kind):
    if kind == "inputs":
        build, x = BUILDS["mlp"], torch.zeros(6, 5)
        sentence = r"does not take inputs of shape \(5,\)"
    else:
        build, x = (lambda: Sum()), torch.zeros(6, 3)
        sentence = r"must return outputs \[B, C\]"
    with pytest.raises(DataError, match=sentence):
        shoal.Ensemble.init(build, 2)(x)


@pytest.mark.parametrize("index", [-1, 3])
def test_there_are_only_so_many_members(index):
    with pytest.raises(IndexError, match="numbered 0 to 2"):
        shoal.Ensemble.init(BUILDS["mlp"], 3).member(index)


# What is trained.


def test_frozen_parameters_are_carried_and_not_trained():
    ensemble = shoal.Ensemble.init(half_frozen, 3)
    assert set(ensemble.weights) == {"2.weight", "2.bias"}
    assert {"0.weight", "0.bias"} <= set(ensemble.buffers)
    member = ensemble.member(0)
    assert not member[0].weight.requires_grad and member[2].weight.requires_grad


def test_tied_weights_are_one_tensor():
    ensemble = shoal.Ensemble.init(Tied, 2)
    assert sum("weight" in name for name in ensemble.weights) == 1
    member = ensemble.member(1)
    assert member.there.weight is member.back.weight
    x = inputs("tied")
    (gradient,) = torch.autograd.grad(ensemble(x).sum(), ensemble.weights["there.weight"])
    for i in range(2):
        module = ensemble.member(i)
        (lone,) = torch.autograd.grad(module(x).sum(), module.there.weight)
        torch.testing.assert_close(gradient[i], lone)


@pytest.mark.parametrize("name", ["weight norm", "spectral norm", "tied", "frozen"])
def test_forces_of_unusual_modules_are_those_of_lone_modules(name):
    ensemble = shoal.Ensemble.init(BUILDS[name], 3)
    x = inputs(name)
    classes = ensemble(x).shape[-1]
    y = torch.arange(6) % classes
    posterior = shoal.Posterior(shoal.likelihoods.Categorical(), shoal.priors.Gaussian(0.7), 20)
    velocity, _ = shoal.forces(ensemble, posterior, None, (x, y))
    for i in range(3):
        module = ensemble.member(i)
        trained = {n: p for n, p in module.named_parameters() if p.requires_grad}
        prior = sum(p.square().sum() for p in trained.values()) / (2 * 0.7**2 * 20)
        value = -nn.functional.cross_entropy(module(x), y) - prior
        gradients = torch.autograd.grad(value, list(trained.values()))
        assert trained.keys() == velocity.keys()
        for key, gradient in zip(trained, gradients, strict=True):
            torch.testing.assert_close(velocity[key][i], gradient, rtol=1e-4, atol=1e-6)


# Moving, saving, loading.


@pytest.mark.parametrize("name", BUILDS)
def test_to_another_type_and_back(name):
    ensemble = shoal.Ensemble.init(BUILDS[name], 2)
    x = inputs(name)
    before = ensemble(x)
    assert ensemble.to(dtype=torch.float64) is ensemble
    assert ensemble.dtype == torch.float64
    assert all(t.requires_grad and t.is_leaf for t in ensemble.weights.values())
    assert all(not t.requires_grad for t in ensemble.buffers.values())
    wide = x.double() if x.is_floating_point() else x
    assert ensemble(wide).dtype == torch.float64
    torch.testing.assert_close(ensemble(wide).float(), before, rtol=1e-5, atol=1e-5)
    assert all(p.dtype == torch.float64 for p in ensemble.member(1).parameters())
    ensemble.to(dtype=torch.float32).to()
    torch.testing.assert_close(ensemble(x), before, rtol=1e-6, atol=1e-6)


def test_counters_keep_their_type():
    ensemble = shoal.Ensemble.init(batch_norm, 2).to(dtype=torch.float64)
    assert ensemble.buffers["1.num_batches_tracked"].dtype == torch.int64


@pytest.mark.parametrize("name", [*BUILDS, "mixed"])
def test_saved_and_loaded(name, tmp_path):
    ensemble = mixed(3) if name == "mixed" else shoal.Ensemble.init(BUILDS[name], 3, seed=3)
    build = [(BUILDS["linear"], 2), (batch_norm, 3)] if name == "mixed" else BUILDS[name]
    x = inputs(name, points=16)
    ensemble.train()
    ensemble(x)
    ensemble.train(False)
    ensemble.alive[1] = False
    ensemble.save(tmp_path / "members.safetensors")
    loaded = shoal.Ensemble.load(tmp_path / "members.safetensors", build)
    assert loaded.state.keys() == ensemble.state.keys()
    for key, tensor in ensemble.state.items():
        assert torch.equal(loaded.state[key], tensor), key
    torch.testing.assert_close(loaded(x), ensemble(x))


def test_double_precision_survives_the_file(tmp_path):
    ensemble = shoal.Ensemble.init(BUILDS["mlp"], 2, seed=3).to(dtype=torch.float64)
    with torch.no_grad():
        ensemble.weights["0.weight"] += torch.pi * 1e-9
    ensemble.save(tmp_path / "members.safetensors")
    loaded = shoal.Ensemble.load(tmp_path / "members.safetensors", BUILDS["mlp"])
    assert torch.equal(loaded.weights["0.weight"].double(), ensemble.weights["0.weight"])


def test_loading_says_nothing_of_how_the_factory_draws(tmp_path):
    """The drawn weights are replaced: that they were equal is of no concern."""

    def constant():
        module = nn.Linear(3, 2)
        nn.init.ones_(module.weight), nn.init.zeros_(module.bias)
        return module

    with pytest.warns(ShoalWarning, match="equal members"):
        ensemble = shoal.Ensemble.init(constant, 3)
    ensemble.save(tmp_path / "members.safetensors")
    loaded, caught = warned(lambda: shoal.Ensemble.load(tmp_path / "members.safetensors", constant))
    assert torch.equal(loaded.weights["weight"], ensemble.weights["weight"])
    assert caught == []


def test_a_parameter_may_be_called_anything(tmp_path):
    class Fish(nn.Module):
        def __init__(self):
            super().__init__()
            self.alive = nn.Parameter(torch.randn(3, 2))

        def forward(self, x):
            return x @ self.alive

    ensemble = shoal.Ensemble.init(Fish, 3, seed=5)
    ensemble.save(tmp_path / "members.safetensors")
    loaded = shoal.Ensemble.load(tmp_path / "members.safetensors", Fish)
    assert torch.equal(loaded.weights["alive"], ensemble.weights["alive"])
    assert loaded.alive.tolist() == [True] * 3


@pytest.mark.parametrize(
    ("build", "sentence"),
    [
        (BUILDS["linear"], "another architecture"),
        (lambda: nn.Sequential(nn.Linear(3, 9), nn.ReLU(), nn.Linear(9, 2)), "of shape"),
    ],
)
def test_another_architecture_cannot_take_the_tensors(build, sentence, tmp_path):
    shoal.Ensemble.init(BUILDS["mlp"], 3).save(tmp_path / "members.safetensors")
    with pytest.raises(ConfigError, match=sentence):
        shoal.Ensemble.load(tmp_path / "members.safetensors", build)


def test_a_file_that_is_no_ensemble(tmp_path):
    path = tmp_path / "members.safetensors"
    path.write_bytes(b"not tensors at all")
    with pytest.raises(ShoalError):
        shoal.Ensemble.load(path, BUILDS["mlp"])


def test_spaced_members_are_copies_of_evenly_spaced_ones():
    builds = [(lambda: nn.Linear(3, 2), 4), (lambda: nn.Sequential(nn.Linear(3, 2)), 3)]
    ensemble = shoal.Ensemble.init(builds)
    ensemble.alive[3] = False
    few, x = ensemble.spaced(3), torch.randn(5, 3)
    assert few.alive.tolist() == [True, False, True] and ensemble.spaced(7) is ensemble
    torch.testing.assert_close(few(x), ensemble(x)[[0, 3, 6]])
    with torch.no_grad():
        next(iter(few.weights.values())).zero_()
    assert bool(ensemble(x)[0].any())


@needs_gpu
def test_members_of_networks_on_a_gpu_live_there():
    ensemble = shoal.Ensemble.init(lambda: nn.Linear(3, 2).to("cuda"), 2)
    assert ensemble.device.type == "cuda"
    run = shoal.fit(ensemble, (torch.randn(20, 3), torch.randn(20, 2)), steps=2, progress=False)
    assert run.ensemble.weights["weight"].isfinite().all()

"""Adapters on a frozen network: formulas, sharing, initialisation, refusals."""

import copy
import math

import pytest
import torch
from small_runs import assert_one_sentence
from torch import nn
from torch.func import functional_call, vmap
from torch.nn.utils import parametrizations
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import shoal
from shoal.inference.adapting.layers import root_mean_square

pytestmark = pytest.mark.usefixtures("double")


class Conv1D(nn.Module):
    """As in GPT-2: weight [in, out]."""

    def __init__(self, nf: int, nx: int) -> None:
        super().__init__()
        self.nf, self.nx = nf, nx
        self.weight, self.bias = nn.Parameter(torch.randn(nx, nf)), nn.Parameter(torch.randn(nf))

    def forward(self, x):
        return x @ self.weight + self.bias


class Padded(nn.Conv2d):
    """A convolution that pads its inputs in forward."""

    def forward(self, x):
        return super().forward(nn.functional.pad(x, (1, 2, 0, 1)))


def perceptron():
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 7), nn.Tanh(), nn.Linear(7, 3))


def cnn():
    return nn.Sequential(
        nn.Conv2d(2, 6, 3, stride=2, padding=1, dilation=2), nn.BatchNorm2d(6), nn.ReLU(),
        nn.Dropout(0.5), nn.Conv2d(6, 6, 3, groups=3), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        nn.Linear(6, 3),
    )  # fmt: skip


def trained(network):
    return [name for name, p in network.named_parameters() if p.requires_grad]


LAYERS = [
    (lambda: nn.Linear(5, 6), (4, 5)),
    (lambda: nn.Linear(5, 6, bias=False), (4, 2, 5)),
    (lambda: Conv1D(6, 5), (4, 2, 5)),
    (lambda: nn.Conv1d(2, 6, 3, padding="same", padding_mode="circular"), (4, 2, 9)),
    (lambda: nn.Conv2d(2, 6, (3, 2), stride=(2, 1), padding=1, dilation=2), (4, 2, 9, 9)),
    (lambda: nn.Conv3d(2, 6, 2), (4, 2, 4, 4, 4)),
    (lambda: Padded(2, 6, 3, stride=2), (4, 2, 8, 8)),
    (lambda: parametrizations.weight_norm(nn.Linear(5, 6)), (4, 5)),
]


@pytest.mark.parametrize("make, shape", LAYERS)
@pytest.mark.parametrize("adapter", ["lora", "scale"])
def test_a_wrapper_is_its_layer_with_the_effective_weight(make, shape, adapter):
    """`weight` and `bias` in the layer give what the wrapper computes without them."""
    layer = make()
    options = {"rank": 2, "alpha": 3.0} if adapter == "lora" else {}
    wrapper = getattr(shoal.adapters, adapter)(layer, train=(), spread=0.7, **options)()
    x = torch.randn(*shape)
    normed = nn.utils.parametrize.is_parametrized(layer)
    literal = nn.Linear(5, 6) if normed else copy.deepcopy(layer)
    with torch.no_grad():
        literal.weight.copy_(wrapper.weight)
        if wrapper.bias is not None:
            literal.bias.copy_(wrapper.bias)
    assert not torch.allclose(wrapper(x), layer(x))
    torch.testing.assert_close(wrapper(x), literal(x))


def test_low_rank_is_the_formula_of_the_paper():
    layer, x = nn.Linear(5, 6), torch.randn(4, 5)
    wrapper = shoal.adapters.lora(layer, rank=2, alpha=6, train=())()
    a, b = wrapper.lora_A.weight, wrapper.lora_B.weight
    assert a.shape == (2, 5) and b.shape == (6, 2)
    torch.testing.assert_close(wrapper(x), layer(x) + 3.0 * x @ a.T @ b.T)
    assert wrapper.in_features == 5


def test_factors_multiply_the_outputs_of_each_channel():
    layer, x = nn.Conv2d(2, 6, 3, groups=2), torch.randn(4, 2, 8, 8)
    wrapper = shoal.adapters.scale(layer, train=(), spread=0.3)()
    torch.testing.assert_close(wrapper(x), layer(x) * wrapper.scale[:, None, None])


def test_an_embedding_is_adapted_when_it_is_named():
    network = nn.Sequential(nn.Embedding(7, 4, padding_idx=0), nn.Linear(4, 3))
    assert trained(shoal.adapters.lora(network, train=())()) == [
        "1.lora_A.weight", "1.lora_B.weight",
    ]  # fmt: skip
    member = shoal.adapters.lora(network, targets="0", alpha=2.0)()
    tokens = torch.randint(0, 7, (5, 3))
    torch.testing.assert_close(member[0](tokens), member[0].weight[tokens])
    assert not torch.allclose(member[0].weight, network[0].weight)


@pytest.mark.parametrize("make", [perceptron, cnn])
@pytest.mark.parametrize("adapter", ["lora", "scale", "last_layer"])
def test_members_hold_the_trunk_itself_and_leave_the_network_alone(make, adapter):
    network = make()
    before = {name: t.clone() for name, t in network.state_dict().items()}
    build = getattr(shoal.adapters, adapter)(network)
    first, second = build(), build()
    shared = {id(t) for t in [*first.parameters(), *first.buffers()]}
    shared &= {id(t) for t in [*second.parameters(), *second.buffers()]}
    private = [p for p in first.parameters() if p.requires_grad]
    assert not shared & {id(p) for p in private}
    tensors = [*first.parameters(), *first.buffers()]
    assert len(shared) == len(tensors) - len(private)
    pointers = {t.data_ptr() for t in network.state_dict().values()}
    assert all(t.data_ptr() in pointers for t in tensors if id(t) in shared)
    assert all(p.requires_grad for p in network.parameters())
    assert all(torch.equal(t, before[name]) for name, t in network.state_dict().items())


@pytest.mark.parametrize("spread", [0.02, 0.5])
@pytest.mark.parametrize("make, shape", LAYERS[:-1])
def test_the_change_of_a_weight_has_the_size_that_was_asked(make, shape, spread):
    layer = make()
    wrapper = shoal.adapters.lora(layer, rank=3, alpha=2.0, train=(), spread=spread)()
    change = root_mean_square(wrapper.weight - layer.weight)
    assert change == pytest.approx(spread * root_mean_square(layer.weight))


def test_a_layer_of_zeros_gets_a_change_too():
    layer = nn.Linear(12, 5)
    nn.init.zeros_(layer.weight)
    wrapper = shoal.adapters.lora(layer, train=(), spread=0.1)()
    assert root_mean_square(wrapper.weight) == pytest.approx(0.1 / 6)


@pytest.mark.parametrize("method", ["f-kde", "f-svgd"])
def test_equal_functions_do_not_repel_and_ours_do(method):
    """With B = 0 the members differ in A alone: their outputs are equal, so L z = 0."""
    network, x = perceptron(), torch.randn(16, 5)
    y = torch.randint(0, 3, (16,))
    pushes = {}
    for spread in (0.0, 0.02):
        build = shoal.adapters.lora(network, train=(), spread=spread)
        ensemble = shoal.Ensemble.init(build, members=4)
        assert not torch.equal(*ensemble.weights["0.lora_A.weight"][:2])
        stepper = shoal.Stepper(ensemble, n=16, method=method, lr=1e-3)
        pushes[spread] = float(stepper((x, y)).push)
    assert pushes[0.0] == 0 and pushes[0.02] > 1e-6


def test_members_are_seeded_and_do_not_depend_on_the_ensemble_size():
    build = shoal.adapters.lora(perceptron())
    few, more = (shoal.Ensemble.init(build, members=m, seed=3).weights for m in (2, 4))
    for name, tensor in few.items():
        assert torch.equal(tensor, more[name][:2])
        assert not torch.equal(more[name][0], more[name][1])


def test_the_last_layer_is_drawn_anew_or_perturbed():
    network = perceptron()
    for make in (shoal.adapters.lora, shoal.adapters.last_layer):
        new, near = make(network)()[4].weight, make(network, fresh=False)()[4].weight
        size = root_mean_square(network[4].weight)
        assert root_mean_square(near - network[4].weight) == pytest.approx(0.02 * size, rel=0.5)
        assert root_mean_square(new - network[4].weight) > 0.5 * size


def test_patterns_choose_what_is_adapted_and_trained():
    network = perceptron()
    member = shoal.adapters.lora(network, targets=["0"], train=["*.bias"])()
    assert trained(member) == [
        "0.base.bias",
        "0.lora_A.weight",
        "0.lora_B.weight",
        "2.bias",
        "4.bias",
    ]
    torch.testing.assert_close(member[2].bias, network[2].bias, rtol=0.2, atol=0.1)
    assert trained(shoal.adapters.last_layer(network, "2")()) == ["2.weight", "2.bias"]
    both = shoal.adapters.scale(network, train=["2", "4"])()
    assert trained(both) == ["0.scale", "2.weight", "2.bias", "4.weight", "4.bias"]


def test_norms_keep_the_statistics_of_the_trunk():
    modes = {
        name: [type(m).__name__ for m in getattr(shoal.adapters, name)(cnn())() if not m.training]
        for name in ("lora", "scale", "last_layer")
    }
    assert modes["lora"] == modes["scale"] == ["BatchNorm2d"]
    assert len(modes["last_layer"]) == 7
    trained_norm = shoal.adapters.lora(cnn(), train=["1", "7"])()
    assert trained_norm[1].training and trained_norm.training


def test_a_network_in_evaluation_mode_is_trained_all_the_same():
    member = shoal.adapters.lora(cnn().eval())()
    assert member.training and member[3].training and not member[1].training


def test_a_layer_used_twice_is_adapted_once():
    layer = nn.Linear(5, 5)
    network = nn.Sequential(layer, nn.Tanh(), layer, nn.Linear(5, 2))
    member = shoal.adapters.lora(network)()
    assert member[0] is member[2] and len(trained(member)) == 4


def test_a_tied_last_layer_is_set_free():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.middle = nn.Embedding(7, 4), nn.Linear(4, 4)
            self.last = nn.Linear(4, 7, bias=False)
            self.last.weight = self.embed.weight

        def forward(self, tokens):
            return self.last(self.middle(self.embed(tokens)))

    network = Tied()
    member = shoal.adapters.lora(network)()
    assert trained(member) == ["middle.lora_A.weight", "middle.lora_B.weight", "last.weight"]
    assert torch.equal(member.embed.weight, network.embed.weight)


class Attends(nn.Module):
    def __init__(self, **sizes):
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True, **sizes)
        self.keys, self.values = sizes.get("kdim", 4), sizes.get("vdim", 4)
        self.last = nn.Linear(4, 3)

    def forward(self, x):
        seen = self.attention(x, x[..., : self.keys], x[..., : self.values])[0]
        return self.last(seen.mean(1))


def encoder():
    layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True)
    return nn.Sequential(
        nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Flatten(), nn.Linear(20, 3)
    )


ATTENTION = [Attends, lambda: Attends(kdim=3, vdim=2), encoder]


@pytest.mark.parametrize("make", ATTENTION)
@pytest.mark.parametrize("adapter", ["lora", "scale"])
def test_attention_is_that_of_the_effective_weights(make, adapter):
    """In training, in evaluation, and on the fast path without gradients."""
    network, x = make(), torch.randn(6, 5, 4)
    member = getattr(shoal.adapters, adapter)(network, train=(), spread=0.5)()
    attention = [m for m in member.modules() if isinstance(m, nn.MultiheadAttention)]
    assert all("parametrizations" in dict(m.named_children()) for m in attention)
    literal = copy.deepcopy(network)
    with torch.no_grad():
        for name, layer in literal.named_modules():
            ours = member.get_submodule(name)
            for key, parameter in layer.named_parameters(recurse=False):
                parameter.copy_(getattr(ours, key))
    for training in (True, False):
        outputs = member.train(training)(x)
        torch.testing.assert_close(outputs, literal.train(training)(x))
        with torch.no_grad():
            torch.testing.assert_close(member(x), outputs)
    assert not torch.allclose(network.eval()(x), outputs)


@pytest.mark.parametrize("make", [*ATTENTION, perceptron, cnn])
@pytest.mark.parametrize("adapter", ["lora", "scale", "last_layer"])
def test_members_together_are_members_alone(make, adapter):
    network = make()
    x = {cnn: torch.randn(4, 2, 12, 12), perceptron: torch.randn(4, 5)}.get(make)
    x = torch.randn(4, 5, 4) if x is None else x
    ensemble = shoal.Ensemble.init(getattr(shoal.adapters, adapter)(network), members=3)
    outputs = ensemble(x)
    with torch.no_grad():
        torch.testing.assert_close(ensemble(x), outputs)
    for index in range(3):
        torch.testing.assert_close(outputs[index], ensemble.member(index)(x))
    assert not torch.allclose(outputs[0], outputs[1])


REFUSED = [
    (lambda: shoal.adapters.lora(perceptron), "nn.Module"),
    (lambda: shoal.adapters.lora(perceptron(), rank=0), "rank"),
    (lambda: shoal.adapters.lora(perceptron(), rank=True), "rank"),
    (lambda: shoal.adapters.lora(perceptron(), alpha=-1.0), "alpha"),
    (lambda: shoal.adapters.lora(perceptron(), spread=float("nan")), "spread"),
    (lambda: shoal.adapters.lora(perceptron(), targets="layer.*"), "layer.*"),
    (lambda: shoal.adapters.lora(perceptron(), targets=[]), "targets"),
    (lambda: shoal.adapters.lora(perceptron(), targets=[3]), "targets must be text"),
    (lambda: shoal.adapters.lora(perceptron(), targets="1"), "Tanh"),
    (lambda: shoal.adapters.lora(perceptron(), targets="4"), "train=()"),
    (lambda: shoal.adapters.lora(perceptron(), train="head"), "head"),
    (lambda: shoal.adapters.lora(cnn(), targets="4"), "grouped"),
    (lambda: shoal.adapters.lora(nn.Linear(3, 2)), "last_layer"),
    (lambda: shoal.adapters.lora(nn.LazyLinear(3)), "call the network once"),
    (lambda: shoal.adapters.last_layer(perceptron(), "5"), "5"),
    (lambda: shoal.adapters.last_layer(perceptron(), "1"), "parameters"),
    (lambda: shoal.adapters.last_layer(nn.Tanh()), "no layer"),
    (lambda: shoal.adapters.last_layer(Conv1D(2, 3)), "fresh=False"),
    (
        lambda: shoal.adapters.last_layer(parametrizations.weight_norm(nn.Linear(2, 3))),
        "fresh=False",
    ),
]


@pytest.mark.parametrize("make, word", REFUSED)
def test_what_cannot_be_adapted_is_one_sentence(make, word):
    with pytest.raises(shoal.ConfigError) as caught:
        make()
    assert_one_sentence(caught.value, word)


class Products(TorchDispatchMode):
    """Names and shapes of all operations."""

    def __init__(self):
        super().__init__()
        self.made, self.names = [], []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        self.names.append(function.__name__.partition(".")[0])
        self.made += [tuple(t.shape) for t in tree_leaves(out) if isinstance(t, torch.Tensor)]
        return out


SHARED = [
    (nn.Linear(50, 40), (6, 50)),
    (nn.Linear(50, 40), (6, 7, 50)),
    (nn.Conv2d(20, 30, 3), (6, 20, 8, 8)),
]


@pytest.mark.parametrize("layer, shape", SHARED)
def test_the_shared_weight_takes_one_product_for_all_members(layer, shape):
    """Members with their own inputs are rows of one product; no member has its own W + B A."""
    members = 5
    build = shoal.adapters.lora(layer.double(), rank=2, train=())
    networks = [build() for _ in range(members)]
    private = {
        name: torch.stack([dict(n.named_parameters())[name] for n in networks]).detach()
        for name in trained(networks[0])
    }
    shared = {n: p for n, p in networks[0].named_parameters() if n not in private}
    x = torch.randn(members, *shape)

    def outputs(own, x):
        return functional_call(networks[0], own | shared, (x,))

    with Products() as seen, torch.no_grad():
        found = vmap(outputs)(private, x)
    torch.testing.assert_close(found, torch.stack([n(x[i]) for i, n in enumerate(networks)]))
    assert members * layer.weight.numel() not in map(math.prod, seen.made)
    expected = "convolution" if layer.weight.ndim > 2 else "mm"
    assert seen.names.count(expected) + seen.names.count("addmm") >= 1
    assert seen.names.count("bmm") <= 2


@pytest.mark.parametrize("adapter", ["lora", "scale", "last_layer"])
@pytest.mark.parametrize("make", [perceptron, cnn, encoder])
def test_an_ensemble_holds_one_trunk(adapter, make):
    network = make()
    build = getattr(shoal.adapters, adapter)(network)
    ensemble = shoal.Ensemble.init(build, members=20)
    member = build()
    assert list(ensemble.weights) == trained(member)
    assert not ensemble.buffers and not ensemble.trained_shared
    private = sum(p.numel() for p in member.parameters() if p.requires_grad)
    held = sum(t.numel() for t in ensemble.state.values()) - len(ensemble.alive)
    frozen = [*member.parameters(), *member.buffers()]
    assert held == 20 * private + sum(t.numel() for t in frozen if not t.requires_grad)


def test_training_moves_the_private_tensors_alone():
    network, x = cnn(), torch.randn(24, 2, 12, 12)
    ensemble = shoal.Ensemble.init(shoal.adapters.lora(network), members=3)
    before = {name: t.detach().clone() for name, t in ensemble.state.items()}
    y = torch.arange(24) % 3
    shoal.fit(ensemble, (x, y), epochs=1, batch_size=8, progress=False)
    for name, tensor in ensemble.state.items():
        assert torch.equal(tensor, before[name]) != name.startswith("weights/"), name

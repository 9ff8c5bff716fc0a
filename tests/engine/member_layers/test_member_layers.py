"""Transformers under members equal each member alone, in values and two derivatives."""

import warnings

import pytest
import torch
from member_formulas import distances, use_formulas
from torch import nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import shoal
from shoal.core.errors import ShoalWarning
from shoal.core.random import generator
from shoal.engine.members.member_runner import MemberRunner
from shoal.engine.resources.plan import default_runner

WIDTH, CLASSES, B, M = 8, 3, 3, 2


@pytest.fixture
def called(monkeypatch):
    return use_formulas(monkeypatch)


class Encoder(nn.Module):
    """Patches by a convolution, layers of torch, and a mask if one is wanted."""

    def __init__(self, norm_first=False, activation="relu", mask=None, batch_first=True):
        super().__init__()
        self.cut = nn.Conv2d(3, WIDTH, 4, 4)
        layer = nn.TransformerEncoderLayer(
            WIDTH, 2, 12, 0.0, activation, batch_first=batch_first, norm_first=norm_first
        )
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head, self.mask, self.batch_first = nn.Linear(WIDTH, CLASSES), mask, batch_first

    def forward(self, x):
        tokens = self.cut(x).flatten(2).transpose(1, 2)
        count, given = tokens.shape[1], {}
        causal = nn.Transformer.generate_square_subsequent_mask(count, dtype=x.dtype)
        if self.mask == "causal":
            given = {"mask": causal, "is_causal": True}
        if self.mask == "padding":
            late = torch.arange(count) > 1
            given = {"src_key_padding_mask": late.expand(len(x), count)}
        if self.mask == "both":
            late = torch.arange(count) > 1
            given = {"mask": causal < 0, "src_key_padding_mask": late.expand(len(x), count)}
        if not self.batch_first:
            return self.head(self.layers(tokens.transpose(0, 1), **given).mean(0))
        return self.head(self.layers(tokens, **given).mean(1))


class Decoder(nn.Module):
    """Pieces of one layer, RMS normalisation, SiLU, no biases, and maybe rotary positions."""

    def __init__(self, cut="chunk"):
        super().__init__()
        self.cut = cut
        self.embed, self.head = nn.Linear(12, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.before, self.between = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH, eps=1e-3)
        self.pieces = nn.Linear(WIDTH, 3 * WIDTH)
        self.out, self.up = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, 10, bias=False)
        self.down = nn.Linear(10, WIDTH)

    def forward(self, x):
        x = self.embed(x.reshape(len(x), -1, 12))
        pieces = self.pieces(self.before(x))
        if self.cut == "uneven":
            q, k, v = pieces.split([4, 2 * WIDTH - 4, WIDTH], -1)
            q, k = q.repeat(1, 1, 2), k[..., :WIDTH]
        else:
            q, k, v = pieces.chunk(3, -1) if self.cut == "chunk" else pieces.split(WIDTH, -1)
        q, k, v = (t.unflatten(-1, (2, -1)).transpose(1, 2) for t in (q, k, v))
        if self.cut == "rotary":
            q, k = rotated(q), rotated(k)
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.3)
        x = self.out(seen.transpose(1, 2).flatten(2)) + x
        x = x + self.down(F.silu(self.up(self.between(x))))
        return self.head(x[:, -1])


def rotated(t):
    angles = torch.arange(t.shape[-2], dtype=t.dtype)[:, None].expand(t.shape[-2:])
    low, high = t.chunk(2, -1)
    return t * angles.cos() + torch.cat([-high, low], -1) * angles.sin()


class Mixed(nn.Module):
    """Layers whose results are used in ways that nothing joins."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(48, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, CLASSES)
        self.whole = nn.LayerNorm((4, WIDTH), elementwise_affine=False)
        self.gate = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x):
        x = self.first(x.reshape(len(x), 4, 48))
        layer = self.second(x)
        sizes = layer.shape, layer.ndim, layer.dtype, len(layer)
        assert sizes == (x.shape, 3, x.dtype, len(x))
        kept = layer + x
        y = self.norm(kept) + kept * self.gate
        y = y + layer.tanh() + 1
        y = y + self.second(y).relu_()
        return self.head(self.whole(y).amax(1))


class Filters(nn.Module):
    """Convolutions that look like cuts into patches, and are not."""

    def __init__(self):
        super().__init__()
        self.apart = nn.Conv2d(3, WIDTH, 2, 2, dilation=3)
        self.padded, self.few = (
            nn.Conv2d(3, WIDTH, 4, 4, padding=2),
            nn.Conv2d(3, 6, 2, 2, groups=3),
        )
        self.cut = nn.Conv2d(3, WIDTH, 3, 3)
        self.head = nn.Linear(WIDTH * (9 + 9 + 4) + 6 * 16, CLASSES)

    def forward(self, x):
        found = [layer(x).flatten(1) for layer in (self.padded, self.apart, self.cut, self.few)]
        return self.head(torch.cat(found, 1).tanh())


NETWORKS = {
    "vit": lambda: shoal.models.ViT(width=WIDTH, depth=2, heads=2).build((3, 8, 8), CLASSES),
    "encoder": Encoder,
    "encoder, normalised first": lambda: Encoder(norm_first=True, activation="gelu"),
    "encoder, tokens first": lambda: Encoder(batch_first=False),
    "encoder, causal": lambda: Encoder(mask="causal"),
    "encoder, padding": lambda: Encoder(mask="padding"),
    "encoder, two masks": lambda: Encoder(mask="both"),
    "decoder": Decoder,
    "decoder, split": lambda: Decoder("split"),
    "decoder, uneven": lambda: Decoder("uneven"),
    "decoder, rotary": lambda: Decoder("rotary"),
    "mixed": Mixed,
}


def images(name="x"):
    x = torch.randn(B, 3, 8, 8, generator=generator(0, name), dtype=torch.float64)
    return x.expand(M, *x.shape).clone().requires_grad_()


def results(ensemble, runner, x):
    """Outputs, gradients at weights, input gradients, and the second derivative of these."""
    weights = list(ensemble.weights.values())
    with sdpa_kernel(SDPBackend.MATH):
        outputs = ensemble(x, runner, True)
    first = torch.autograd.grad(outputs.sin().sum(), weights, retain_graph=True)
    (slope,) = torch.autograd.grad(outputs.sin().sum(), x, create_graph=True)
    second = torch.autograd.grad(slope.square().sum(), weights, allow_unused=True)
    with torch.no_grad():
        ensemble.train(False)
        at_rest = ensemble(x[0].detach(), runner)
        ensemble.train(True)
    return [outputs, *first, slope, *second, at_rest]


@pytest.mark.parametrize("name", NETWORKS)
def test_members_equal_each_alone(called, name):
    ensemble = shoal.Ensemble.init(NETWORKS[name], M, seed=1).to(torch.float64)
    x = images()
    with warnings.catch_warnings():
        warnings.simplefilter("error", ShoalWarning)
        found = results(ensemble, MemberRunner(), x)
    assert max(distances(found, results(ensemble, MemberRunner("loop"), x))) < 1e-9
    assert called


def test_filters_that_do_not_cut_patches(called):
    ensemble = shoal.Ensemble.init(Filters, M, seed=1).to(torch.float64)
    with warnings.catch_warnings():
        warnings.simplefilter("error", ShoalWarning)
        found = results(ensemble, MemberRunner(), images())
    assert max(distances(found, results(ensemble, MemberRunner("loop"), images()))) < 1e-9


def count(called, name, place=None):
    return sum(
        kind == name and (place is None or given[place] is not None) for kind, given in called
    )


def test_bias_residual_and_norm_are_one_pass(called):
    ensemble = shoal.Ensemble.init(NETWORKS["vit"], M).to(torch.float64)
    ensemble(images()[0].detach(), MemberRunner())
    # Two blocks: each has one sum before its second norm, and one before the next block's norm.
    assert count(called, "norm") == 1 and count(called, "add_norm") == 4
    assert count(called, "add_norm", 1) == 4 and count(called, "add_norm", 2) == 4
    assert count(called, "activate", 1) == 2
    assert [len(given[0]) for kind, given in called if kind == "attend"] == [1, 1]


def test_layers_of_torch_are_joined_as_well(called):
    ensemble = shoal.Ensemble.init(lambda: Encoder(norm_first=True), M).to(torch.float64)
    ensemble(images()[0].detach(), MemberRunner())
    assert count(called, "norm") == 1 and count(called, "add_norm", 1) == 3
    assert [len(given[0]) for kind, given in called if kind == "attend"] == [1, 1]


@pytest.mark.parametrize("adapt", [shoal.adapters.lora, shoal.adapters.last_layer])
def test_members_on_a_shared_trunk(called, adapt):
    ensemble = shoal.Ensemble.init(adapt(NETWORKS["vit"]()), M).to(torch.float64)
    with torch.no_grad():
        for name, weight in ensemble.weights.items():
            weight += 0.1 * torch.randn(weight.shape, generator=generator(0, name)).to(weight)
    x, found = images()[0].detach(), []
    for runner in (MemberRunner(), MemberRunner("loop")):
        outputs = ensemble(x, runner)
        slopes = torch.autograd.grad(outputs.sin().sum(), list(ensemble.weights.values()))
        found.append([outputs, *slopes])
    assert max(distances(*found)) < 1e-9


def test_dropout_is_that_of_a_loop(called):
    build = shoal.models.ViT(width=WIDTH, depth=1, heads=2, dropout=0.3).build
    ensemble = shoal.Ensemble.init(lambda: build((3, 8, 8), CLASSES), M).to(torch.float64)
    x = images()[0].detach()
    runs = [ensemble(x, runner, False, 0, 5) for runner in (MemberRunner(), MemberRunner("loop"))]
    torch.testing.assert_close(*runs, rtol=1e-10, atol=1e-12)


class SometimesSkipped(nn.Linear):
    """Stochastic depth as torchvision writes it: whole rows are dropped."""

    def forward(self, x):
        kept = torch.empty(len(x), 1, dtype=x.dtype).bernoulli_(0.7)
        return super().forward(x) * kept.div_(0.7)


def test_every_member_skips_rows_of_its_own(called):
    ensemble = shoal.Ensemble.init(lambda: SometimesSkipped(4, 2), 5).to(torch.float64)
    x = torch.ones(400, 4, dtype=torch.float64)
    with warnings.catch_warnings():
        warnings.simplefilter("error", ShoalWarning)
        found = ensemble(x, MemberRunner()).detach()
    whole = (ensemble.weights["weight"].sum(-1) + ensemble.weights["bias"]).detach() / 0.7
    kept = found.ne(0).any(-1)
    torch.testing.assert_close(found, whole[:, None] * kept[..., None])
    assert bool(((kept.double().mean(1) - 0.7).abs() < 0.15).all())  # six standard deviations
    assert len({tuple(each.tolist()) for each in kept}) == 5


class ChangedInPlace(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(48, WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, x):
        x = self.first(x.reshape(len(x), 4, 48)).tanh()
        layer = self.second(x)
        x.mul_(2)
        return (layer + self.second(x)).mean(1)


def test_a_change_in_place_is_noticed(called):
    ensemble = shoal.Ensemble.init(ChangedInPlace, M).to(torch.float64)
    x = images()[0].detach()
    with torch.no_grad(), pytest.warns(ShoalWarning, match="changed in place"):
        found = ensemble(x, MemberRunner())
    with torch.no_grad():
        torch.testing.assert_close(found, ensemble(x, MemberRunner("loop")))


def test_patches_do_not_send_a_transformer_to_the_loop():
    gpu = torch.device("cuda")
    patches = shoal.Ensemble.init(Encoder, 2)
    filters = shoal.Ensemble.init(lambda: nn.Sequential(nn.Conv2d(3, 2, 3), nn.Flatten()), 2)
    assert default_runner(patches.groups, gpu).kind == "vmap"
    assert default_runner(filters.groups, gpu).kind == "loop"

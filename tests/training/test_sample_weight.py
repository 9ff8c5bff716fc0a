"""Weights of data points: a whole number equals repetition, zero equals absence."""

import pytest
import torch
from torch import nn

import shoal
from shoal.inference import likelihoods

N, M = 12, 3
REPEATS = torch.tensor([1, 2, 3, 1, 1, 2, 1, 4, 1, 1, 2, 1])


def points(kind):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(N, 3, generator=generator, dtype=torch.float64)
    if kind == "classes":
        return x, torch.randint(0, 2, (N,), generator=generator)
    if kind == "tokens":
        x = torch.randint(0, 5, (N, 4), generator=generator)
        y = torch.randint(0, 2, (N, 4), generator=generator)
        return x, y.masked_fill(torch.rand(N, 4, generator=generator) < 0.2, -100)
    return x, torch.randn(N, generator=generator, dtype=torch.float64) * 3 + 1


class Tokens(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(5, 4), nn.Linear(4, 2)

    def forward(self, tokens):
        return self.head(self.embedding(tokens).tanh())


def build(kind):
    if kind == "tokens":
        return Tokens()
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2 if kind == "classes" else 1))


def trained(kind, data, method, **options):
    ensemble = shoal.Ensemble.init(lambda: build(kind).double(), members=M, seed=2)
    likelihood = likelihoods.Categorical(ignore_index=-100) if kind == "tokens" else None
    return shoal.fit(
        ensemble,
        data,
        method=method,
        strength=30.0 if method != "ensemble" else None,
        likelihood=likelihood,
        optimizer="sgd",
        lr=0.05,
        steps=4,
        batch_size=100,
        precision="float64",
        progress=False,
        **options,
    )


METHODS = ["ensemble", "kde", "svgd", "f-kde", "f-sge", "f-svgd", "forde-identity"]


@pytest.mark.parametrize("kind", ["classes", "regression", "tokens"])
@pytest.mark.parametrize("method", METHODS)
def test_a_whole_weight_equals_repetition(kind, method):
    x, y = points(kind)
    rows = torch.arange(N).repeat_interleave(REPEATS)
    weighted = trained(kind, (x, y), method, sample_weight=REPEATS)
    repeated = trained(kind, (x[rows], y[rows]), method)
    for name, tensor in repeated.ensemble.weights.items():
        torch.testing.assert_close(weighted.ensemble.weights[name], tensor, atol=1e-10, rtol=1e-10)
    assert weighted.history[-1]["loss"] == pytest.approx(repeated.history[-1]["loss"], abs=1e-10)


@pytest.mark.parametrize("method", METHODS)
def test_a_weight_of_zero_equals_absence(method):
    x, y = points("classes")
    weight = torch.ones(N)
    weight[3:6] = 0
    kept = weight > 0
    weighted = trained("classes", (x, y, weight), method)
    absent = trained("classes", (x[kept], y[kept]), method)
    for name, tensor in absent.ensemble.weights.items():
        torch.testing.assert_close(weighted.ensemble.weights[name], tensor, atol=1e-10, rtol=1e-10)


def test_weights_are_part_of_the_data_of_a_run(tmp_path):
    x, y = points("classes")
    trained("classes", (x, y, REPEATS), "kde", out=tmp_path)
    trained("classes", (x, y, REPEATS), "kde", out=tmp_path, resume=True)
    with pytest.raises(shoal.ConfigError, match="other data"):
        trained("classes", (x, y, REPEATS.flip(0)), "kde", out=tmp_path, resume=True)


def test_a_loader_gives_weights_with_its_batches():
    x, y = points("classes")
    loaded = trained("classes", [(x, y, REPEATS)], "f-kde")
    whole = trained("classes", (x, y), "f-kde", sample_weight=REPEATS)
    for name, tensor in whole.ensemble.weights.items():
        torch.testing.assert_close(loaded.ensemble.weights[name], tensor, atol=1e-10, rtol=1e-10)
    with pytest.raises(shoal.DataError, match="gives its own weights"):
        trained("classes", [(x, y)], "f-kde", sample_weight=REPEATS)


@pytest.mark.parametrize("kind", ["classes", "regression", "tokens"])
def test_scores_weigh_points_as_repetition_does(kind):
    x, y = points(kind)
    run = trained(kind, (x, y), "ensemble")
    rows = torch.arange(N).repeat_interleave(REPEATS)
    repeated = shoal.evaluate(run, (x[rows], y[rows]), keep=False).test
    weighted = shoal.evaluate(run, (x, y, REPEATS), keep=False).test
    assert weighted == pytest.approx(repeated, abs=1e-10)
    third = shoal.evaluate(shoal.predict(run, x), y, sample_weight=REPEATS.double() / 3)
    assert {"accuracy", "nll"} & third.keys() and third.keys() < repeated.keys()
    for name, value in third.items():
        assert value == pytest.approx(repeated[name], abs=1e-10), name


def test_the_mean_of_a_loss_cannot_be_weighted():
    x, y = points("regression")
    mean = likelihoods.Custom(lambda f, t: (f[:, 0] - t).abs().mean())
    with pytest.raises(shoal.ConfigError, match="one number per target"):
        shoal.fit(
            shoal.Ensemble.init(lambda: build("regression"), 2),
            (x, y, REPEATS),
            likelihood=mean,
            steps=1,
            progress=False,
        )


@pytest.mark.parametrize("method", METHODS)
def test_a_mask_of_targets_equals_ignored_labels(method):
    x, y = points("tokens")
    mask = y != -100
    masked = trained("tokens", (x, y.where(mask, 1), mask), method)
    ignored = trained("tokens", (x, y), method)
    for name, tensor in ignored.ensemble.weights.items():
        torch.testing.assert_close(masked.ensemble.weights[name], tensor, atol=1e-10, rtol=1e-10)
    scores = shoal.evaluate(masked, (x, y.where(mask, 1), mask), keep=False).test
    assert scores == pytest.approx(shoal.evaluate(ignored, (x, y), keep=False).test, abs=1e-10)


def test_masked_numbers_do_not_count():
    """Real targets of tokens: what stands under the mask changes nothing, units included."""

    def run(fill):
        x, _ = points("tokens")
        y = torch.randn(N, 4, generator=torch.manual_seed(5), dtype=torch.float64)
        mask = torch.rand(N, 4, generator=torch.manual_seed(6)) < 0.7
        ensemble = shoal.Ensemble.init(lambda: Numbers().double(), members=M)
        data = (x, y.where(mask, fill), mask)
        return shoal.fit(ensemble, data, steps=3, batch_size=100, progress=False), data

    (one, data), (other, _) = run(0.0), run(7.0)
    for name, tensor in one.ensemble.weights.items():
        torch.testing.assert_close(other.ensemble.weights[name], tensor, atol=1e-10, rtol=1e-10)
    assert one.likelihood.noise_std == pytest.approx(other.likelihood.noise_std)
    with pytest.raises(shoal.DataError, match="one per target"):
        shoal.fit(one.ensemble, (data[0], data[1], data[2][:, :2]), steps=1, progress=False)


class Numbers(Tokens):
    """One number per token."""

    def forward(self, tokens):
        return super().forward(tokens)[..., :1]

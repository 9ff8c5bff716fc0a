"""Chains are judged by their predictions: autoregressions with known answers, and runs of draws."""

import math

import pytest
import torch
from small_runs import assert_one_sentence
from torch import nn

import shoal
from shoal.analysis.chains import FEWEST, ChainDiagnostics, Convergence, diagnostics_of
from shoal.core.errors import ConfigError

CHAINS, DRAWS, POINTS = 5, 400, 10


def autoregression(coefficient, seed=0, chains=CHAINS, draws=DRAWS):
    """Stationary chains of POINTS quantities [C, K, Q] with variance 1."""
    random = torch.Generator().manual_seed(seed)
    noise = torch.randn(chains, draws, POINTS, generator=random, dtype=torch.float64)
    values = noise.clone()
    for t in range(1, draws):
        fresh = (1 - coefficient**2) ** 0.5 * noise[:, t]
        values[:, t] = coefficient * values[:, t - 1] + fresh
    return values


def judged(values, scores=None, **facts):
    scores = autoregression(0.5, seed=1) if scores is None else scores
    return diagnostics_of(values, scores, "toy", **facts)


def flagged(found):
    return {finding.name for finding in found.findings if finding.good is False}


def test_sound_chains_have_the_effective_draws_of_their_autoregression():
    found = judged(autoregression(0.5))
    expected = CHAINS * DRAWS * (1 - 0.5) / (1 + 0.5)
    assert float(found.predictions.effective_of_all.mean()) == pytest.approx(expected, rel=0.15)
    assert float(found.predictions.effective.mean()) == pytest.approx(expected / CHAINS, rel=0.15)
    assert found.trusted and not found.warnings and "no reason" in found.verdict
    assert found.correlation[:, 1].mean() == pytest.approx(0.5, abs=0.05)
    assert found.between < 0.02 and found.predictions.rhat_between.max() < 1.03
    assert all(finding.sentence.endswith(".") for finding in found.findings)


def test_modes_of_their_own_are_told_and_not_judged():
    """Means 0, 3, 6, ... at variance 1: chains differ, and each agrees with itself."""
    shifts = 3.0 * torch.arange(CHAINS)[:, None, None]
    found = judged(autoregression(0.5) + shifts)
    variance = float((3.0 * torch.arange(CHAINS)).var())
    assert found.between == pytest.approx(variance / (1 + variance), abs=0.02)
    assert found.predictions.rhat_between.min() > 2 and found.rhat.max() < 1.1
    assert found.trusted and "modes of their own" in " ".join(found.sentences)


def test_slow_chains_have_few_effective_draws():
    found = judged(autoregression(0.99))
    assert {"R-hat within chains", "effective draws"} <= flagged(found)
    assert "R-hat within chains" in found.verdict


@pytest.mark.parametrize("scale", [0.0, 0.01])
def test_a_stuck_chain_is_named(scale):
    values = autoregression(0.5)
    values[2] = values[2, :1] + scale * values[2]
    found = judged(values)
    assert found.stuck.tolist() == [False, False, True, False, False]
    assert flagged(found) == {"stuck chains"} and found.state(2) == "stuck"
    assert any("Chain 2 is stuck" in sentence for sentence in found.warnings)


def test_a_chain_alone_is_stuck_if_it_repeats_itself():
    values = autoregression(0.0, chains=1)
    assert not judged(values, values).stuck.any()
    repeated = values[:, ::4].repeat_interleave(4, 1)
    assert judged(repeated, values).stuck.all()


def test_a_lost_chain_is_named():
    scores = autoregression(0.5, seed=1)
    scores[4] -= 2.0
    found = judged(autoregression(0.5), scores)
    assert found.lost.tolist() == [False, False, False, False, True]
    assert flagged(found) == {"lost chains"} and "nats above the median" in found.warnings[0]
    assert float(found.gap[4]) == pytest.approx(2.0, abs=0.1)


def test_a_drifting_chain_is_named():
    """The NLL of chain 1 falls by three standard deviations of a draw's mean NLL."""
    scores = autoregression(0.5, seed=1)
    fall = 3 * float(scores.mean(-1).std())
    scores[1] += torch.linspace(0, fall, DRAWS)[:, None]
    found = judged(autoregression(0.5), scores)
    assert (found.drift.abs() > 4).tolist() == [False, True, False, False, False]
    assert found.drift[1] < 0 and any("Chain 1 drifts" in text for text in found.warnings)


def test_sound_chains_are_seldom_accused_of_drift():
    chains = autoregression(0.8, chains=60, draws=200)[..., :1]
    assert int((judged(chains, chains).drift.abs() > 4).sum()) <= 2


def test_a_chain_that_diverged_leaves_the_others_judged():
    values = autoregression(0.5)
    values[3, 200:] = math.nan
    found = judged(values, autoregression(0.5, seed=1) + 0 * values)
    assert found.diverged.tolist() == [False, False, False, True, False]
    assert found.state(3) == "diverged" and "Chain 3 diverged" in found.warnings[0]
    assert found.predictions.rhat_between.isfinite().all() and flagged(found) == {"diverged chains"}
    assert "diverged" in repr(found)


def test_the_samplers_own_numbers_are_judged():
    refused = torch.tensor([0.0, 0.1, 0.0, 0.0, 0.0])
    energy = torch.tensor([0.1, 0.1, 0.1, 1.1, 0.1])
    accepted = torch.tensor([0.8, 0.8, 0.4, 0.8, 0.8])
    facts = {"refused": refused, "energy_error": energy, "wanted": 0.1, "accepted": accepted}
    found = judged(autoregression(0.5), **facts)
    assert flagged(found) == {"refused steps", "energy error", "acceptance"}
    assert "Chain 2 accepts as few as 40 %" in " ".join(found.warnings)
    assert "Chain 1 refuses up to 10 %" in " ".join(found.warnings)
    assert "chain 3" in " ".join(found.warnings)


def test_what_is_stored_is_read_again():
    one = judged(autoregression(0.5), refused=torch.zeros(CHAINS))
    other = ChainDiagnostics.read("toy", one.stored())
    assert other is not None and repr(other) == repr(one)
    assert ChainDiagnostics.read("toy", {}) is None


def test_convergence_of_chains_that_all_diverged_is_unknown():
    found = Convergence.of(torch.full((2, 20, 3), math.nan))
    assert found.rhat.isnan().all() and found.rhat_between.isnan().all()


def drawn(likelihood, y, outputs=1, builds=None, draws=16):
    x = torch.randn(len(y), 3, generator=torch.Generator().manual_seed(0))
    ensemble = shoal.Ensemble.init(builds or [(lambda: nn.Linear(3, outputs), 3)])
    options = {"likelihood": likelihood, "method": "ensemble", "progress": False}
    run = shoal.fit(ensemble, (x, y), steps=3, **options)
    return shoal.draw(run, draws=draws, warmup=20, thin=1, progress=False), (x, y)


def test_predictions_of_a_run_are_those_of_its_chains():
    """Member k C + c of each architecture is draw k of chain c."""
    builds = [
        (lambda: nn.Linear(3, 1), 2),
        (lambda: nn.Sequential(nn.Linear(3, 2), nn.Tanh(), nn.Linear(2, 1)), 3),
    ]
    y = torch.linspace(-1, 1, 30)
    run, (x, _) = drawn(shoal.likelihoods.Gaussian(0.5), y, builds=builds)
    found = run.chains((x, y), points=30)
    assert (found.chains, found.draws, found.points) == (5, 16, 30)
    log_prob = run.likelihood.log_prob(shoal.predict(run, x).members, y[:, None]).mean(-1)
    first = log_prob[: 2 * 16].reshape(16, 2).T
    second = log_prob[2 * 16 :].reshape(16, 3).T
    torch.testing.assert_close(-found.nll.float(), torch.cat([first, second]))
    assert found.refused.tolist() == pytest.approx(run.provenance["draws"]["refused"])
    assert found.wanted == shoal.samplers.MCLMC().energy_error
    assert list(found.to_pandas()["state"]) == [found.state(c) for c in range(5)]
    assert "Can these draws be trusted?" in found._repr_html_()


@pytest.mark.parametrize(
    ("likelihood", "outputs", "y"),
    [
        ("categorical", 3, torch.arange(40) % 3),
        ("bernoulli", 1, torch.arange(40) % 2),
        ("heteroscedastic", 2, torch.linspace(0, 1, 40)),
        ("poisson", 1, torch.arange(40) % 4),
    ],
)
def test_every_kind_of_target_is_followed(likelihood, outputs, y):
    run, data = drawn(likelihood, y, outputs)
    found = run.chains(data, points=10)
    assert found.predictions.rhat.shape == (3, 10) and found.nll.isfinite().all()
    nll = shoal.evaluate(shoal.predict(run, data[0]), y)["nll"]
    assert float(run.chains(data).nll.mean()) >= nll - 1e-4  # a mixture is no worse than its mean


def test_runs_without_enough_draws_are_refused():
    run, data = drawn("gaussian", torch.linspace(0, 1, 20), draws=FEWEST - 1)
    with pytest.raises(ConfigError, match="from 12 draws on") as error:
        run.chains(data)
    assert_one_sentence(error.value)
    assert not shoal.evaluate(run, data).split_samples("chains")
    del run.config["draws"]
    with pytest.raises(ConfigError, match="are no draws") as error:
        run.chains(data)
    assert_one_sentence(error.value)

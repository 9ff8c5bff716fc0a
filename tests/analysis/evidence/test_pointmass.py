"""Theorems about point masses: bounds, ties, two members in closed form."""

import csv
import math
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shoal.analysis.evidence import pointmass as pm
from shoal.analysis.evidence.prior_comparison import MAXIMUM
from shoal.core.errors import DataError

# A busy machine is slow, not wrong.
PATIENT = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
ANY = st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=20).map(
    lambda values: torch.tensor(values, dtype=torch.float64)
)


@PATIENT
@given(ANY)
def test_evidence_is_within_log_m_of_the_best_member(likelihoods):
    low, high = pm.bounds(likelihoods)
    assert high == likelihoods.max() and high - low == pytest.approx(math.log(len(likelihoods)))
    slack = 1e-9 * (1 + abs(low))
    assert low - slack <= pm.log_evidence(likelihoods) <= high + slack


@PATIENT
@given(ANY)
def test_no_prior_on_the_members_beats_the_best_of_them(likelihoods):
    """m(pi) <= L*: maximum marginal likelihood puts all mass on the best."""
    masses = torch.linspace(1, 3, len(likelihoods), dtype=torch.float64).softmax(0)
    best = float(likelihoods.max())
    assert pm.log_evidence(likelihoods, masses) <= best + 1e-9 * (1 + abs(best))
    all_on_best = torch.nn.functional.one_hot(likelihoods.argmax(), len(likelihoods))
    assert pm.log_evidence(likelihoods, all_on_best) == pytest.approx(best)


@PATIENT
@given(st.floats(-1e5, 1e5), st.integers(1, 30))
def test_equal_likelihoods_have_an_exactly_uniform_posterior(value, members):
    likelihoods = torch.full((members,), value, dtype=torch.float64)
    weights = pm.posterior_weights(likelihoods)
    assert torch.allclose(weights, torch.full_like(weights, 1 / members), rtol=1e-14, atol=0)
    assert pm.effective_number(weights) == pytest.approx(members)
    assert pm.log_evidence(likelihoods) == pytest.approx(value, abs=1e-9)
    assert pm.half_temperature(likelihoods) == 0 and pm.ties(likelihoods) == members


def test_two_members_in_closed_form():
    """Bernoulli data, 7 heads of 10, members that believe in 0.5 and 0.7."""
    beliefs = torch.tensor([0.5, 0.7], dtype=torch.float64)
    likelihoods = 7 * beliefs.log() + 3 * (1 - beliefs).log()
    odds = (0.7 / 0.5) ** 7 * (0.3 / 0.5) ** 3
    weights = pm.posterior_weights(likelihoods)
    assert weights.tolist() == pytest.approx([1 / (1 + odds), odds / (1 + odds)])
    evidence = math.log((0.5**10 + 0.7**7 * 0.3**3) / 2)
    assert pm.log_evidence(likelihoods) == pytest.approx(evidence)
    squares = (1 + odds**2) / (1 + odds) ** 2
    assert pm.effective_number(weights) == pytest.approx(1 / squares)
    assert pm.spread(likelihoods) == pytest.approx(math.log(odds))


@PATIENT
@given(ANY)
def test_uniform_averaging_is_exact_under_the_implied_prior(likelihoods):
    likelihoods = likelihoods / 2e4  # masses that double precision can hold
    prior = pm.implied_prior(likelihoods)
    weights = pm.posterior_weights(likelihoods, prior)
    assert torch.allclose(weights, torch.full_like(weights, 1 / len(weights)), rtol=1e-9)
    harmonic = math.log(len(likelihoods)) - float((-likelihoods).logsumexp(0))
    assert pm.log_evidence(likelihoods, prior) == pytest.approx(harmonic, abs=1e-9)


def test_the_temperature_at_which_half_count_in_closed_form():
    """One best member and three below by D: (1 + 3 r)² / (1 + 3 r²) = 2 for r = exp(-D / T)."""
    gap = 50.0
    likelihoods = torch.tensor([0.0, -gap, -gap, -gap])
    ratio = (-3 + math.sqrt(12)) / 3
    assert pm.half_temperature(likelihoods) == pytest.approx(gap / -math.log(ratio))


def test_a_gap_of_a_thousandth_of_a_nat_a_point_decides_everything():
    """N = 50,000 points: what looks like a tie is 50 nats."""
    per_point = torch.tensor([-0.300, -0.301, -0.302], dtype=torch.float64)
    weights = pm.posterior_weights(50_000 * per_point)
    assert pm.effective_number(weights) == pytest.approx(1, abs=1e-20)
    assert pm.ties(50_000 * per_point) == 1


@pytest.mark.parametrize("bad", [torch.zeros(0), torch.zeros(2, 2), torch.tensor([math.nan])])
def test_what_is_no_likelihood_is_refused(bad):
    with pytest.raises(DataError, match="one log-likelihood per member"):
        pm.log_evidence(bad)


def test_members_that_all_exclude_the_data_are_refused():
    with pytest.raises(DataError, match="probability 0"):
        pm.posterior_weights(torch.full((3,), -math.inf))


def test_the_study_obeys_the_theorem():
    """log ∫ L dπ ≤ max log L for the flow, whose number is a lower bound of its evidence."""
    folder = Path(__file__).parents[3] / "docs/results/evidence"
    found = {}
    for name in ("raw.csv", "maximum.csv"):
        with (folder / name).open() as file:
            for row in csv.DictReader(file):
                if row["method"] == "ensemble" and row["metric"].endswith("/log evidence"):
                    found[name, row["data"], row["seed"], row["metric"]] = float(row["value"])
    polished = [key for key in found if MAXIMUM in key[3]]
    for _, data, seed, metric in polished:
        most = found["maximum.csv", data, seed, metric]
        trained = "prior/point masses/log evidence"
        assert most > found["raw.csv", data, seed, "prior/flow, last layer/log evidence"]
        assert most > found["raw.csv", data, seed, trained]
        # the ensembles that were trained again are those of the study
        assert found["maximum.csv", data, seed, trained] == found["raw.csv", data, seed, trained]
    assert len(polished) >= 5

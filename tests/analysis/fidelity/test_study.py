"""The contestants, the study's bookkeeping, and the law of the score."""

import math

import pytest
import torch

from shoal.analysis.fidelity import problems, study
from shoal.analysis.fidelity import reference as references
from shoal.analysis.fidelity import score_shrinkage as law
from shoal.analysis.fidelity.distances import covariance_error, ksd2, mean_error, squared_width
from shoal.analysis.fidelity.study import (
    ALWAYS,
    EVERY,
    QUICK,
    Budget,
    Study,
    contestant,
    discrepancy,
    summarise,
)
from shoal.core.errors import ConfigError
from shoal.interaction.spaces import LastLayer


@pytest.mark.parametrize("label", sorted({*EVERY, *QUICK}))
def test_every_contestant_is_what_it_says(label):
    method = contestant(label)
    assert method.name == label.partition(":")[0]
    assert method.legacy == (":legacy" in label)
    assert method.calibrated == (":calibrated" in label)


def test_a_contestant_in_another_space():
    assert contestant("kde:calibrated:last-layer").repulsion.space == LastLayer()


@pytest.mark.parametrize(
    ("label", "sentence"),
    [
        ("kde:best", "NAME:legacy or NAME:calibrated"),
        ("kde:calibrated:cellar", "a space \\(layerwise"),
        ("f-kde:calibrated:layerwise", "only weight-space methods"),
        ("kdee:legacy", "did you mean 'kde'"),
    ],
)
def test_senseless_contestants_are_refused(label, sentence):
    with pytest.raises(ConfigError, match=sentence):
        contestant(label)


def test_a_study_goes_on_where_it_stopped():
    study = Study(("linear",), ("ensemble",), 2, Budget(3, 2, 0.1))
    told = []
    rows = study.run(told.append)
    assert len(rows) == study.size == len(told) == 4
    again = study.run(lambda row: pytest.fail("made again"), done=rows)
    assert again == rows
    summary = summarise(rows)
    assert set(summary) == {("linear", ALWAYS), ("linear", "ensemble")}
    mean, error = summary["linear", "ensemble"]["tv"]
    values = [row.distances["tv"] for row in rows if row.method == "ensemble"]
    assert mean == pytest.approx(sum(values) / 2)
    assert error == pytest.approx(abs(values[0] - values[1]) / 2)


def test_the_law_of_the_score():
    """Within 4 % from d = 1000 on, as published and calibrated."""
    for point in law.measure(members=20, dimensions=(1000, 3000)):
        assert point.share == pytest.approx(point.predicted, rel=0.04)


def test_one_width_compares_all_methods():
    problem = problems.make("linear")
    reference = references.load(problem)
    flat = reference.draws[:20]
    for spread in (1.0, 0.1):
        own = spread * flat.double()
        found = discrepancy(problem, reference, own)
        (scores,) = torch.autograd.grad(problem.log_density(own.requires_grad_()).sum(), own)
        wide = squared_width(reference.draws[:1000])
        target = ksd2(own.detach(), scores, wide) / flat.shape[1]
        assert math.isclose(found, target, rel_tol=1e-9)
        assert not math.isclose(found, ksd2(own.detach(), scores) / flat.shape[1], rel_tol=1e-3)


def test_a_sampler_is_a_contestant_whose_draws_have_the_posteriors_moments(monkeypatch):
    """Chains of the linear problem against its closed form; row k M + c is draw k of chain c."""
    monkeypatch.setattr("shoal.analysis.fidelity.study._USUAL", (300, 5))
    problem = problems.make("linear")
    flat = study.train(problem, "mclmc", Budget(8, 60), 0)
    assert flat.shape == (8 * study.DRAWS, 5)
    mean, covariance = references.moments(problem)
    assert mean_error(flat, mean, covariance) < 0.2
    assert covariance_error(flat, covariance) < 0.6  # 1 for members at the mode
    study.check_label("sgld")
    with pytest.raises(ConfigError, match="NAME:legacy"):
        study.check_label("kde:best")

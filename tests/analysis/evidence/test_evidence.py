"""The evidence of whole runs: theorems, duplicates, storage, and predictions weighed by it."""

import copy
import json
import math
from dataclasses import asdict, replace

import pytest
import torch
from small_runs import CLASSES, assert_one_sentence, plain, points, quick, shoal_of
from torch import nn

import shoal
from shoal.analysis.evidence import evidence, load_evidence, member_weights, save_evidence
from shoal.analysis.evidence.compute_evidence import degeneracy, gradient_norms, merged
from shoal.analysis.evidence.members import log_likelihoods, parts_of
from shoal.analysis.evidence.prior_comparison import MAXIMUM
from shoal.core.errors import CheckpointCorrupt, ConfigError, DataError
from shoal.core.storage.files import sealed, write_json
from shoal.data.dataset import Dataset, Split
from shoal.inference.ensemble import Ensemble
from shoal.inference.likelihoods import Gaussian, HomoscedasticGaussian
from shoal.inference.posterior import Posterior
from shoal.inference.priors import Gaussian as GaussianPrior
from shoal.prediction import Predictive


def dataset():
    return Dataset("points", Split(*points(60)), test=Split(*points(40, seed=1)))


@pytest.fixture(scope="module")
def run():
    return quick(data=points(60), epochs=20, lr=1e-2)


@pytest.fixture(scope="module")
def told(run):
    return evidence(run, dataset(), flow_steps=3)


def permuted(module, seed):
    """The same network with its hidden units in another order."""
    order = torch.randperm(8, generator=torch.Generator().manual_seed(seed))
    other = copy.deepcopy(module)
    with torch.no_grad():
        other[0].weight.copy_(module[0].weight[order])
        other[0].bias.copy_(module[0].bias[order])
        other[2].weight.copy_(module[2].weight[:, order])
    return other


@pytest.fixture
def mirrored(run):
    """A run of four members that are one network, its units shuffled."""
    first = run.ensemble.member(0).double()
    members = [first, *(permuted(first, seed) for seed in (1, 2, 3))]
    ensemble = Ensemble.init(lambda: members[0], members=1).to(dtype=torch.float64)
    state = {
        name: torch.stack([dict(m.named_parameters())[name] for m in members])
        for name in ensemble.weights
    }
    whole = Ensemble.init(plain, 4).to(dtype=torch.float64)
    tensors = {f"weights/{name}": t.detach() for name, t in state.items()}
    whole.load_state({"alive": torch.ones(4, dtype=torch.bool), **tensors})
    return replace(run, ensemble=whole)


def test_permuted_hidden_units_tie_exactly_and_are_one_function(mirrored):
    told = evidence(mirrored, dataset(), priors=False)
    assert told.spread < 1e-9 * told.points
    assert told.weightings["posterior"].weights == pytest.approx([0.25] * 4, rel=1e-9)
    assert told.weightings["posterior"].effective == pytest.approx(4)
    assert len(told.in_weights) == 4, "other weights"
    assert told.in_function == [[0, 1, 2, 3]], "the same function"
    assert told.distinct == pytest.approx(1)
    assert told.weightings["posterior"].total_variation == pytest.approx(0, abs=1e-12)


def test_copies_are_duplicates_in_weights_and_in_function(run):
    double = shoal_of(members=4)
    kept = run.ensemble.state
    index = torch.tensor([0, 1, 0, 2])
    double.load_state({name: tensor[index].detach() for name, tensor in kept.items()})
    told = evidence(replace(run, ensemble=double), dataset(), priors=False)
    assert told.in_weights == told.in_function == [[0, 2], [1], [3]]
    assert told.distinct == pytest.approx(1 / (0.5**2 + 2 * 0.25**2))


def test_merged_point_masses_add_their_weights():
    weights = torch.tensor([0.1, 0.2, 0.3, 0.4])
    torch.testing.assert_close(merged(weights, [[0, 2], [1], [3]]), torch.tensor([0.4, 0.2, 0.4]))


def test_members_are_grouped_by_chains_of_neighbours():
    """Regression far apart and near: N(0), N(1e-4), N(5)."""
    means = torch.tensor([0.0, 1e-4, 5.0]).reshape(3, 1, 1)
    assert degeneracy(Predictive(means, Gaussian(1.0))).in_function == [[0, 1], [2]]


def test_the_evidence_obeys_its_bounds_and_is_the_mean_likelihood(run, told):
    each = log_likelihoods(run, Split(*points(60)))
    x, y = points(60)
    members = [run.ensemble.member(i).requires_grad_(False) for i in range(3)]
    literal = [
        float(nn.functional.cross_entropy(member(x).double(), y, reduction="sum"))
        for member in members
    ]
    assert (-each).tolist() == pytest.approx(literal, rel=1e-5)
    assert told.lower <= told.log_evidence <= told.upper == pytest.approx(float(each.max()))
    assert math.exp(told.log_evidence - told.upper) == pytest.approx(
        float((each - each.max()).exp().mean())
    )


def test_no_prior_has_more_evidence_than_its_likelihood_allows(told):
    """log p(D) <= log L* for any prior on the last layer, and classes have log L <= 0."""
    most = next(prior for prior in told.learned_priors if prior.name == MAXIMUM).log_evidence
    assert most <= 0 and told.learned_priors[0].name == MAXIMUM
    assert all(prior.log_evidence <= most for prior in told.learned_priors)
    names = {result.name for result in told.learned_priors}
    assert {"point masses", "Gaussians at zero, last layer"} <= names
    for result in told.learned_priors:
        assert result.log_evidence <= 1e-6 and result.nll > 0
    wide = [result for result in told.learned_priors if "at zero" in result.name]
    point_masses = next(result for result in told.learned_priors if result.name == "point masses")
    assert all(result.log_evidence < point_masses.log_evidence for result in wide)
    assert point_masses.nll == pytest.approx(told.weightings["uniform"].nll, abs=1e-6)
    assert point_masses.nll_posterior == pytest.approx(told.weightings["posterior"].nll, abs=1e-6)


def test_uniform_averaging_is_what_predict_does(run, told):
    test = parts_of(dataset()).test
    assert test is not None and told.evaluated_on == "the other half of the test data"
    scores = shoal.evaluate(shoal.predict(run, test.x), test.y)
    assert told.weightings["uniform"].nll == pytest.approx(scores["nll"], rel=1e-5)


def test_gradients_vanish_at_the_maximum_of_the_posterior():
    """Ridge regression: the closed-form solution has no gradient, another point the literal one."""
    torch.manual_seed(0)
    x, y = torch.randn(30, 2, dtype=torch.float64), torch.randn(30, 1, dtype=torch.float64)
    ensemble = Ensemble.init(lambda: nn.Linear(2, 1, bias=False), 2).to(dtype=torch.float64)
    solution = torch.linalg.solve(x.T @ x / 0.25 + torch.eye(2), x.T @ y / 0.25)
    with torch.no_grad():
        ensemble.weights["weight"][0] = solution.T
    posterior = Posterior(Gaussian(0.5), GaussianPrior(1.0), 30)
    norms = gradient_norms(ensemble, posterior, Split(x, y), batch_size=7)
    w = ensemble.weights["weight"][1].detach().T
    literal = (x.T @ (y - x @ w) / 0.25 - w).norm() / 30
    assert norms[0] < 1e-12 and norms[1] == pytest.approx(float(literal))


def test_dead_members_have_no_weight(run):
    other = copy.deepcopy(run.ensemble)
    other.alive[1] = False
    told = evidence(replace(run, ensemble=other), dataset(), priors=False)
    assert told.finite_members == [0, 2] and told.weightings["posterior"].weights[1] == 0
    assert told.lower == pytest.approx(told.upper - math.log(2))
    with pytest.warns(shoal.ShoalWarning, match="left out"):
        pred = shoal.predict(
            replace(run, ensemble=other), points()[0], weights="posterior", data=dataset()
        )
    assert pred.size == 2


# Parts of the data


def test_validation_data_fit_the_stacking_weights_and_the_whole_test_judges():
    parts = parts_of(replace(dataset(), validation=Split(*points(20, seed=3))))
    assert parts.held_out_words == "the validation data"
    assert parts.held_out is not None and parts.test is not None
    assert len(parts.held_out) == 20 and len(parts.test) == 40


def test_without_validation_the_test_is_halved_and_no_point_does_both():
    parts = parts_of(dataset())
    assert parts.held_out is not None and parts.test is not None
    together = torch.stack([parts.held_out.x, parts.test.x], 1).flatten(0, 1)
    torch.testing.assert_close(together, points(40, seed=1)[0])


def test_training_data_alone_give_everything_but_a_judgement(run):
    told = evidence(run, points(60), flow_steps=0)
    assert "stacking" not in told.weightings and math.isnan(told.weightings["uniform"].nll)
    assert math.isnan(told.learned_priors[0].nll) and told.evaluated_on == ""


def test_targets_are_needed(run):
    with pytest.raises(DataError) as error:
        evidence(run, points(60)[0])
    assert_one_sentence(error.value, "targets of the training data")


# Richer priors that cannot be had


def test_a_network_that_does_not_end_linearly_leaves_out_what_needs_it():
    def build():
        return nn.Sequential(nn.Linear(3, CLASSES), nn.Softplus())

    told = evidence(quick(build), dataset(), flow_steps=0)
    assert told.missing.keys() == {
        "point masses at the maximum",
        "Gaussians on the last layer",
        "a flow on the last layer",
    }
    assert any("diagonal" in result.name for result in told.learned_priors)


# Weighted predictions


def test_predictions_weighed_by_name_are_the_literal_mixture(run, told):
    x = points(10, seed=5)[0]
    each = shoal.predict(run, x).member_probs()
    for name in ("posterior", "stacking"):
        weights = torch.tensor(told.weightings[name].weights)
        pred = shoal.predict(run, x, weights=name, data=dataset())
        torch.testing.assert_close(pred.probs, torch.einsum("m,mbc->bc", weights, each))
        given = shoal.predict(run, x, weights=weights.tolist())
        torch.testing.assert_close(given.probs, pred.probs)


def test_uniform_weights_give_the_same_bits(run):
    x = points(10, seed=5)[0]
    before, y = shoal.predict(run, x), points(10, seed=5)[1]
    for weights in ("uniform", [1 / 3] * 3, torch.full((3,), 1 / 3)):
        pred = shoal.predict(run, x, weights=weights)
        for name in ("entropy", "mutual_information", "disagreement", "aleatoric", "confidence"):
            assert torch.equal(getattr(pred, name)(), getattr(before, name)())
        assert torch.equal(pred.mean, before.mean) and torch.equal(pred.variance, before.variance)
        assert torch.equal(pred.log_prob(y), before.log_prob(y))


def test_kept_evidence_is_used_until_the_run_goes_on(run, told, tmp_path):
    kept = replace(run, folder=tmp_path)
    marked = replace(told.weightings["posterior"], weights=[0.5, 0.5, 0.0])
    save_evidence(replace(told, weightings=told.weightings | {"posterior": marked}), tmp_path)
    found = member_weights(kept, "posterior")
    assert found is not None and found.tolist() == [0.5, 0.5, 0.0]
    later = replace(kept, history=[*run.history, {"step": 10_000}], given=None)
    with pytest.raises(ConfigError, match="cannot be loaded"):
        member_weights(later, "posterior")
    found = member_weights(later, "posterior", dataset())
    assert found is not None and found.tolist() == pytest.approx(
        told.weightings["posterior"].weights
    )


@pytest.mark.parametrize(
    ("options", "kind", "words"),
    [
        ({"weights": "postrior"}, ConfigError, "did you mean 'posterior'?"),
        ({"weights": "posterior"}, ConfigError, "pass data=(x, y)"),
        ({"weights": "stacking", "data": points()}, DataError, "held-out data"),
        ({"weights": [0.5, 0.5]}, DataError, "each of the 3 members"),
        ({"weights": [0.5, 0.5, 0.5]}, DataError, "sum 1"),
    ],
)
def test_weights_that_cannot_be_had_are_refused(run, options, kind, words):
    with pytest.raises(kind) as error:
        shoal.predict(replace(run, given=None), points()[0], **options)
    assert_one_sentence(error.value, words)


def test_an_ensemble_alone_has_no_posterior(run):
    with pytest.raises(ConfigError) as error:
        shoal.predict(run.ensemble, points()[0], weights="posterior")
    assert_one_sentence(error.value, "need a run")
    pred = shoal.predict(run.ensemble, points()[0], weights=[1.0, 0.0, 0.0])
    torch.testing.assert_close(pred.probs, pred.member_probs()[0])


def test_weight_on_the_dead_alone_is_refused(run):
    other = copy.deepcopy(run.ensemble)
    other.alive[0] = False
    with pytest.warns(shoal.ShoalWarning), pytest.raises(DataError, match="only diverged members"):
        shoal.predict(other, points()[0], weights=[1.0, 0.0, 0.0])


# Storage


def test_evidence_is_read_as_it_was_written(told, tmp_path):
    save_evidence(told, tmp_path)
    found = load_evidence(tmp_path)
    assert found is not None
    assert json.dumps(asdict(found)) == json.dumps(asdict(told))
    assert load_evidence(tmp_path / "elsewhere") is None


def test_evidence_stored_under_older_names_is_read(told, tmp_path):
    table = asdict(told)
    for old, new in (
        ("rungs", "learned_priors"),
        ("judged", "evaluated_on"),
        ("living", "finite_members"),
    ):
        table[old] = table.pop(new)
    write_json(tmp_path / "evidence.json", sealed({**table, "run_id": None}))
    found = load_evidence(tmp_path)
    assert found is not None and json.dumps(asdict(found)) == json.dumps(asdict(told))


def test_a_file_of_something_else_is_found_out(tmp_path):
    (tmp_path / "evidence.json").write_text('{"learned_priors": [], "weightings": {}, "what": 1}')
    with pytest.raises(CheckpointCorrupt) as error:
        load_evidence(tmp_path)
    assert_one_sentence(error.value, "type: shoal evidence")


def test_no_living_member_is_refused(run):
    other = copy.deepcopy(run.ensemble)
    other.alive[:] = False
    with pytest.raises(DataError) as error:
        evidence(replace(run, ensemble=other), dataset())
    assert_one_sentence(error.value, "all members diverged")


def test_regression_runs_have_evidence_too():
    pytest.importorskip("zuko", reason="the flow is made of zuko's couplings")
    x, _ = points(40)
    y = x[:, :1] ** 2
    run = quick(
        lambda: nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 1)), (x, y), epochs=5
    )
    data = Dataset("line", Split(x, y), test=Split(x[:10], y[:10]))
    told = evidence(run, data, flow_steps=2)
    assert isinstance(run.likelihood, HomoscedasticGaussian)
    assert len(told.learned_priors) == 7 and told.missing == {}
    assert 0 <= told.weightings["posterior"].total_variation <= 1
    torch.manual_seed(1)
    assert evidence(run, data, flow_steps=2).learned_priors == told.learned_priors

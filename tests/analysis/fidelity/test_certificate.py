"""The certificate of a run: the posterior of its last layer, and distances to it."""

import json
import math
import sys

import pytest
import torch
from torch import nn

import shoal
from shoal.analysis.fidelity import problems
from shoal.analysis.fidelity import reference as references
from shoal.analysis.fidelity.certificate import (
    FILE,
    ITSELF,
    RUN,
    certify,
    laplace,
    load_certificate,
    price,
)
from shoal.analysis.fidelity.last_layer_problem import last_layer_problem
from shoal.analysis.fidelity.reference import Chains
from shoal.analysis.fidelity.study import ALWAYS, Budget
from shoal.cli.main import main
from shoal.core.errors import CheckpointCorrupt, ConfigError
from shoal.data.dataset import Dataset, Split
from shoal.inference.samplers.convergence import effective_draws
from shoal.page.fidelity import certificate_figure, certificate_sentences, certificate_text
from shoal.page.report_data import ReportData, RunRecord
from shoal.page.sections.bayesian import certificate_section

QUICK = Budget(5, 40, 0.1)


def inputs(count=60, seed=0):
    return torch.randn(count, 3, generator=torch.Generator().manual_seed(seed))


def classes(x):
    return (x[:, 0] > 0).long() + (x[:, 1] > 0).long()


def curve(x):
    return x[:, 0].sin() + 0.3 * x[:, 1]


def data_of(target, ood=True):
    x, test = inputs(), inputs(20, 1)
    far = {"far": Split(5 * inputs(20, 2), None)} if ood else {}
    return Dataset("own", Split(x, target(x)), test=Split(test, target(test)), ood=far)


def network(outputs):
    return nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, outputs))


def trained(target, outputs, shared=False, **options):
    if shared:
        torch.manual_seed(0)
        build = shoal.adapters.last_layer(network(outputs))
    else:
        build = lambda: network(outputs)  # noqa: E731
    data = data_of(target)
    how = {"method": "ensemble", "epochs": 3, "lr": 0.05, "progress": False, **options}
    return shoal.fit(shoal.Ensemble.init(build, members=5), data, **how), data


@pytest.fixture
def pretended(monkeypatch):
    """The sampler without its library: independent draws of Laplace's approximation."""

    def sample(problem, warmup, draws, chains, seed, around):
        mean, root = around
        random = torch.Generator().manual_seed(seed)
        noise = torch.randn(chains, draws, len(mean), generator=random, dtype=mean.dtype)
        return Chains((mean + noise @ root.mT).float(), 0, "NUTS, pretended")

    monkeypatch.setattr(references, "sample_chains", sample)
    monkeypatch.setattr("shoal.analysis.fidelity.certificate.require", lambda *_, **__: None)


def test_laplace_is_exact_for_a_gaussian_posterior():
    problem = problems.make("linear")
    mean, root = laplace(problem)
    exact, covariance = references.moments(problem)
    torch.testing.assert_close(mean, exact, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(root @ root.mT, covariance, rtol=1e-5, atol=1e-8)


def test_the_sampler_finds_the_gaussian_posterior_in_whitened_coordinates():
    """Mean and covariance of the chains within the Monte Carlo error of 4,000 draws."""
    pytest.importorskip("numpyro", reason="the sampler is an optional library")
    problem = problems.make("linear")
    exact, covariance = references.moments(problem)
    around = (exact + 0.5 * covariance.diagonal().sqrt(), 2 * torch.linalg.cholesky(covariance))
    found = references.sample_chains(problem, 200, 1000, 4, 0, around)
    draws = found.draws.flatten(0, 1).double()
    effective = float(effective_draws(found.draws.double()).min())
    errors = (draws.mean(0) - exact) / (covariance.diagonal() / effective).sqrt()
    assert errors.abs().max() < 4.5
    apart = (torch.cov(draws.mT) - covariance).norm() / covariance.norm()
    assert apart < 6 / math.sqrt(effective)


@pytest.mark.parametrize("outputs", [1, 2])
def test_the_density_of_regressions_is_that_of_the_run(outputs):
    """Differences of the last layer's log density equal those of likelihood and prior."""
    run, data = trained(curve, outputs, shared=True)
    found = last_layer_problem(run, data)
    assert found.flat is not None and found.weights == 7 * outputs
    ours = found.problem.log_density(found.flat)
    x, y = data.train.x, data.train.y
    with torch.no_grad():
        theirs = run.likelihood.log_prob(run.ensemble(x), y).sum(-1)
    theirs = theirs - found.flat.square().sum(1) / 2
    torch.testing.assert_close(ours - ours[0], (theirs - theirs[0]).float(), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("outputs", [2, 3])
def test_the_sampler_sees_the_density_of_the_last_layer(outputs):
    jax = pytest.importorskip("jax", reason="the sampler is an optional library")
    run, data = trained(classes if outputs == 3 else curve, outputs, shared=True)
    found = last_layer_problem(run, data)
    ours = found.problem.log_density(found.flat.double())
    with jax.enable_x64(True):
        potential = references.potential(found.problem)
        theirs = [float(potential(jax.numpy.asarray(row.double().numpy()))) for row in found.flat]
    for index in range(1, 5):
        difference = float(ours[index] - ours[0])
        assert math.isclose(difference, theirs[0] - theirs[index], rel_tol=1e-4, abs_tol=1e-4)


def test_heads_on_one_trunk_are_compared_in_weights_and_predictions(pretended):
    run, data = trained(classes, 3, shared=True)
    found = certify(run, data, methods=("kde:calibrated",), draws=1000, budget=QUICK)
    assert found.shared_trunk and found.converged
    assert (found.features, found.outputs, found.members, found.off) == (6, 3, 5, "far")
    own = found.distances[RUN]
    assert {"frechet/on", "frechet/off", "tv/on", "weights/sliced", "stein"} <= own.keys()
    assert found.distances[ALWAYS]["frechet/on"] < own["frechet/on"]
    assert found.distances["last-layer Laplace"]["frechet/on"] < 0.3
    rows = {RUN, ITSELF, ALWAYS, "last-layer Laplace", "kde:calibrated"}
    assert set(found.distances) == rows
    assert 0 < found.distances[ITSELF]["frechet/on"] < found.distances[ALWAYS]["frechet/on"]


def test_members_with_trunks_of_their_own_are_compared_in_predictions():
    run, data = trained(curve, 1)
    found = certify(run, data, methods=(), budget=QUICK)
    assert not found.shared_trunk and found.reference["method"] == "closed form"
    assert "weights/sliced" not in found.distances[RUN]
    assert found.distances[RUN]["frechet/on"] > found.distances[ALWAYS]["frechet/on"]
    text = " ".join(certificate_sentences(found))
    assert "trunk of member 0" in text and "closed form" in text and "trunks of their own" in text


def test_draws_of_a_run_and_of_the_last_layer_are_rows_of_their_own(monkeypatch):
    """Chains of the last layer reach its closed form, which plain members do not."""
    monkeypatch.setattr("shoal.analysis.fidelity.study._USUAL", (400, 5))
    run, data = trained(curve, 1, shared=True)
    train = data.train.x, data.train.y
    drawn = shoal.draw(run, train, draws=40, warmup=400, thin=5, progress=False)
    found = certify(drawn, data, methods=("ensemble", "mclmc"), budget=QUICK)
    assert (found.members, found.chains, found.exact) == (200, 5, 200)
    distances = {label: row["frechet/on"] for label, row in found.distances.items()}
    assert distances[RUN] < 0.35 and distances["mclmc"] < 0.35 < distances["ensemble"]
    assert distances[ITSELF] < 0.1 and distances[ITSELF] < distances[ALWAYS]
    for label in (RUN, "mclmc", ALWAYS, ITSELF):
        assert found.distances[label]["coverage/on"] == pytest.approx(0.9, abs=0.08)
    assert found.distances["ensemble"]["coverage/on"] > 0.97  # members too close together
    text = " ".join(certificate_sentences(found))
    assert "5 chains of 40 draws" in text and "with an error of 0.0" in text


def test_a_subset_and_chains_that_disagree_are_told(pretended):
    run, data = trained(classes, 3)
    found = certify(run, data, methods=(), points=30, draws=50, chains=2, budget=QUICK)
    text = " ".join(certificate_sentences(found))
    assert "30 of 60 training points" in text
    apart = {**found.reference, "rhat": 1.2}
    words = certificate_sentences(type(found)(**{**vars(found), "reference": apart}))
    assert "disagree" in words[1]


def test_the_price_grows_with_points_and_weights():
    assert price(60, 21, 4, 1000) < 10
    assert price(60_000, 1010, 4, 1000) > 3600


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"within": 1.0}, "takes about .*; allow it with within=.*points="),
        ({"methods": ("kde:best",)}, "NAME:legacy or NAME:calibrated"),
    ],
)
def test_mistakes_are_answered_in_one_sentence(options, sentence):
    run, data = trained(classes, 3)
    with pytest.raises(ConfigError, match=sentence):
        certify(run, data, **options)


def test_a_missing_sampler_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "numpyro", None)
    run, data = trained(classes, 3)
    with pytest.raises(ConfigError, match=r"shoal\[fidelity\]"):
        certify(run, data)


def test_runs_without_a_posterior_are_refused():
    run, data = trained(classes, 3, prior=shoal.priors.Flat())
    with pytest.raises(ConfigError, match="prior of this run"):
        certify(run, data)
    run, data = trained(lambda x: x[:, :2].abs().round(), 2, likelihood="poisson")
    with pytest.raises(ConfigError, match="not Poisson with 2 columns"):
        certify(run, data)
    run, data = trained(classes, 3)
    with pytest.raises(ConfigError, match="test="):
        certify(run, Dataset("own", data.train))
    with pytest.raises(ConfigError, match="draws must be .* 10 on, not 3"):
        shoal.fidelity(run, data, draws=3)
    with pytest.raises(ConfigError, match="methods must be a list"):
        shoal.fidelity(run, data, methods="kde")


def test_the_certificate_stays_with_the_run(tmp_path):
    pytest.importorskip("matplotlib")
    run, data = trained(curve, 1, out=tmp_path / "run")
    made = shoal.fidelity(run, (data.train.x, data.train.y), test=(data.test.x, data.test.y),
                          methods=["ensemble"])  # fmt: skip
    assert made == load_certificate(tmp_path / "run")
    assert "frechet/off" not in made.distances[RUN]
    record = RunRecord("run", {}, [], [], {}, None, tmp_path / "run")
    section = certificate_section(ReportData([record]))
    assert section is not None and len(section.blocks) == 5
    lines = certificate_text(made).splitlines()
    assert any(line.startswith("this run") for line in lines)
    axes = certificate_figure(made).axes[0]
    rows = [label for label in made.distances if label != ITSELF]
    assert [t.get_text() for t in axes.get_yticklabels()] == rows
    value = json.loads((tmp_path / "run" / FILE).read_text())
    (tmp_path / "run" / FILE).write_text(json.dumps({**value, "members": 3}))
    with pytest.raises(CheckpointCorrupt):
        load_certificate(tmp_path / "run")


def test_the_command_certifies_a_run(tmp_path, capsys, pretended, monkeypatch):
    pytest.importorskip("matplotlib")
    monkeypatch.setattr("shoal.analysis.fidelity.certificate.Budget", lambda *_: QUICK)
    folder = tmp_path / "run"
    arguments = ["members=3", "epochs=1", "model.hidden=[8]", "-o", str(folder), "-q"]
    assert main(["fit", "digits", *arguments]) == 0
    capsys.readouterr()
    how = ["--methods", "ensemble", "--draws", "40", "--points", "100", "-q"]
    assert main(["fidelity", str(folder), *how, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["points"] == 100 and set(found["distances"]) >= {"this run", "ensemble"}
    assert (folder / "certificate.png").stat().st_size > 5000
    assert main(["fidelity", str(folder), "--within", "0.1"]) == 2
    assert "takes about" in capsys.readouterr().err

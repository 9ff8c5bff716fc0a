"""Targets that are derivatives: members equal networks that a loop of torch trained on both."""

import math

import pytest
import torch
from molecules import gradients, labelled, molecules, potentials
from small_runs import (
    ENGINES,
    assert_one_sentence,
    assert_same_folder,
    assert_trained_alone,
    quick,
    shoal_of,
)
from torch import nn

import shoal
from shoal.core.errors import ConfigError, DataError
from shoal.data.batches.orders import Orders
from shoal.inference.likelihoods import (
    Gaussian,
    HeteroscedasticGaussian,
    HomoscedasticGaussian,
    StudentT,
    WithDerivatives,
)
from shoal.interaction.methods import METHODS

pytestmark = pytest.mark.usefixtures("double")

MEMBERS, N, BATCH, EPOCHS, RATE, STD = 3, 13, 5, 2, 0.05, 0.7
SGD = {"optimizer": "sgd", "lr": RATE, "prior": {"name": "gaussian", "std": STD}}
NOISE = Gaussian(0.5)
FORCES = WithDerivatives(NOISE, weight=0.3, sign=-1, derivatives=Gaussian(2.0))


def smooth(outputs=1):
    return lambda: nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, outputs))


def points(columns=1):
    random = torch.Generator().manual_seed(3)
    x = torch.randn(N, 3, generator=random)
    y = torch.stack([(x * (k + 1)).sin().sum(1) for k in range(columns)], 1)
    slopes = torch.stack([-(k + 1) * (x * (k + 1)).cos() for k in range(columns)], 1)
    return (x, y, slopes) if columns > 1 else (x, y[:, 0], slopes[:, 0])


def trained(build=smooth(), data=None, likelihood=FORCES, members=MEMBERS, **options):  # noqa: B008
    x, y, slopes = points() if data is None else data
    options = {"method": "ensemble", "epochs": EPOCHS, "batch_size": BATCH, **SGD} | options
    ensemble = build if isinstance(build, shoal.Ensemble) else shoal_of(build, members)
    data = (x, (y, slopes))
    return quick(ensemble, data, likelihood=likelihood, precision="float64", **options)


def loss(network, x, y, slopes, weight=0.3, sign=-1.0):
    """Minus the joint log density of a batch, without constants, of targets that are known."""
    outputs, found = gradients(network, x, live=True)
    slopes = slopes.reshape(len(x), outputs.shape[-1], -1)
    value = ((outputs - y.reshape(outputs.shape)) / 0.5).nan_to_num(0.0)
    slope = ((sign * found.mT - slopes) / 2.0).nan_to_num(0.0)
    return 0.5 * (value.square().sum(1) + weight * slope.square().flatten(1).sum(1))


def alone(build, x, y, slopes, own=False, each=loss):
    """The members of `trained`, each by itself."""
    orders = Orders(N, BATCH, own=range(MEMBERS) if own else None)
    networks = list(shoal_of(build, MEMBERS).to("cpu", torch.float64))
    for member, network in enumerate(networks):
        optimizer = torch.optim.SGD(network.parameters(), lr=RATE)
        network.train()
        for epoch in range(EPOCHS):
            for rows in orders(epoch).split(orders.width):
                mine = rows.reshape(MEMBERS, -1)[member] if own else rows
                squares = sum(p.square().sum() for p in network.parameters())
                optimizer.zero_grad()
                mean = each(network, x[mine], y[mine], slopes[mine]).mean()
                (mean + squares / (2 * STD**2 * N)).backward()
                optimizer.step()
    return networks


@pytest.mark.parametrize("how", ENGINES, ids=str)
@pytest.mark.parametrize("own", [False, True])
def test_members_are_networks_trained_alone_on_values_and_derivatives(how, own):
    how = how | ({"batches": "own"} if own else {})
    assert_trained_alone(trained(**how), alone(smooth(), *points(), own=own))


def normed():
    return nn.Sequential(nn.Linear(3, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 1))


@pytest.mark.parametrize(
    ("build", "columns"), [(normed, 1), (smooth(2), 2)], ids=["normed", "two columns"]
)
@pytest.mark.parametrize("own", [False, True])
def test_so_they_are_with_batch_statistics_and_with_several_columns(build, columns, own):
    data = points(columns)
    run = trained(build, data, batches="own" if own else "common")
    assert_trained_alone(run, alone(build, *data, own=own))


@pytest.mark.parametrize("own", [False, True])
def test_targets_that_are_nan_do_not_count(own):
    x, y, slopes = points()
    y[::3], slopes[1::4], slopes[2, 1] = math.nan, math.nan, math.nan
    run = trained(data=(x, y, slopes), batches="own" if own else "common")
    assert_trained_alone(run, alone(smooth(), x, y, slopes, own=own))
    scores = shoal.evaluate(shoal.predict(run, x), (y, slopes))
    assert all(map(math.isfinite, scores.values()))


def test_inputs_by_name_and_targets_by_name():
    x, y, slopes = points()

    class Named(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = smooth()()

        def forward(self, pos, shift):
            return self.layers(pos + shift)

    shift = torch.linspace(0, 1, N)[:, None]
    likelihood = WithDerivatives(NOISE, of="pos", weight=0.3, sign=-1, derivatives=Gaussian(2.0))
    data = {"pos": x - shift, "shift": shift}, {"energy": y, "forces": slopes}
    run = quick(
        shoal_of(Named, MEMBERS), data, likelihood=likelihood, precision="float64",
        method="ensemble", epochs=EPOCHS, batch_size=BATCH, **SGD,
    )  # fmt: skip
    for named, network in zip(run.ensemble, alone(smooth(), x, y, slopes), strict=True):
        torch.testing.assert_close(named.layers(x), network(x), rtol=0, atol=1e-10)


class Points(torch.utils.data.Dataset):
    """Single points (x, (value, derivatives)), as a torch Dataset has them."""

    def __init__(self):
        self.x, self.y, self.slopes = points()

    def __len__(self):
        return N

    def __getitem__(self, i):
        return self.x[i], (self.y[i], self.slopes[i])


@pytest.mark.parametrize("own", [False, True])
def test_a_dataset_of_points_gives_pairs(own):
    options = {"method": "ensemble", "epochs": EPOCHS, "batch_size": BATCH, "precision": "float64"}
    options |= {"likelihood": FORCES, "batches": "own" if own else "common", **SGD}
    run = quick(shoal_of(smooth(), MEMBERS), Points(), **options)
    if own:
        assert_trained_alone(run, alone(smooth(), *points(), own=True))
    assert shoal.predict(run, Points()).derivatives.shape == (MEMBERS, N, 3)
    found = shoal.evaluate(run, Points(), keep=False).test
    assert found["derivatives_rmse"] > 0


@pytest.mark.filterwarnings("ignore:members run one after another")
@pytest.mark.parametrize("form", ["pairs", "attribute"])
def test_molecules_of_different_sizes(form):
    batches = [molecules([1, 4, 2], seed=1), molecules([3, 2])]
    pairs = [(batch, labelled(batch)) for batch in batches]
    likelihood = WithDerivatives(NOISE, of="pos", weight=0.3, sign=-1, derivatives=Gaussian(2.0))
    data = pairs
    if form == "attribute":
        for batch, y in pairs:
            batch.y = list(y)
        data = batches
    options = {"method": "ensemble", "epochs": EPOCHS, "precision": "float64", "progress": False}
    run = shoal.fit(potentials(), data, likelihood=likelihood, **options, **SGD | {"lr": 1e-3})
    networks = list(potentials())
    for network in networks:
        optimizer = torch.optim.SGD(network.parameters(), lr=1e-3)
        for _ in range(EPOCHS):
            for batch, (energy, forces) in pairs:
                batch.pos.requires_grad_()
                outputs = network(batch)[:, 0]
                (slope,) = torch.autograd.grad(outputs.sum(), batch.pos, create_graph=True)
                batch.pos = batch.pos.detach()
                value = 0.5 * ((outputs - energy) / 0.5).square().sum()
                each = value + 0.15 * ((-slope - forces) / 2.0).square().sum()
                squares = sum(p.square().sum() for p in network.parameters())
                optimizer.zero_grad()
                (each / len(energy) + squares / (2 * STD**2 * 5)).backward()
                optimizer.step()
    assert_trained_alone(run, networks)
    found = shoal.evaluate(run, pairs, keep=False)
    pred = shoal.predict(run, batches)
    assert pred.derivatives.shape == (2, 5, 4, 3)
    forces = torch.cat([y[1] for _, y in pairs])
    atoms = torch.cat([
        row[: int((batch.batch == graph).sum())]
        for batch, rows in zip(batches, pred.derivatives.mean(0).split([3, 2]), strict=True)
        for graph, row in enumerate(rows)
    ])  # fmt: skip
    error = float((atoms - forces).square().mean().sqrt())
    assert found.test["derivatives_rmse"] == pytest.approx(error, rel=1e-6)


@pytest.mark.parametrize("values", [HomoscedasticGaussian(), Gaussian(2.0)], ids=repr)
def test_learned_noise_is_that_of_expectation_maximisation(values):
    """Both variances follow the mean square errors, in the unit that the targets have."""
    x, y, slopes = points()
    data = x, 40 + 7 * y, 7 * slopes
    likelihood = WithDerivatives(values, sign=-1, derivatives=HomoscedasticGaussian())
    run = trained(data=data, likelihood=likelihood, epochs=40, batch_size=N, lr=0.005)
    pred, noise = shoal.predict(run, x), run.likelihood.derivatives.noise_std[0]
    error = (pred.derivatives - data[2]).square().mean().sqrt()
    assert noise == pytest.approx(float(error), rel=0.2)
    if isinstance(values, HomoscedasticGaussian):
        error = (pred.member_means - data[1]).square().mean().sqrt()
        assert run.likelihood.values.noise_std[0] == pytest.approx(float(error), rel=0.2)
    assert pred.of_derivatives.variance.min() > noise**2


def test_the_first_step_of_learned_noise_is_exact():
    """Targets are standardised: values by their deviation, derivatives by their mean square."""
    x, y, slopes = points()
    data = x, 40 + 7 * y, 7 * slopes
    run = trained(data=data, likelihood=WithDerivatives(sign=-1), epochs=1, batch_size=N)
    a, b = data[1].mean(), data[1].std(correction=0)
    unit = data[2].square().mean().sqrt()
    networks = list(shoal_of(smooth(), MEMBERS))
    errors = []
    for network in networks:
        outputs, found = gradients(network, x, live=True)
        value, slope = outputs[:, 0] - (data[1] - a) / b, (-b * found[..., 0] - data[2]) / unit
        errors.append(torch.stack([value.square().mean(), slope.square().mean()]).detach())
        squares = sum(p.square().sum() for p in network.parameters())
        each = 0.5 * (value.square() + slope.square().sum(1))
        (each.mean() + squares / (2 * STD**2 * N)).backward()
        with torch.no_grad():
            for p in network.parameters():
                p -= RATE * p.grad
    assert_trained_alone(run, networks)
    known = run.likelihood
    learned = torch.cat([known.values.learned.variance, known.derivatives.learned.variance])
    torch.testing.assert_close(learned, torch.stack(errors).mean(0), rtol=0, atol=1e-10)


@pytest.mark.parametrize("values", [HeteroscedasticGaussian(), StudentT()], ids=repr)
def test_noise_by_input_beside_derivatives(values):
    x, y, slopes = points()
    run = trained(smooth(2), likelihood=WithDerivatives(values, sign=-1), lr=0.01)
    pred = shoal.predict(run, x)
    assert pred.derivatives.shape == (MEMBERS, N, 3) and pred.mean.shape == (N,)
    for member, network in enumerate(run.ensemble):
        slope = -run.likelihood.values.learned.scale * gradients(network, x)[1][..., 0]
        torch.testing.assert_close(pred.derivatives[member], slope, rtol=0, atol=1e-10)


@pytest.mark.parametrize("method", list(METHODS))
def test_every_method_moves_members_alike_in_every_engine(method):
    runs = [trained(method=method, epochs=1, lr=0.01, engine=name) for name in ("vmap", "loop")]
    assert_trained_alone(runs[0], runs[1].ensemble)
    assert all(math.isfinite(row["loss"]) for row in runs[0].history)


@pytest.mark.parametrize("method", ["ensemble", "f-kde", "kde", "forde"])
def test_a_resumed_run_is_the_run(tmp_path, method):
    options = {"method": method, "likelihood": WithDerivatives(sign=-1), "lr": 0.01}
    options |= {"validation": 0.2, "patience": 9}
    trained(epochs=4, out=tmp_path / "whole", **options)
    half = {"callbacks": [lambda end: end.epoch < 2]}
    trained(epochs=4, out=tmp_path / "half", **options, **half)
    trained(epochs=4, out=tmp_path / "half", resume=True, **options)
    assert_same_folder(tmp_path / "whole", tmp_path / "half")
    run = shoal.load(tmp_path / "half", build=smooth())
    assert {"nll", "rmse", "derivatives_rmse"} <= run.history[-1]["validation"].keys()
    x = points()[0]
    assert shoal.predict(run, x).derivatives.shape == (MEMBERS, N, 3)
    assert not hasattr(shoal.predict(run, x, derivatives_of=False).likelihood, "layout")


def test_scores_of_values_and_derivatives_by_member_and_in_the_mean():
    x, y, slopes = points()
    run = trained()
    pred = shoal.predict(run, x)
    scores = shoal.evaluate(pred, (y, slopes))
    each = pred.derivatives - slopes
    assert scores["derivatives_rmse"] == pytest.approx(float(each.mean(0).square().mean().sqrt()))
    assert scores["derivatives_mae"] == pytest.approx(float(each.mean(0).abs().mean()))
    assert scores["derivatives_member_mae"] == pytest.approx(float(each.abs().mean()))
    by_member = each.flatten(1).square().mean(1).sqrt().mean()
    assert scores["derivatives_member_rmse"] == pytest.approx(float(by_member))
    values = shoal.evaluate(pred.of_values, y)
    assert scores.items() >= values.items()
    alone = pred.of_values
    for name in ("entropy", "aleatoric", "mutual_information", "disagreement"):
        assert torch.equal(getattr(pred, name)(), getattr(alone, name)())
    assert torch.equal(pred.sample(2, seed=0), alone.sample(2, seed=0))
    assert torch.equal(torch.stack(pred.interval(0.9)), torch.stack(alone.interval(0.9)))
    assert shoal.evaluate(pred, y) == pytest.approx(values)
    joint = pred.likelihood.log_prob(pred.members, pred.check((y, slopes)))
    torch.testing.assert_close(pred.log_prob((y, slopes)), joint.logsumexp(0) - math.log(MEMBERS))
    with pytest.raises(DataError) as caught:
        shoal.evaluate(pred, (y, slopes[:, :2]))
    assert_one_sentence(caught.value, "numbers")
    assert 0 <= scores["derivatives_coverage_90"] <= 1
    weighted = shoal.evaluate(pred, (y, slopes), sample_weight=torch.arange(N) % 2)
    odd = shoal.evaluate(pred[1::2], (y[1::2], slopes[1::2]))
    assert weighted == pytest.approx(odd)


def test_a_calibration_has_a_factor_for_values_and_one_for_derivatives(tmp_path):
    x, y, slopes = points()
    run = trained(likelihood=WithDerivatives(sign=-1), epochs=20, lr=0.01, out=tmp_path / "run")
    held = x + 0.1, (y + 3, slopes * 1.5)
    found = shoal.calibrate(run, held)
    assert found.likelihood.calibration.keys() == {"noise_factor", "derivatives_noise_factor"}
    scores = shoal.evaluate(shoal.predict(found, held[0]), held[1])
    assert scores["coverage_90"] >= 0.9 and 0.88 <= scores["derivatives_coverage_90"] <= 0.93
    again = shoal.load(tmp_path / "run", build=smooth())
    assert again.likelihood.calibration == found.likelihood.calibration
    assert not again.trained.likelihood.calibration


def test_the_page_shows_errors_and_coverage_of_both(tmp_path):
    x, y, slopes = points()
    run = trained(likelihood=WithDerivatives(sign=-1), epochs=20, lr=0.01)
    text = shoal.report(run, tmp_path / "page.html", data=(x, (y, slopes))).read_text()
    found = shoal.evaluate(run, (x, (y, slopes)), keep=False)
    assert f"{found.test['derivatives_rmse']:.4g}" in text
    assert "Coverage of the derivatives" in text and "Coverage on the test set" in text
    each = found.samples["derivatives/member_rmse"]
    error = (shoal.predict(run, x).derivatives - slopes).flatten(1).square().mean(1).sqrt()
    torch.testing.assert_close(each, error.float())


@pytest.mark.parametrize(
    "options",
    [{"adversarial": {"epsilon": 0.01}}, {"folds": 3, "keep": "crps"}, {"offload": "host"},
     {"method": {"name": "forde", "fraction": 0.5}}, {"method": "f-kde", "validation": 0.2}],
    ids=str,
)  # fmt: skip
def test_other_options_of_fit_take_derivatives(options):
    run = trained(**{"lr": 0.01, "method": "ensemble"} | options)
    assert run.history[-1]["loss"] < 1.1 * run.history[0]["loss"]
    assert shoal.predict(run, points()[0]).derivatives.shape == (MEMBERS, N, 3)


def test_cached_features_are_refused_since_derivatives_are_taken_at_the_inputs():
    trunk = nn.Linear(3, 6).requires_grad_(False)
    build = lambda: nn.Sequential(trunk, nn.Tanh(), nn.Linear(6, 1))  # noqa: E731
    with pytest.raises(ConfigError) as caught:
        trained(build, cache=True)
    assert_one_sentence(caught.value, "derivatives", "cache")


def test_evidence_of_values_alone_is_refused_in_a_sentence():
    x, y, slopes = points()
    with pytest.raises(ConfigError) as caught:
        shoal.evidence(trained(), (x, (y, slopes)))
    assert_one_sentence(caught.value, "derivatives")


def test_a_functional_prior_and_a_stepper_take_derivatives():
    x, y, slopes = points()
    run = trained(prior="function-space", method="f-kde", lr=0.01)
    assert shoal.predict(run, x).derivatives.isfinite().all()
    ensemble = shoal_of(smooth(), MEMBERS)
    stepper = shoal.Stepper(ensemble, n=N, likelihood=FORCES, **SGD)
    rows = Orders(N, BATCH)(0).split(BATCH)
    for epoch in range(EPOCHS):
        for rows in Orders(N, BATCH)(epoch).split(BATCH):
            stepper((x[rows], (y[rows], slopes[rows])))
    for one, other in zip(ensemble, alone(smooth(), x, y, slopes), strict=True):
        torch.testing.assert_close(one(x), other(x), rtol=0, atol=1e-10)


def test_wrong_targets_are_refused_in_a_sentence():
    x, y, slopes = points()
    cases = [
        ((x, y), FORCES, DataError, "pair"),
        ((x, (y, slopes[:, :2])), FORCES, DataError, "numbers"),
        ((x, (y, torch.full_like(slopes, math.nan))), FORCES, DataError, "known"),
    ]
    for data, likelihood, kind, word in cases:
        with pytest.raises(kind) as caught:
            quick(shoal_of(smooth(), 2), data, likelihood=likelihood, method="ensemble")
        assert_one_sentence(caught.value, word)
    for settings in ({"sign": 2}, {"weight": -1.0}, {"derivatives": StudentT()}):
        with pytest.raises(ConfigError):
            WithDerivatives(NOISE, **settings)
    with pytest.raises(ConfigError) as caught:
        WithDerivatives(shoal.likelihoods.Categorical())
    assert_one_sentence(caught.value, "homoscedastic")

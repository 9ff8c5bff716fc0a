"""Members with folds of their own: what each never sees, and what it predicts there."""

import re
from pathlib import Path

import pytest
import torch
from small_runs import (
    BATCH,
    CLASSES,
    ENGINES,
    Fuse,
    Pairs,
    assert_one_sentence,
    assert_same_run,
    assert_trained_alone,
    both,
    differ,
    frozen,
    normed,
    plain,
    points,
    quick,
    shoal_of,
)
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from triton_ready import needs_gpu

import shoal
from shoal.cli.main import main
from shoal.core.errors import ConfigError, DataError
from shoal.data.batches.orders import Folds, Orders
from shoal.page.sections.training import _best

MEMBERS, K, N, EPOCHS, RATE, STD = 6, 3, 38, 3, 0.1, 0.7
SGD = {"optimizer": "sgd", "lr": RATE, "prior": {"name": "gaussian", "std": STD}}
FOLDS = Folds(N, K)
X, Y = points(N)


def folded(build=plain, data=None, members=MEMBERS, **options):
    """A plain ensemble with folds, in float64."""
    options = {"epochs": EPOCHS, "precision": "float64", "folds": K, "method": "ensemble"} | options
    return quick(shoal_of(build, members), (X, Y) if data is None else data, **options)


def alone(build, x, y, loss, epochs=EPOCHS):
    """Each member of `folded` trained by itself in a loop of torch; yields it after every epoch."""
    n = N - -(-N // K)
    for member, network in enumerate(shoal_of(build, MEMBERS).to("cpu", torch.float64)):
        optimizer, states = torch.optim.SGD(network.parameters(), lr=RATE), []
        for epoch in range(epochs):
            network.train()
            orders = Orders(n, BATCH, own=range(MEMBERS), folds=FOLDS)
            for rows in orders(epoch).split(orders.width):
                mine = rows.reshape(MEMBERS, -1)[member]
                squares = sum(p.square().sum() for p in network.parameters())
                optimizer.zero_grad()
                (loss(network(x[mine]), y[mine]).mean() + squares / (2 * STD**2 * n)).backward()
                optimizer.step()
            network.eval()
            with torch.no_grad():
                held = FOLDS.held(member)
                score = float(loss(network(x[held]), y[held]).mean())
            states.append((score, {k: t.clone() for k, t in network.state_dict().items()}))
        yield network, states


def entropy(f, t):
    return F.cross_entropy(f, t, reduction="none")


# The folds


@pytest.mark.parametrize(("n", "count"), [(38, 3), (12, 4), (5, 5), (7, 2)])
def test_folds_are_a_partition_and_a_member_sees_only_the_others(n, count):
    folds = Folds(n, count, seed=4)
    held = [folds.held(member).tolist() for member in range(count)]
    assert sorted(sum(held, [])) == list(range(n))
    assert {len(each) for each in held} <= {n // count, -(-n // count)}
    orders = Orders(folds.trained, 2, own=range(1, count + 3), folds=folds)
    seen = [set() for _ in orders.own]
    for epoch in range(30):
        for rows in orders(epoch).split(orders.width):
            for mine, each in zip(seen, rows.reshape(len(orders.own), -1), strict=True):
                mine.update(each.tolist())
    for member, mine in zip(orders.own, seen, strict=True):
        assert mine == set(range(n)) - set(held[member % count])
    assert Folds(n, count, seed=5).of_points.tolist() != folds.of_points.tolist()


def test_mixtures_weigh_every_member_of_a_fold_alike():
    known, places = Folds(20, 3).mixtures([0, 1, 2, 3, 4, 6])
    assert known == [0, 1, 2] and {len(each) for each in places} == {6}
    assert [sorted(set(each)) for each in places] == [[0, 3, 5], [1, 4], [2]]
    assert all(len({each.count(p) for p in each}) == 1 for each in places)


# What members see


@pytest.mark.parametrize("how", ENGINES, ids=str)
@pytest.mark.parametrize("build", [plain, normed])
def test_a_member_is_a_network_trained_alone_on_the_other_folds(build, how):
    networks = [network for network, _ in alone(build, X.double(), Y, entropy)]
    assert_trained_alone(folded(build, keep="last", **SGD, **how), networks)


def linear():
    return nn.Linear(3, 1)


@pytest.mark.parametrize("task", ["classes", "numbers"])
def test_a_target_changes_only_members_that_do_not_hold_it_out(task):
    build, y, options = plain, Y.clone(), {}
    if task == "numbers":
        build, y = linear, X.double().sum(1)
        options = {"likelihood": shoal.likelihoods.Gaussian(noise_std=0.5)}
    before = frozen(folded(build, (X, y), keep="last", **SGD, **options).ensemble)
    point = 11
    y = y.clone()
    y[point] = (y[point] + 1) % CLASSES
    after = frozen(folded(build, (X, y), keep="last", **SGD, **options).ensemble)
    for member in range(MEMBERS):
        same = all(torch.equal(before[name][member], after[name][member]) for name in before)
        assert same == (member % K == int(FOLDS.of_points[point]))


def test_of_scaled_targets_members_share_only_the_unit():
    y = 50 + 9 * X.double().sum(1)
    unit = y.mean(), y.std(correction=0)

    def loss(f, t):
        mean, raw = f.chunk(2, 1)
        z = (t[:, None] - unit[0]) / unit[1]
        known = shoal.likelihoods.HeteroscedasticGaussian()
        return -known.log_prob(torch.cat([mean, raw], 1), z)

    build = lambda: nn.Linear(3, 2)  # noqa: E731
    networks = [network for network, _ in alone(build, X.double(), y, loss)]
    run = folded(build, (X, y), keep="last", likelihood="heteroscedastic", **SGD)
    assert_trained_alone(run, networks)
    assert float(run.likelihood.learned.scale) == pytest.approx(float(unit[1]))


# The best epoch of each member


@pytest.mark.parametrize("how", [{}, {"resident": 2}, {"resident": 2, "offload": "disk"}], ids=str)
def test_every_member_has_the_weights_of_its_own_best_epoch(how, tmp_path):
    run = folded(epochs=8, out=tmp_path / "run", **SGD, **how)
    trained = list(alone(plain, X.double(), Y, entropy, epochs=8))
    for member, (network, states) in enumerate(trained):
        scores = [score for score, _ in states]
        told = [row["member_validation"][member] for row in run.history]
        assert told == pytest.approx(scores, rel=1e-9)
        best = min(range(8), key=scores.__getitem__)
        assert run.best_epochs[member] == best + 1
        network.load_state_dict(states[best][1])
    assert_trained_alone(run, [network for network, _ in trained])


ROUGH = {"optimizer": "sgd", "lr": 3.0}
"""A learning rate at which members have different best epochs."""


def test_members_differ_in_their_best_epochs_and_the_run_says_so():
    run, last = (folded(epochs=9, keep=keep, **ROUGH) for keep in (None, "last"))
    assert len(set(run.best_epochs)) > 1 and run.best_epochs == last.best_epochs
    low, high = min(run.best_epochs), max(run.best_epochs)
    assert any(f"epochs {low} to {high}" in note for note in run.notes)
    assert differ(frozen(run.ensemble), frozen(last.ensemble))
    for members in range(1, 10):
        stopped = folded(epochs=members, keep="last", **ROUGH)
        for member, best in enumerate(run.best_epochs):
            if best == members:
                mine, theirs = frozen(run.ensemble), frozen(stopped.ensemble)
                assert all(torch.equal(mine[n][member], theirs[n][member]) for n in mine)


def test_epochs_may_be_chosen_by_crps():
    """Of N(m, v): E|Y - y| - sqrt(v / pi), in units of the targets' standard deviation."""
    y = X.double().sum(1) + torch.sin(7 * X[:, 0].double())
    build = lambda: nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2))  # noqa: E731
    how = {"likelihood": "heteroscedastic", "optimizer": "sgd", "lr": 0.2}
    run = folded(build, (X, y), epochs=6, keep="crps", **how)
    z, scores = (y - y.mean()) / y.std(unbiased=False), []
    for epoch in range(1, 7):
        last = folded(build, (X, y), epochs=epoch, keep="last", **how).ensemble
        scores.append([])
        for member in range(MEMBERS):
            held = FOLDS.held(member)
            mean, raw = last[member](X[held].double()).detach().unbind(-1)
            scale = (F.softplus(raw) + 1e-6).sqrt()
            t, normal = (z[held] - mean) / scale, torch.distributions.Normal(0, 1)
            distance = t * (2 * normal.cdf(t) - 1) + 2 * normal.log_prob(t).exp() - torch.pi**-0.5
            scores[-1].append(float((scale * distance).mean()))
        assert run.history[epoch - 1]["member_validation"] == pytest.approx(scores[-1])
    best = [1 + min(range(6), key=lambda e: scores[e][m]) for m in range(MEMBERS)]
    assert run.best_epochs == best != folded(build, (X, y), epochs=6, **how).best_epochs
    assert any("lowest CRPS" in note for note in run.notes)


def test_the_run_ends_when_no_member_has_improved():
    run = folded(epochs=60, patience=2, **ROUGH)
    assert len(run.history) == max(run.best_epochs) + 2 < 60
    assert any("of no member fell for 2 epochs" in note for note in run.notes)


def test_architectures_have_their_own_rows():
    smooth = lambda: nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 4))  # noqa: E731

    def trained(**options):
        two = shoal.Ensemble.init([(plain, 2), (smooth, 2)], seed=0)
        return quick(two, (X, Y), method="ensemble", folds=2, **ROUGH, **options)

    run = trained(epochs=6)
    for member, best in enumerate(run.best_epochs):
        mine = run.ensemble[member].state_dict()
        theirs = trained(epochs=best, keep="last").ensemble[member].state_dict()
        assert all(torch.equal(mine[name], theirs[name]) for name in mine)


def test_one_learned_noise_is_the_mean_over_the_best_epochs():
    y = X.double().sum(1) + torch.sin(7 * X[:, 0].double())
    rate = {"lr": 0.2, "likelihood": "homoscedastic"}
    run = folded(linear, (X, y), epochs=7, **rate)
    noise = {
        epoch: folded(linear, (X, y), epochs=epoch, keep="last", **rate).likelihood.learned.variance
        for epoch in set(run.best_epochs)
    }
    mean = torch.stack([noise[epoch] for epoch in run.best_epochs]).mean(0)
    torch.testing.assert_close(run.likelihood.learned.variance, mean)


@pytest.mark.parametrize("likelihood", ["categorical", "homoscedastic"])
def test_a_resumed_run_is_the_same_to_the_last_bit(likelihood, tmp_path):
    build, data = both, (X, Y)
    if likelihood == "homoscedastic":
        build, data = linear, (X, X.sum(1))
    options = {"save_every": 0, "likelihood": likelihood, "epochs": 5, "lr": 0.3}
    whole = folded(build, data, out=tmp_path / "one", schedule=Fuse(), **options)
    with pytest.raises(Fuse.Blown):
        folded(build, data, out=tmp_path / "two", schedule=Fuse(11), **options)
    again = folded(build, data, out=tmp_path / "two", schedule=Fuse(), resume=True, **options)
    assert_same_run(again, whole)
    assert again.likelihood.state.keys() == whole.likelihood.state.keys()
    loaded = shoal.load(tmp_path / "two", build)
    assert_same_run(loaded, whole)
    assert loaded.config["folds"] == K and loaded.config["batches"] == "own"
    assert torch.equal(shoal.out_of_fold(loaded, data).members, shoal.out_of_fold(whole).members)
    for name, tensor in whole.likelihood.state.items():
        assert torch.equal(tensor, loaded.likelihood.state[name])


# Out-of-fold predictions


def by_hand(run, x=X):
    """Outputs of the members that hold each point out, one list per point."""
    outputs = shoal.predict(run, x).members
    return [outputs[int(FOLDS.of_points[n]) :: K, n] for n in range(N)]


@pytest.mark.parametrize("members", [3, 6, 8])
def test_out_of_fold_predictions_are_the_mixtures_of_members_that_hold_out_the_point(members):
    run = folded(members=members)
    pred = shoal.out_of_fold(run)
    probs = torch.stack([each.softmax(-1).mean(0) for each in by_hand(run)])
    torch.testing.assert_close(pred.probs, probs, rtol=0, atol=1e-12)
    assert pred.size == {3: 1, 6: 2, 8: 6}[members]
    scores = shoal.evaluate(pred, Y)
    assert scores["nll"] == pytest.approx(-float(probs[range(N), Y].log().mean()), rel=1e-9)


def test_the_history_has_the_measures_of_out_of_fold_predictions():
    weight = 0.5 + torch.rand(N, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    run = folded(keep="last", members=7, sample_weight=weight)
    scores = shoal.evaluate(shoal.out_of_fold(run), Y, sample_weight=weight)
    told = run.history[-1]["validation"]
    assert told == pytest.approx({name: scores[name] for name in told}, rel=1e-9)
    assert run.best_epoch is not None


def test_so_it_is_with_numbers_as_targets():
    y = 100 + 20 * X.double().sum(1)
    run = folded(linear, (X, y), lr=0.1, epochs=30)
    pred = shoal.out_of_fold(run)
    means = torch.stack([run.likelihood.mean(each).mean(0)[0] for each in by_hand(run)])
    torch.testing.assert_close(pred.mean, means, rtol=0, atol=1e-9)
    assert pred.mean.shape == y.shape and shoal.evaluate(pred, y)["rmse"] < y.std()


def test_two_processes_of_reading_give_the_same_run():
    arrays, dataset = folded(epochs=2), folded(data=Pairs(X, Y), epochs=2)
    assert_same_run(dataset, arrays)
    assert torch.equal(shoal.out_of_fold(dataset).members, shoal.out_of_fold(arrays).members)


def test_a_loaded_run_finds_the_data_set_of_its_config(tmp_path):
    data = shoal.data.load("toy-regression")
    ensemble = shoal.Ensemble.init(linear_of(data), 4)
    run = shoal.fit(ensemble, data, folds=2, epochs=2, progress=False, out=tmp_path / "run")
    loaded = shoal.out_of_fold(shoal.load(tmp_path / "run", linear_of(data)))
    assert torch.equal(loaded.members, shoal.out_of_fold(run).members)
    assert len(loaded) == len(data.train)


def linear_of(data):
    return lambda: nn.Linear(data.train.x.shape[1], 2)


def test_diverged_members_are_left_out():
    run = folded()
    run.ensemble.alive[0] = False
    pred = shoal.out_of_fold(run)
    point = int(FOLDS.held(0)[0])
    mine = run.ensemble[3].eval()(X[point : point + 1].double())
    assert pred.size == 2 and torch.allclose(pred.members[:, point], mine, rtol=0, atol=1e-12)
    run.ensemble.alive[3] = False
    with pytest.raises(ConfigError, match="fold 0"):
        shoal.out_of_fold(run)


def test_grown_members_hold_out_their_own_folds():
    run = folded(members=K)
    grown = shoal.grow(run, K, progress=False)
    assert grown.config["folds"] == K and len(grown.best_epochs) == K
    outputs = shoal.predict(grown, X).members[K:]
    mine = torch.stack([outputs[int(FOLDS.of_points[n]), n] for n in range(N)])
    torch.testing.assert_close(shoal.out_of_fold(grown).members[0], mine, rtol=0, atol=1e-12)


# Repulsion, and what is refused


@pytest.mark.parametrize("method", ["kde", "forde", {"name": "f-kde", "points": "mixup"}], ids=str)
def test_repelled_members_are_the_same_with_every_engine(method):
    first = frozen(folded(method=method, strength=5.0, engine="vmap").ensemble)
    for how in ENGINES[1:]:
        run = folded(method=method, strength=5.0, **how)
        torch.testing.assert_close(frozen(run.ensemble), first, rtol=0, atol=1e-10)


def shared():
    layer = nn.Linear(3, 3)
    return lambda: nn.Sequential(layer, nn.Linear(3, CLASSES))


WRONG = {
    "from 2 on": {"folds": 1},
    "folds=39 came for 38 data points": {"folds": 39},
    "folds or validation, not both": {"validation": 0.1},
    "points": {"method": "f-kde"},
    "and a loader came": {"data": DataLoader(TensorDataset(X, Y), 10)},
    "loader per member without folds": {
        "data": [DataLoader(TensorDataset(X, Y), 10) for _ in range(MEMBERS)]
    },
    "batches='common'": {"adversarial": 0.1},
    "name method and strength": {"method": "auto"},
}


@pytest.mark.parametrize("words", WRONG)
def test_what_has_no_folds_is_refused_in_one_sentence(words):
    with pytest.raises((ConfigError, DataError), match=words) as error:
        folded(**WRONG[words])
    assert_one_sentence(error.value)


def test_out_of_fold_says_what_it_needs():
    run = folded(members=2)
    assert run.best_epochs is not None and len(run.best_epochs) == 2
    for wrong, words in [
        (lambda: shoal.out_of_fold(run), "members=3"),
        (lambda: shoal.out_of_fold(quick()), "folds=8"),
        (lambda: shoal.out_of_fold(folded(), (X.flip(0), Y)), "same points"),
        (lambda: shoal.out_of_fold(folded(), (X[:9], Y[:9])), "same points"),
    ]:
        with pytest.raises((ConfigError, DataError), match=words) as error:
            wrong()
        assert_one_sentence(error.value)


def test_the_estimators_pass_folds_on():
    from shoal.integrations.sklearn import EnsembleRegressor

    x = points(120)[0].numpy()  # enough points for early stopping by default
    model = EnsembleRegressor(members=4, options={"folds": 2, "epochs": 2}).fit(x, x.sum(1))
    config = model.run_.config
    assert config["folds"] == 2 and len(model.run_.best_epochs) == 4
    assert config.get("validation") is None and config["patience"] == model.n_iter_no_change
    assert model.run_.provenance["data"]["points"] == 120


def test_the_code_of_the_page_runs():
    page = Path(__file__).parents[2] / "docs" / "folds.md"
    code = re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)[0]
    names = {"shoal": shoal, "x": X, "y": Y, "ensemble": shoal_of(plain, 16)}
    exec(compile(code.replace("epochs=200", "epochs=3, progress=False"), str(page), "exec"), names)
    assert len(names["pred"]) == N and names["scores"]["nll"] > 0


def test_the_command_and_the_report_know_folds(tmp_path):
    typed = ["fit", "toy-regression", "method=kde", "folds=2", "members=2", "epochs=2", "-q"]
    assert main([*typed, "-o", str(tmp_path / "run")]) == 0
    run = shoal.load(tmp_path / "run")
    assert run.config["folds"] == 2 and len(run.best_epochs) == 2
    assert len(shoal.out_of_fold(run)) == run.provenance["data"]["points"]
    assert "The out-of-fold NLL is lowest" in _best(run)


@needs_gpu
@pytest.mark.parametrize("method", ["ensemble", "kde", "forde"])
def test_captured_steps_and_their_scores_are_those_of_the_loop(method):
    options = {"method": method, "device": "cuda", "epochs": 6} | SGD
    captured, loop = folded(normed, **options), folded(normed, engine="loop", **options)
    torch.testing.assert_close(
        frozen(captured.ensemble), frozen(loop.ensemble), rtol=0, atol=1e-9
    )  # fmt: skip
    assert captured.best_epochs == loop.best_epochs
    torch.testing.assert_close(shoal.out_of_fold(captured).members, shoal.out_of_fold(loop).members)

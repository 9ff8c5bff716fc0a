"""Fewer members: the choice against brute force, the cost on data that did not choose."""

import itertools
import json

import numpy as np
import pytest
import torch
from small_runs import assert_one_sentence
from torch import nn

import shoal
from shoal.cli.main import main
from shoal.core.errors import ConfigError, DataError
from shoal.data.dataset import Dataset, Split
from shoal.evaluation.compress import bootstrap_difference, compress, greedy_choice
from shoal.models import MLP, Blueprint


def points(n, seed):
    x = torch.randn(n, 4, generator=torch.Generator().manual_seed(seed))
    return Split(x, (x[:, 0] + x[:, 1] * x[:, 2] > 0).long())


DATA = Dataset("points", points(200, 0), test=points(101, 1))


@pytest.fixture(scope="module")
def run():
    ensemble = shoal.Ensemble.init(Blueprint(MLP(hidden=(16, 16)), (4,), 2), members=5)
    return shoal.fit(
        ensemble, DATA, method="ensemble", lr=1e-2, epochs=10, batch_size=50, progress=False
    )


def mixture(table, chosen):
    return float((table[list(chosen)].exp().mean(0)).log().mean())


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("to", [1, 2, 3, 5])
def test_greedy_choice_is_that_of_brute_force(seed, to):
    table = torch.randn(5, 30, generator=torch.Generator().manual_seed(seed)).double()
    subsets = itertools.combinations(range(5), to)
    best = max(subsets, key=lambda chosen: mixture(table, chosen))
    assert mixture(table, greedy_choice(table, to)) == pytest.approx(mixture(table, best))


def test_exchanges_leave_a_member_that_was_best_alone():
    """Member 0 is best alone, but members 1 and 2 together know every point."""
    table = torch.tensor([[0.6, 0.6], [0.99, 0.1], [0.1, 0.99]]).log()
    assert greedy_choice(table, 1) == [0]
    assert greedy_choice(torch.tensor([[0.5, 0.5], [1.0, 0.2], [0.2, 1.0]]).log(), 2) == [1, 2]


def test_the_interval_is_that_of_the_normal_limit():
    random = np.random.default_rng(3)
    a, b = random.normal(1, 1, 4000), random.normal(0, 1, 4000)
    found = bootstrap_difference(a, b, level=0.95, seed=0)
    reach = 1.96 * (a - b).std() / np.sqrt(4000)
    assert found.difference == pytest.approx((a - b).mean())
    assert found.high - found.difference == pytest.approx(reach, rel=0.1)
    assert found.difference - found.low == pytest.approx(reach, rel=0.1)


@pytest.mark.parametrize("by", ["greedy", "stacking"])
def test_members_chosen_on_one_half_are_judged_on_the_other(run, by):
    if by == "stacking":
        pytest.importorskip("scipy")
    done = compress(run, 2, by=by, data=DATA)
    half = torch.arange(1, 101, 2)
    x, y = DATA.test.x[half], DATA.test.y[half]
    whole = -shoal.predict(run, x).log_prob(y)
    kept = torch.tensor(done.chosen)
    weights = torch.full((2,), 0.5) if done.weights is None else torch.tensor(done.weights)
    probs = run.ensemble(x)[kept].detach().softmax(-1)
    mixed = torch.tensordot(weights.float(), probs, 1)
    less = -mixed.gather(-1, y[:, None]).squeeze(-1).log()
    assert done.points == 50 and done.run.ensemble.members == 2
    assert done.before == pytest.approx(float(whole.mean()), rel=1e-5)
    assert done.nll == pytest.approx(float(less.mean()), rel=1e-5)
    assert done.cost.difference == pytest.approx(done.nll - done.before, abs=1e-6)
    assert done.cost.low <= done.cost.difference <= done.cost.high
    other = torch.arange(0, 101, 2)
    changed = Dataset("points", DATA.train, test=Split(DATA.test.x, DATA.test.y.clone()))
    changed.test.y[half] = 1 - changed.test.y[half]
    assert compress(run, 2, by=by, data=changed).chosen == done.chosen, "the judges do not choose"
    if by == "greedy":
        table = run.likelihood.log_prob(run.ensemble(DATA.test.x[other]), DATA.test.y[other])
        best = max(itertools.combinations(range(5), 2), key=lambda c: mixture(table.detach(), c))
        assert done.chosen == best


def test_all_members_change_nothing(run):
    done = compress(run, 5, data=DATA)
    assert done.chosen == (0, 1, 2, 3, 4) and done.cost == (0, 0, 0)
    assert done.numbers[0] == done.numbers[1]
    x = DATA.test.x
    assert torch.equal(shoal.predict(done.run, x).members, shoal.predict(run, x).members)


def test_validation_data_choose_and_all_test_data_judge(run):
    data = Dataset("points", DATA.train, test=DATA.test, validation=points(60, 5))
    assert compress(run, 2, data=data).points == 101


def test_a_diverged_member_is_not_kept(run):
    ensemble = shoal.Ensemble.of(run.ensemble.member(i) for i in range(5))
    ensemble.alive[1] = False
    with torch.no_grad():
        next(iter(ensemble.weights.values()))[1] = torch.nan
    lame = shoal.Run(ensemble, run.likelihood, run.config, run.history)
    assert compress(lame, 4, data=DATA).chosen == (0, 2, 3, 4)
    with pytest.raises(ConfigError):
        compress(lame, 5, data=DATA)


def test_distillation_keeps_where_members_disagree(tmp_path):
    ensemble = shoal.Ensemble.init(Blueprint(MLP(hidden=(64, 64)), (4,), 2), members=5)
    settings = {"method": "ensemble", "lr": 1e-2, "epochs": 12, "batch_size": 50}
    run = shoal.fit(ensemble, DATA, **settings, progress=False)
    done = compress(run, 1, by="distil", data=DATA, epochs=60, lr=3e-3, out=tmp_path / "small")
    assert done.run.ensemble.members == 5 and done.numbers[1] < 0.5 * done.numbers[0]
    assert len(done.run.ensemble.shared) > 0
    teacher, student = shoal.predict(run, DATA.test), shoal.predict(done.run, DATA.test)
    pair = torch.stack([teacher.mutual_information(), student.mutual_information()])
    assert float(torch.corrcoef(pair)[0, 1]) > 0.5
    before, after = done.mutual_information
    assert 0.1 * before < after < 2 * before
    again = shoal.load(tmp_path / "small")
    assert torch.equal(shoal.predict(again, DATA.test).members, student.members)
    assert any("distil" in note for note in again.notes)


def test_the_run_that_was_compressed_stays_as_it_was(run):
    before = {name: t.clone() for name, t in run.ensemble.state.items()}
    compress(run, 1, by="distil", data=DATA, epochs=1)
    assert all(torch.equal(t, before[name]) for name, t in run.ensemble.state.items())


@pytest.mark.parametrize(
    ("to", "options", "word"),
    [
        (0, {}, "from 1"),
        (6, {}, "from 1 to 5"),
        (2, {"by": "luck"}, "greedy"),
        (2, {"by": "distil"}, "to=1"),
        (2, {"level": 2}, "between 0 and 1"),
    ],
)
def test_what_cannot_be_asked(run, to, options, word):
    with pytest.raises(ConfigError) as caught:
        compress(run, to, data=DATA, **options)
    assert_one_sentence(caught.value, word)


def test_without_held_out_data_nothing_is_chosen(run):
    with pytest.raises(DataError) as caught:
        compress(run, 2, data=(DATA.train.x, DATA.train.y))
    assert_one_sentence(caught.value, "test=(x, y)")


def test_regression_is_distilled_too():
    x = torch.rand(120, 1) * 4
    data = Dataset("line", Split(x[:80], 3 * x[:80] + 50), test=Split(x[80:], 3 * x[80:] + 50))
    build = lambda: nn.Sequential(nn.Linear(1, 16), nn.Tanh(), nn.Linear(16, 1))  # noqa: E731
    ensemble = shoal.Ensemble.init(build, members=3)
    run = shoal.fit(ensemble, data, method="ensemble", lr=1e-2, epochs=30, progress=False)
    done = compress(run, 1, by="distil", data=data, epochs=100, lr=1e-2)
    error = shoal.predict(done.run, data.test).mean - shoal.predict(run, data.test).mean
    assert float(error.abs().max()) < 1.0


def test_the_command_line(tmp_path, capsys):
    folder = tmp_path / "digits"
    small = ["members=3", "epochs=2", "model.hidden=[16]"]
    assert main(["fit", "digits", *small, "-o", str(folder), "-q"]) == 0
    capsys.readouterr()
    assert main(["compress", str(folder), "--to", "2", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert len(told["members"]) == 2 and told["cost"]["low"] <= told["cost"]["high"]
    assert shoal.load(told["folder"]).ensemble.members == 2
    assert main(["export", told["folder"], "-o", str(tmp_path / "model.pt2"), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert max(told["differences"].values()) <= 1e-5 and len(told["metadata"]["classes"]) == 10
    assert (tmp_path / "model.pt2").exists()

"""Points, draws and repulsion at equal cost: what the three studies share."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

import shoal
from studies import draws_corners
from studies.common import append_rows, read_csv


@pytest.mark.parametrize(("seconds", "found"), [(1.0, 3), (10.0, 10), (17.0, 17)])
def test_more_members_take_the_seconds_that_are_given(monkeypatch, seconds, found):
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(draws_corners.time, "process_time", lambda: clock.now)

    def train(members, callbacks):
        for step in range(1, 51):
            clock.now += 0.01 * members  # a hundred steps take a second per member
            for each in callbacks:
                each.step_end(SimpleNamespace(step=step, stop=lambda: None))

    assert draws_corners.members_for(seconds, train, members=3, steps=100) == found


def test_repelling_chains_keep_a_draw_of_every_chain_after_the_warm_up():
    x = torch.linspace(-1, 1, 20)[:, None]
    ensemble = shoal.Ensemble.init(lambda: nn.Linear(1, 1), members=3)
    how = {"likelihood": shoal.likelihoods.Gaussian(0.5), "batch_size": 20, "progress": False}
    run = shoal.fit(ensemble, (x, x[:, 0]), steps=5, **how)
    begun = run.ensemble.weights["weight"].detach().clone()
    more = {**how, "method": "kde", "noise": 0.5, "strength": 0.5, "lr": 0.02}
    del more["progress"]
    drawn = draws_corners.repelling_chains(run, (x, x[:, 0]), warmup=4, draws=3, thin=2, **more)
    whole = shoal.fit(
        ensemble, (x, x[:, 0]), steps=10, optimizer={"name": "sgd", "momentum": 0.9},
        progress=False, **more,
    )  # fmt: skip
    assert drawn.ensemble.members == 9
    assert torch.equal(drawn.ensemble.weights["weight"][-3:], whole.ensemble.weights["weight"])
    assert not torch.equal(drawn.ensemble.weights["weight"][:3], begun)
    assert shoal.predict(drawn, x).members.shape[0] == 9


def test_a_file_has_one_header_and_computes_only_arms_that_it_lacks(tmp_path, monkeypatch):
    file, header = tmp_path / "rows.csv", ["problem", "seed", "arm", "value"]
    append_rows(file, header, [["linear", 0, "members", 1]])
    asked = []

    def finished(cells, act, *options):
        for cell in cells:
            asked.append(cell)
            yield cell, act(*cell)

    def compute(problem, seed, group):
        yield [["members", 2]]
        yield [["draws", 3]]

    monkeypatch.setattr(draws_corners, "finished", finished)
    cells = [("linear", 0, "plain"), ("linear", 1, "plain")]
    for _ in range(2):
        draws_corners.write_missing(
            file, header, cells, lambda *cell: ["members", "draws"], compute, 1
        )
    rows = [(row["seed"], row["arm"], row["value"]) for row in read_csv(file)]
    assert rows == [("0", "members", "1"), ("0", "draws", "3"), ("1", "members", "2"),
                    ("1", "draws", "3")]  # fmt: skip
    assert asked == [(cells[0], ["draws"]), (cells[1], ["members", "draws"])]

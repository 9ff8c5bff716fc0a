"""What the landscape of real networks must show, on handwritten digits."""

import pytest
import torch

import shoal
from shoal.analysis.diversity import diversity
from shoal.analysis.landscape import subspace
from shoal.analysis.landscape.averaging import averaged
from shoal.analysis.landscape.curves import Tunnel, connect
from shoal.analysis.landscape.planes import levelled, with_midpoints
from shoal.analysis.landscape.points import chosen
from shoal.analysis.landscape.subspace import Mode, sample_mode
from shoal.analysis.landscape.survey import evaluated, outputs, survey
from shoal.analysis.landscape.trajectories import embedded, tracks
from shoal.core.random import generator
from shoal.models import MLP, Blueprint, SmallCNN
from shoal.prediction import metrics

MEMBERS = 5


@pytest.fixture(scope="module")
def data():
    """Few training images, so that there are errors to differ in."""
    return shoal.data.load({"name": "digits", "test_size": 1497})


@pytest.fixture(scope="module")
def run(data, tmp_path_factory):
    """A plain ensemble whose learning rate stays high to the end, so that averaging has a point."""
    ensemble = shoal.Ensemble.init(Blueprint(SmallCNN((8, 16)), (1, 8, 8), 10), MEMBERS)
    return shoal.fit(
        ensemble,
        data,
        method="ensemble",
        temperature=0.0,
        lr=0.01,
        epochs=40,
        batch_size=32,
        keep_every=1,
        out=tmp_path_factory.mktemp("digits") / "run",
        progress=False,
    )


@pytest.fixture(scope="module")
def paths(run):
    return [track.last(10) for track in tracks(run, range(MEMBERS))]


def test_other_initialisations_lie_well_above_every_subspace_at_equal_accuracy(run, data, paths):
    mode, test = Mode(chosen(run.ensemble, [0]), paths[0]), data.test
    reference = outputs(mode.solution, test.x)
    members = evaluated(outputs(run.ensemble, test.x)[1:], test, run.likelihood, reference)
    usual = float(members.accuracy.mean())
    theirs = float(diversity(members.apart[0], members.accuracy).mean())
    reach, compared = torch.rand(100, generator=generator(0, "reach")), 0
    for name in subspace.registry:
        pred = sample_mode(subspace.registry.make(name), mode, reach, test.x)
        found = evaluated(pred.members, test, run.likelihood, reference)
        near = found.accuracy >= usual - 0.01
        if int(near.sum()) >= 10:  # fewer have no mean to speak of
            mine = diversity(found.apart[0], found.accuracy)[near]
            assert theirs > 1.4 * float(mine.mean()), (name, theirs, mine)
            compared += 1
    assert compared >= 4


def test_a_tunnel_keeps_the_loss_while_the_function_changes(data):
    ensemble = shoal.Ensemble.init(Blueprint(MLP((40, 40)), (1, 8, 8), 10), 2)
    settings = {"method": "ensemble", "temperature": 0.0, "progress": False}
    run = shoal.fit(ensemble, data, lr=3e-3, epochs=40, batch_size=32, **settings)
    curve, pair = Tunnel(5), chosen(run.ensemble, [0, 1])
    pivots = connect(pair, curve, data.train, steps=200, places=8)
    valley = curve.coefficients(torch.linspace(0, 1, 31, dtype=torch.float64))
    path = with_midpoints(levelled(pivots, valley, data.train, run.likelihood))
    torch.testing.assert_close(path[[0, -1]], valley[[0, -1]], rtol=0, atol=1e-3)
    t = torch.linspace(0, 1, 61, dtype=torch.float64)
    ends = outputs(pair, data.test.x)
    along = survey(pivots, path, data.train, run.likelihood)
    level = (1 - t) * along.loss[0] + t * along.loss[-1]
    assert float((along.loss / level - 1).abs().max()) < 0.1
    apart = survey(pivots, path, data.test, run.likelihood, ends).apart
    assert float(apart[0, 0]) == float(apart[1, -1]) == 0
    assert float(apart[0, -1]) > 0.03
    # Not at once.
    assert float(apart[0, 1]) < 0.7 * float(apart[0, -1])
    straight = survey(pair, torch.tensor([[0.5, 0.5]]), data.train, run.likelihood)
    assert float(straight.loss[0]) > 3 * float(level.max())


def test_an_ensemble_of_weight_averaged_members_is_best_on_clean_and_on_turned_digits(
    run, data, paths
):
    whole = averaged(paths)
    for split in (data.test, data.shifts["rotated-15"]):
        said = {name: shoal.predict(e, split) for name, e in (("plain", run), ("swa", whole))}
        scores = {
            "ensemble of averages": metrics.nll(said["swa"], split.y),
            "ensemble": metrics.nll(said["plain"], split.y),
            "one average": _mean_member(said["swa"], split.y),
            "one": _mean_member(said["plain"], split.y),
        }
        assert min(scores, key=lambda name: scores[name]) == "ensemble of averages", scores
        assert scores["ensemble"] < scores["one"]


def _mean_member(pred, y):
    each = [shoal.Predictive(member[None], pred.likelihood) for member in pred.members]
    return sum(metrics.nll(one, y) for one in each) / len(each)


def test_snapshots_of_one_member_are_nearer_than_those_of_two(run, data):
    found = tracks(run, range(2), most=10)
    assert found[0].epochs[0] == 0 and found[0].epochs[-1] == 40 and len(found[0].epochs) == 10
    late = [track.last(5) for track in found]
    said = torch.cat([outputs(path, data.test.x) for path in late])
    pred = shoal.Predictive(said, run.likelihood)
    apart = metrics.pairwise_disagreement(pred)
    assert float(apart[:5, :5].sum() / 20) < 0.8 * float(apart[:5, 5:].mean())
    places = embedded(pred)
    assert places.shape == (10, 2)
    own = torch.cdist(places[:5], places[:5]).sum() / 20
    assert float(own) < float(torch.cdist(places[:5], places[5:]).mean())

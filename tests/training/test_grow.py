"""Growing: new members move as they would in the whole, old ones not at all."""

import pickle

import pytest
import torch
from ready import ready
from small_runs import (
    assert_equal_trees,
    assert_one_sentence,
    assert_same_folder,
    assert_same_run,
    both,
    differ,
    frozen,
    normed,
    plain,
    points,
    quick,
    shoal_of,
)

import shoal
from shoal.core.errors import ConfigError
from shoal.engine.members.member_runner import MemberRunner
from shoal.inference.likelihoods import Categorical
from shoal.inference.posterior import Posterior
from shoal.inference.priors import Gaussian
from shoal.interaction.bandwidths import Fixed
from shoal.interaction.methods import METHODS, get
from shoal.interaction.repulsion import Repulsion
from shoal.interaction.spaces import Normalised, Weights
from shoal.models import MLP, Blueprint
from shoal.training import grow as grow_module
from shoal.training.fit import fit
from shoal.training.folder.run import load
from shoal.training.forces import forces
from shoal.training.grow import GROWTH, grow

OLD, NEW = 3, 2
COMPOSITIONS = {name: method.repulsion for name, method in METHODS.items()} | {
    "normalised weights": Repulsion(Normalised(Weights())),
    "fixed bandwidth": Repulsion(Weights(), bandwidth=Fixed(4.0)),
    "half of the points": get("forde", fraction=0.5).repulsion,
}


def rows_of(ensemble, start, stop):
    return {name: tensor[start:stop] for name, tensor in ensemble.items()}


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("build", [plain, normed])
@pytest.mark.parametrize("name", COMPOSITIONS)
@pytest.mark.parametrize("chunk", [None, 1])
def test_new_members_move_as_in_the_whole_ensemble(name, chunk, build):
    """The velocity beside frozen members is, row for row, that of the whole ensemble."""
    whole = shoal_of(build, members=OLD + NEW).train(False)
    posterior = Posterior(Categorical(), Gaussian(0.7), 40)
    x, y = points()
    x = x.double()
    batch, repulsion = (x, y), ready(COMPOSITIONS[name], x)
    expected, about = forces(whole, posterior, repulsion, batch, annealing=0.6)
    old, new = whole.slice_members(0, OLD), whole.slice_members(OLD, OLD + NEW)
    options = {"annealing": 0.6, "frozen": old, "mapping": MemberRunner(chunk=chunk)}
    found, info = forces(new, posterior, repulsion, batch, **options)
    for parameter, velocity in found.items():
        torch.testing.assert_close(velocity, expected[parameter][OLD:], rtol=1e-10, atol=1e-13)
    torch.testing.assert_close(info.loss, about.loss[OLD:])
    if repulsion is not None:
        torch.testing.assert_close(info.h2, about.h2)
        torch.testing.assert_close(info.effective, about.effective)


def test_frozen_members_push_at_all():
    whole = shoal_of(members=OLD + NEW)
    posterior, repulsion = Posterior(Categorical(), Gaussian(), 40), METHODS["f-kde"].repulsion
    new = whole.slice_members(OLD, OLD + NEW)
    beside, _ = forces(new, posterior, repulsion, points(), frozen=whole.slice_members(0, OLD))
    alone, _ = forces(new, posterior, repulsion, points())
    assert differ(beside, alone)


def test_a_dead_frozen_member_pushes_nobody():
    whole = shoal_of(members=OLD + NEW)
    posterior, repulsion = Posterior(Categorical(), Gaussian(), 40), METHODS["kde"].repulsion
    old, new = whole.slice_members(0, OLD), whole.slice_members(OLD, OLD + NEW)
    old.alive[:] = False
    beside, _ = forces(new, posterior, repulsion, points(), frozen=old)
    alone, _ = forces(new, posterior, repulsion, points())
    for name, velocity in beside.items():
        torch.testing.assert_close(velocity, alone[name])


@pytest.mark.parametrize("method", ["ensemble", "kde", "svgd", "f-kde", "f-svgd"])
@pytest.mark.parametrize("build", [plain, normed])
def test_old_members_stay_bit_for_bit_and_new_ones_learn(method, build):
    run = quick(build, method=method)
    before = frozen(run.ensemble)
    grown = grow(run, NEW, data=points(), progress=False)
    assert grown.ensemble.members == OLD + NEW
    state = frozen(grown.ensemble)
    assert_equal_trees(rows_of(state, 0, OLD), before)
    assert_equal_trees(frozen(run.ensemble), before)
    fresh = frozen(shoal_of(build, OLD + NEW))
    assert differ(rows_of(state, OLD, OLD + NEW), rows_of(fresh, OLD, OLD + NEW))
    assert len(grown.history[-1]["member_loss"]) == NEW
    assert grown.history[-1]["loss"] < grown.history[0]["loss"]


def test_new_members_begin_as_those_of_a_larger_ensemble():
    run = quick(shoal_of(seed=7))
    grown = grow(run, NEW, data=points(), lr=1e-15, progress=False)
    fresh = frozen(shoal_of(members=OLD + NEW, seed=7))
    assert_equal_trees(
        rows_of(frozen(grown.ensemble), OLD, OLD + NEW), rows_of(fresh, OLD, OLD + NEW)
    )


BLUEPRINT = Blueprint(MLP((8,)), (3,), 4)


def test_the_folder_loads_predicts_and_grows_again(tmp_path):
    first = quick(shoal_of(BLUEPRINT), out=tmp_path / "a")
    grown = grow(tmp_path / "a", NEW, data=points(), out=tmp_path / "b", progress=False)
    opened = load(tmp_path / "b")
    assert_same_run(opened, grown)
    assert opened.config["members"] == OLD + NEW and opened.config["frozen"] == OLD
    assert opened.config["method"] == first.config["method"]
    x = points()[0]
    both_parts = shoal.predict(tmp_path / "b", x).members[:OLD]
    torch.testing.assert_close(both_parts, shoal.predict(first, x).members)
    again = grow(tmp_path / "b", 1, data=points(), method="kde", steps=3, progress=False)
    assert again.ensemble.members == OLD + NEW + 1
    assert again.config["frozen"] == OLD + NEW and again.config["method"] == "kde"
    assert_equal_trees(rows_of(frozen(again.ensemble), 0, OLD + NEW), frozen(opened.ensemble))


class Stop(Exception):
    pass


def stop(event):
    raise Stop


def test_a_grown_run_that_was_stopped_goes_on_as_any_other(tmp_path):
    quick(shoal_of(both), out=tmp_path / "a")
    run = load(tmp_path / "a", both)
    options = {"data": points(), "epochs": 4, "progress": False, "save_every": 0.0}
    grow(run, NEW, out=tmp_path / "whole", **options)
    with pytest.raises(Stop):
        grow(run, NEW, out=tmp_path / "stopped", callbacks=[stop], **options)
    resumed = grow(run, NEW, out=tmp_path / "stopped", resume=True, **options)
    assert resumed.history[-1]["epoch"] == 4
    assert_same_folder(tmp_path / "whole", tmp_path / "stopped")


def test_fit_resumes_a_grown_run_from_its_folder_alone(tmp_path):
    quick(shoal_of(BLUEPRINT), out=tmp_path / "a")
    options = {"epochs": 4, "progress": False, "save_every": 0.0}
    grow(tmp_path / "a", NEW, data=points(), out=tmp_path / "whole", **options)
    with pytest.raises(Stop):
        grow(tmp_path / "a", NEW, data=points(), out=tmp_path / "b", callbacks=[stop], **options)
    members = shoal_of(BLUEPRINT, OLD + NEW)
    options |= {"method": "f-kde", "batch_size": 10}
    fit(members, points(), frozen=OLD, out=tmp_path / "b", resume=True, **options)
    assert_same_folder(tmp_path / "whole", tmp_path / "b")


def test_members_of_several_architectures_grow_by_the_last():
    ensemble = shoal.Ensemble.init([(plain, 2), (normed, 1)])
    run = quick(ensemble)
    grown = grow(run, NEW, data=points(), progress=False)
    assert [group.members for group in grown.ensemble.groups] == [2, 1 + NEW]
    x = points()[0]
    torch.testing.assert_close(grown.ensemble(x)[:3], run.ensemble(x))


@pytest.mark.parametrize("more", [0, -1, 1.5, True])
def test_growing_by_nothing_is_refused(more):
    with pytest.raises(ConfigError) as error:
        grow(quick(), more, data=points())
    assert_one_sentence(error.value, "more must be a whole number from 1 on")


def test_data_that_cannot_be_loaded_again_must_be_given():
    with pytest.raises(ConfigError) as error:
        grow(pickle.loads(pickle.dumps(quick())))
    assert_one_sentence(error.value, "cannot be loaded", "data=(x, y)")


def test_settings_of_the_users_own_must_be_given_again():
    run = quick(schedule=lambda step, steps: 1.0)
    with pytest.raises(ConfigError) as error:
        grow(run, data=points())
    assert_one_sentence(error.value, "schedule", "your own")


def test_networks_of_unknown_origin_are_refused():
    run = quick()
    run.ensemble.builds = [None]
    with pytest.raises(ConfigError) as error:
        grow(run, data=points())
    assert_one_sentence(error.value, "no build for its networks")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"frozen": 3}, "leave none of 3"),
        ({"frozen": -1}, "frozen must be a whole number"),
        ({"frozen": 1, "method": "svgd", "adversarial": 0.1}, "Wasserstein flow"),
    ],
)
def test_what_cannot_be_frozen_is_refused(options, words):
    with pytest.raises(ConfigError) as error:
        quick(**options)
    assert_one_sentence(error.value, words)


# Growing until the next member is not worth its price.


def noisy(n=60, seed=0):
    """Points whose labels are partly wrong, so that members differ."""
    x, y = points(n, seed)
    wrong = torch.rand(n, generator=torch.Generator().manual_seed(seed)) < 0.3
    return x, torch.where(wrong, (y + 1) % 4, y)


def wild(**options):
    """Members that overfit: each further one lowers the NLL on other points."""
    settings = {"method": "ensemble", "epochs": 6, "lr": 0.2, "batch_size": 30}
    return quick(shoal_of(BLUEPRINT), noisy(), **settings, **options)


WORTH = {"until": "worth it", "validation": noisy(200, 1), "progress": False}


def test_growing_stops_when_the_next_member_is_not_worth_its_price():
    run = wild()
    one = run.worth(WORTH["validation"]).gain(1).value
    price = one / 4
    grown = grow(run, 2, price=price, **WORTH)
    assert grown.ensemble.members > OLD
    assert grown.worth(WORTH["validation"]).gain(1).value < price
    assert "less than the price" in grown.notes[-1]
    known = rows_of(frozen(grown.ensemble), 0, OLD)
    assert_equal_trees(known, frozen(run.ensemble))
    same = grow(run, price=2 * one, **WORTH)
    assert same.ensemble is run.ensemble and f"stopped at {OLD} members" in same.notes[-1]
    most = grow(run, 2, price=1e-9, most=OLD + 3, **WORTH)
    assert most.ensemble.members == OLD + 3 and "the most that were wanted" in most.notes[-1]


def test_growing_by_steps_goes_on_after_a_stop(tmp_path):
    run, options = wild(), WORTH | {"price": 1e-9, "most": OLD + 3, "save_every": 0.0}
    whole = grow(run, 2, out=tmp_path / "whole", **options)
    assert whole.folder == tmp_path / "whole" / f"members-{OLD + 3}"
    calls = []

    def stop_in_the_second(event):
        calls.append(event)
        if len(calls) == 8:  # six epochs of the first step, then two of the second
            raise Stop

    with pytest.raises(Stop):
        grow(run, 2, out=tmp_path / "b", callbacks=[stop_in_the_second], **options)
    resumed = grow(run, 2, out=tmp_path / "b", resume=True, **options)
    assert_same_run(resumed, whole)
    for size in (OLD + 2, OLD + 3):
        assert_same_folder(tmp_path / "whole" / f"members-{size}", tmp_path / f"b/members-{size}")
    kept = [(tmp_path / name / GROWTH).read_text() for name in ("whole", "b")]
    assert kept[0] == kept[1] and '"stopped"' in kept[0]


def test_growing_by_steps_uses_the_validation_data_of_the_run(tmp_path):
    run = wild(validation=0.3)
    share = grow(run, until="worth it", price=10.0, progress=False)
    assert "stopped at 3 members" in share.notes[-1]
    split = grow_module._validation(run, None, {})
    trained = {tuple(row) for row in run.given.data[0].tolist()} - {
        tuple(row) for row in split.x.tolist()
    }
    assert len(split) == 18 and len(trained) == 42


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"until": "worth it", "price": 0.1}, ["no member has seen", "validation=(x, y)"]),
        ({"until": "worth it"}, ["price", "price=0.001"]),
        ({"until": "worth it", "price": -1}, ["price must be positive"]),
        ({"until": "enough", "price": 0.1}, ['until must be "worth it"']),
        ({"price": 0.1}, ['add until="worth it"']),
        ({"until": "worth it", "price": 0.1, "most": 0}, ["most must be a whole number"]),
    ],
)
def test_a_rule_that_cannot_be_followed_is_refused(options, words):
    with pytest.raises(ConfigError) as error:
        grow(quick(), data=points(), **options)
    assert_one_sentence(error.value, *words)


def test_two_members_cannot_tell_what_a_third_is_worth():
    run = quick(shoal_of(members=2), method="ensemble")
    with pytest.raises(ConfigError) as error:
        grow(run, price=0.1, **WORTH)
    assert_one_sentence(error.value, "from 3 finite members on, not from 2")

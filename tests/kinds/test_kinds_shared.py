"""Members that share a trunk: grown ensembles, stored tensors, cached features."""

import pytest
import torch
from kinds_table import cases
from small_runs import assert_one_sentence

import shoal

pytestmark = pytest.mark.filterwarnings("ignore:members run:shoal.core.errors.ShoalWarning")

FROZEN = (
    "low-rank adapters on a CNN", "last layers on a CNN", "scales on a CNN",
    "low-rank adapters on BERT", "peft model",
)  # fmt: skip
TRAINED = ("multi-head", "batch-ensemble", "TabM")
OPTIONS = {"steps": 3, "batch_size": 6, "progress": False, "lr": 0.01}


def kinds(names):
    return [case for case in cases() if case.values[0].name in names]


def fitted(kind, **options):
    members = shoal.Ensemble.init(kind.build, 2)
    return shoal.fit(members, kind.training(), **OPTIONS, **options)


@pytest.mark.parametrize("kind", kinds(FROZEN + TRAINED))
def test_a_grown_ensemble_keeps_its_old_members(kind):
    run = fitted(kind)
    before = shoal.predict(run, kind.inputs).members
    grown = shoal.grow(run, 2, data=kind.training(), progress=False)
    after = shoal.predict(grown, kind.inputs).members
    assert len(after) == 4
    torch.testing.assert_close(after[:2], before)
    assert not torch.allclose(after[2], after[3])
    for name, tensor in run.ensemble.frozen_state.items():
        assert torch.equal(grown.ensemble.state[name], tensor)


@pytest.mark.parametrize("kind", kinds(FROZEN))
def test_training_moves_private_tensors_alone(kind):
    first, run = shoal.Ensemble.init(kind.build, 2).state, fitted(kind)
    for name, tensor in run.ensemble.state.items():
        if not name.startswith("weights/"):
            assert torch.equal(tensor, first[name]), name
    assert not run.ensemble.trained_shared and run.ensemble.frozen_state


@pytest.mark.parametrize("kind", kinds(TRAINED))
def test_training_moves_the_tensors_that_all_members_train(kind):
    first, run = shoal.Ensemble.init(kind.build, 2).state, fitted(kind)
    assert run.ensemble.trained_shared
    for name, tensor in run.ensemble.state.items():
        assert name == "alive" or not torch.equal(tensor, first[name]), name


@pytest.mark.parametrize("kind", kinds(("last layers on a CNN",)))
def test_cached_features_train_the_same_members(kind):
    plain, cached = fitted(kind), fitted(kind, cache=True)
    for name, tensor in plain.ensemble.weights.items():
        torch.testing.assert_close(cached.ensemble.weights[name], tensor)


@pytest.mark.parametrize("kind", kinds(("last layers on a CNN", "multi-head", "batch-ensemble")))
def test_units_of_a_shared_layer_are_not_matched(kind):
    """A permutation of private columns alone would change the function."""
    from shoal.analysis.landscape.curves import align

    with pytest.raises(shoal.ConfigError) as caught:
        align(shoal.Ensemble.init(kind.build, 2))
    assert_one_sentence(caught.value, "units cannot be matched")


@pytest.mark.parametrize("kind", kinds(("low-rank adapters on a CNN", "scales on a CNN")))
def test_a_learned_prior_is_on_trained_weights(kind):
    from shoal.analysis.evidence.curvature import diagonal
    from shoal.data.dataset import Split

    member = shoal.Ensemble.init(kind.build, 2).member(0).double()
    data = Split(kind.inputs.double(), kind.y)
    found = diagonal(member, shoal.likelihoods.Categorical(), data, 0.0)
    wanted = [p.detach().flatten() for p in member.parameters() if p.requires_grad]
    assert torch.equal(found.theta, torch.cat(wanted))
    assert (
        found.outputs(kind.inputs.double(), torch.zeros(1, len(found.theta)).double())
        .isfinite()
        .all()
    )


@pytest.mark.parametrize("kind", kinds(("TabM", "last layers on a CNN")))
def test_snapshots_are_points_only_without_tensors_that_all_train(kind, tmp_path):
    from shoal.analysis.landscape.trajectories import tracks

    run = fitted(kind, out=tmp_path, keep_every=1)
    if kind.name == "TabM":
        with pytest.raises(shoal.ConfigError) as caught:
            tracks(run, [0])
        assert_one_sentence(caught.value, "together")
        return
    (track,) = tracks(run, [0])
    wanted = run.ensemble(kind.inputs)[0]
    torch.testing.assert_close(track.points(kind.inputs)[-1], wanted)

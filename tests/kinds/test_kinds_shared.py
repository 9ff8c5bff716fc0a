"""Members that share a trunk: grown ensembles, stored tensors, cached features."""

import pytest
import torch
from kinds_table import cases

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

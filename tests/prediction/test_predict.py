import math
import warnings
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from shoal.core.errors import ConfigError, DataError, ShoalWarning
from shoal.data import Split
from shoal.inference.ensemble import Ensemble
from shoal.inference.likelihoods import Categorical, Gaussian
from shoal.prediction import predict

M, B = 3, 10
X = torch.randn(B, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


class Linear:
    """M linear maps [D, C]: outputs are known in closed form, and calls are counted."""

    def __init__(self, weights=None):
        generator = torch.Generator().manual_seed(1)
        self.maps = torch.randn(M, 2, 4, generator=generator, dtype=torch.float64)
        self.maps.requires_grad_()
        self.alive = torch.ones(M, dtype=torch.bool)
        self.members, self.dtype, self.device = M, torch.float64, torch.device("cpu")
        self.training, self.calls = True, []

    def train(self, mode):
        self.training = mode
        return self

    def __call__(self, x):
        self.calls.append((len(x), self.training, torch.is_grad_enabled(), x.dtype))
        return torch.einsum("bd,mdc->mbc", x, self.maps)


def expected(ensemble):
    return torch.einsum("bd,mdc->mbc", X, ensemble.maps.detach())


@pytest.mark.parametrize("batch_size", [1, 3, 10, 1024])
def test_batches_equal_the_whole(batch_size):
    ensemble = Linear()
    pred = predict(ensemble, X, batch_size=batch_size)
    torch.testing.assert_close(pred.members, expected(ensemble), rtol=1e-14, atol=1e-14)
    assert len(ensemble.calls) == math.ceil(B / batch_size)
    assert max(size for size, *_ in ensemble.calls) <= batch_size


def test_no_gradients_in_evaluation_mode_and_the_mode_comes_back():
    ensemble = Linear()
    pred = predict(ensemble, X)
    assert ensemble.calls == [(B, False, False, torch.float64)]
    assert ensemble.training
    assert not pred.members.requires_grad


def test_the_mode_comes_back_after_a_failure():
    ensemble = Linear()
    with pytest.raises(RuntimeError):
        predict(ensemble, torch.zeros(3, 7))
    assert ensemble.training


@pytest.mark.parametrize(
    "x",
    [
        X.numpy(),
        X.float(),
        np.asarray(X, dtype=np.float32),
        Split(X),
        torch.utils.data.DataLoader(torch.utils.data.TensorDataset(X, X), batch_size=4),
        [X[:6], X[6:]],
        ((part, None) for part in X.split(3)),
        [part.numpy() for part in X.split(3)],
    ],
    ids=["array", "float32", "array32", "split", "loader", "list", "generator", "arrays"],
)
def test_every_form_of_inputs_says_the_same(x):
    ensemble = Linear()
    pred = predict(ensemble, x)
    torch.testing.assert_close(pred.members, expected(ensemble), rtol=1e-6, atol=1e-6)
    assert {kind for *_, kind in ensemble.calls} == {torch.float64}


def test_the_likelihood_comes_from_the_argument_then_the_run_then_is_categorical():
    ensemble = Linear()
    run = SimpleNamespace(ensemble=ensemble, likelihood=Gaussian(0.3))
    assert predict(ensemble, X).likelihood == Categorical()
    assert predict(run, X).likelihood == Gaussian(0.3)
    assert predict(run, X, likelihood=Gaussian(0.5)).likelihood == Gaussian(0.5)


def test_dead_members_are_left_out_with_one_warning():
    ensemble = Linear()
    ensemble.alive = torch.tensor([True, False, True])
    with pytest.warns(ShoalWarning, match=r"members 1 of 3") as caught:
        pred = predict(ensemble, X, batch_size=2)
    assert len(caught) == 1
    torch.testing.assert_close(pred.members, expected(ensemble)[[0, 2]])


def test_members_that_predict_nan_are_left_out():
    ensemble = Linear()
    with torch.no_grad():
        ensemble.maps[0] = math.nan
        ensemble.maps[2] = math.inf
    with pytest.warns(ShoalWarning, match=r"members 0, 2 of 3"):
        pred = predict(ensemble, X)
    torch.testing.assert_close(pred.members, expected(ensemble)[[1]])


def test_without_a_living_member_there_is_no_prediction():
    ensemble = Linear()
    ensemble.alive = torch.zeros(M, dtype=torch.bool)
    with pytest.raises(DataError, match="all 3 members diverged"):
        predict(ensemble, X)


@pytest.mark.parametrize(
    ("x", "sentence"),
    [
        (torch.zeros(0, 2), "no data"),
        ([], "nothing to predict"),
        (torch.tensor([[1.0, math.nan]]), "not finite"),
        (np.array([["a", "b"]]), "not numbers"),
        ([[1.0, 2.0], [3.0]], "rows differ in length"),
        ([{"x": "text"}], "pairs|without tensors"),
        (3, "array, a tensor or a loader"),
    ],
)
def test_wrong_inputs_are_refused_in_one_sentence(x, sentence):
    with pytest.raises(DataError, match=sentence):
        predict(Linear(), x)


@pytest.mark.parametrize("batch_size", [0, -1, 2.5, "a", True, 10**400])
def test_batches_hold_something(batch_size):
    with pytest.raises(ConfigError, match="batch_size must be a whole number from 1 on"):
        predict(Linear(), X, batch_size=batch_size)


@pytest.mark.parametrize("source", [nn.Linear(2, 4), None])
def test_only_ensembles_predict(source):
    with pytest.raises(ConfigError, match="Ensemble, a Run or a run folder"):
        predict(source, X)


def test_folders_need_a_loader(tmp_path):
    with pytest.raises(ConfigError, match=r"shoal\.load\('runs/first'\)"):
        predict("runs/first", X)
    ensemble = Linear()
    opened = []
    run = SimpleNamespace(ensemble=ensemble, likelihood=Gaussian())
    pred = predict(tmp_path, X, load=lambda folder: opened.append(folder) or run)
    assert opened == [tmp_path]
    assert pred.likelihood == Gaussian()


def build():
    return nn.Sequential(nn.Linear(2, 5), nn.BatchNorm1d(5), nn.Dropout(0.5), nn.Linear(5, 4))


def test_a_real_ensemble_predicts_as_its_members_do_one_by_one():
    ensemble = Ensemble.init(build, members=3, seed=0).to(dtype=torch.float64)
    ensemble.train(True)
    ensemble(X)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pred = predict(ensemble, X, batch_size=4)
    assert ensemble.training
    for index in range(3):
        alone = ensemble.member(index)(X)
        torch.testing.assert_close(pred.members[index], alone.detach(), rtol=1e-12, atol=1e-12)


def test_another_device_leaves_the_ensemble_where_it_was(monkeypatch):
    monkeypatch.setitem(predict.__globals__, "usable_device", torch.device)  # meets it later
    ensemble = Ensemble.init(build, members=2, seed=0)
    before = ensemble.weights
    with pytest.raises((NotImplementedError, RuntimeError)):
        predict(ensemble, X, device="meta")
    assert ensemble.device == torch.device("cpu")
    assert all(after is before[name] for name, after in ensemble.weights.items())

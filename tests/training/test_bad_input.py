"""Whatever is wrong, one sentence says so, and nothing has changed."""

import contextlib
import os

import numpy as np
import pytest
import torch
from small_runs import (
    POINTS,
    assert_equal_trees,
    assert_one_sentence,
    assert_same_run,
    both,
    dropped,
    frozen,
    normed,
    plain,
    points,
    quick,
    shoal_of,
)
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import shoal
from shoal.core.errors import ConfigError, DataError, ShoalWarning, StorageError
from shoal.interaction.methods import METHODS

X, Y = points()
NAN = float("nan")


def line():
    return nn.Linear(3, 1)


def changed(tensor, place, value):
    tensor = tensor.clone()
    tensor[place] = value
    return tensor


def loader(x, y, **options):
    return DataLoader(TensorDataset(x, y), batch_size=10, **options)


DATA = {
    "no points": ((X[:0], Y[:0]), "there are no data"),
    "empty lists": (([], []), "there are no data"),
    "an empty loader": (loader(X[:0], Y[:0]), "empty"),
    "no batches": ([], "no data"),
    "a label too many": ((X, changed(Y, 7, 4)), "y[7] is 4", "classes 0 to 3"),
    "a negative label": ((X, changed(Y, 7, -1)), "y[7] is -1"),
    "a label too many, from a loader": (loader(X, changed(Y, 3, 9)), "batch 0", "y[3] is 9"),
    "nan in x": ((changed(X, (7, 2), NAN), Y), "x[7, 2]", "nan"),
    "infinity in x": ((changed(X, (0, 0), float("inf")), Y), "x[0, 0]", "inf"),
    "nan in x, from a loader": (loader(changed(X, (7, 2), NAN), Y), "x[7, 2]", "batch 0"),
    "fewer labels": ((X, Y[:-1]), "40 points", "39 points"),
    "fewer inputs": ((X[:-1], Y), "39 points", "40 points"),
    "inputs of another shape": ((X[:, :2], Y), "does not take inputs of shape (2,)"),
    "images": ((torch.rand(POINTS, 1, 8, 8), Y), "does not take inputs of shape (1, 8, 8)"),
    "flat inputs": ((X[:, 0], Y), "each data point must be a row"),
    "one-hot labels": ((X, nn.functional.one_hot(Y)), "argmax"),
    "no labels": (X, "no targets"),
    "four tensors": ((X, Y, Y, Y), "pair (x, y)"),
    "text": ((np.array([["a", "b", "c"]] * POINTS), Y), "not numbers"),
    "ragged rows": (([[1.0, 2.0, 3.0], [1.0]], [0, 1]), "regular"),
    "a name": ("digits", "not numbers"),
    "batches read only once": (iter([(X, Y)]), "only once"),
    "batches of four": ([(X.numpy(), Y.numpy(), Y.numpy(), Y.numpy())], "pair"),
}

TARGETS = {
    "nan in y": ((X, changed(X[:, 0], 7, NAN)), {}, "y[7]", "nan"),
    "two columns for one output": ((X, X[:, :2]), {}, "2 columns", "has 1"),
    "no output for the noise": (
        (X, X[:, 0]),
        {"likelihood": "heteroscedastic"},
        "needs 2 outputs",
        "has 1",
    ),
    "whole numbers to regress on": ((X, Y), {"likelihood": "gaussian"}, "float"),
    "real numbers as classes": ((X, Y.float()), {"likelihood": "categorical"}, "integers"),
    "fractions as classes": ((X, X[:, 0]), {"likelihood": "categorical"}, "not a class"),
}

SETTINGS = {
    "a method misspelt": ({"method": "fkde"}, "'fkde'", "did you mean 'f-kde'?"),
    "no method": ({"method": None}, "choose from", "svgd"),
    "an optimiser misspelt": ({"optimizer": "adan"}, "'adan'", "did you mean 'adam'?"),
    "an optimiser across members": ({"optimizer": "LBFGS"}, "mixes members", "adam"),
    "an optimiser's setting": ({"optimizer": {"name": "sgd", "momentun": 1}}, "momentun"),
    "an optimiser's value": ({"optimizer": {"name": "sgd", "momentum": -1.0}}, "momentum", "-1"),
    "no rate": ({"lr": 0.0}, "positive, not 0"),
    "a negative rate": ({"lr": -1e-3}, "positive, not -0.001"),
    "a rate that is none": ({"lr": NAN}, "lr must be a finite number"),
    "a rate in words": ({"lr": "1e-3"}, "lr must be a finite number", "'1e-3'"),
    "no epochs": ({"epochs": 0}, "epochs", "from 1 on, not 0"),
    "half an epoch": ({"epochs": 0.5}, "epochs", "whole number"),
    "no steps": ({"steps": 0}, "steps", "from 1 on, not 0"),
    "epochs and steps": ({"epochs": 1, "steps": 1}, "epochs or steps, not both"),
    "below absolute zero": ({"temperature": -0.1}, "zero or positive, not -0.1"),
    "infinitely hot": ({"temperature": float("inf")}, "temperature must be a finite number"),
    "a strength that is none": ({"strength": NAN}, "strength must be a finite number"),
    "a clip of nothing": ({"clip": 0.0}, "clip must be positive"),
    "no batch": ({"batch_size": 0}, "batch_size", "from 1 on, not 0"),
    "half a batch": ({"batch_size": 0.5}, "batch_size", "whole number"),
    "half a seed": ({"seed": 0.5}, "seed", "whole number"),
    "a seed too long": ({"seed": 2**64}, "seed", "64 bits"),
    "a device misspelt": ({"device": "cdua"}, "'cdua' cannot be used", "cpu"),
    "a device that is not there": ({"device": "meta:x"}, "cannot be used"),
    "a precision misspelt": ({"precision": "float23"}, "did you mean 'float32'?"),
    "an engine misspelt": ({"engine": "vmpa"}, "'vmap'", "'vmpa'"),
    "chunks of nothing": ({"engine": "chunk:0"}, "chunk:SIZE"),
    "a schedule misspelt": ({"schedule": "cosin"}, "did you mean 'cosine'?"),
    "a schedule that is none": ({"schedule": 3}, "schedule must be a name"),
    "annealing misspelt": ({"annealing": "lineer"}, "did you mean 'linear'?"),
    "an adversary of no size": ({"adversarial": 0.0}, "positive, not 0"),
    "augmentation misspelt": ({"augment": "cropflip"}, "did you mean 'crop-flip'?"),
    "a prior misspelt": ({"prior": "gausian"}, "did you mean 'gaussian'?"),
    "a prior of no width": ({"prior": {"name": "gaussian", "std": 0.0}}, "positive, not 0"),
    "no prior": ({"prior": None}, "prior must be a name"),
    "a prior without draws": (
        {"prior": {"name": "function-space", "weights": {"name": "flat"}}},
        "a flat prior has none",
    ),
    "a likelihood misspelt": ({"likelihood": "categoricl"}, "did you mean 'categorical'?"),
}

FIRST_STEP = {
    "crops of what is no image": ({"augment": "crop-flip"}, "wants images"),
}
"""What only the first step can find."""


@contextlib.contextmanager
def refused(kind, ensemble, folder, *words):
    """A block that must end in one of our errors and change neither members nor disk."""
    before, random = frozen(ensemble), torch.get_rng_state()
    with pytest.raises(kind) as caught:
        yield
    assert_one_sentence(caught.value, *words)
    assert_equal_trees(frozen(ensemble), before)
    assert torch.get_rng_state().equal(random)
    assert not ensemble.training
    assert not folder.exists()


class TestRefusals:
    @pytest.mark.parametrize("case", DATA)
    def test_data(self, case, tmp_path):
        data, *words = DATA[case]
        ensemble = shoal_of(both)
        with refused(DataError, ensemble, tmp_path / "run", *words):
            quick(ensemble, data, out=tmp_path / "run", precision="float64")

    @pytest.mark.parametrize("case", TARGETS)
    def test_targets(self, case, tmp_path):
        data, options, *words = TARGETS[case]
        ensemble = shoal_of(line)
        with refused(DataError, ensemble, tmp_path / "run", *words):
            quick(ensemble, data, out=tmp_path / "run", precision="float64", **options)

    @pytest.mark.parametrize("case", SETTINGS)
    def test_settings(self, case, tmp_path):
        options, *words = SETTINGS[case]
        ensemble = shoal_of(dropped)
        with refused((ConfigError, DataError), ensemble, tmp_path / "run", *words):
            quick(ensemble, out=tmp_path / "run", **({"precision": "float64"} | options))

    @pytest.mark.parametrize("case", FIRST_STEP)
    def test_what_only_the_first_step_can_find(self, case, tmp_path):
        options, *words = FIRST_STEP[case]
        ensemble = shoal_of(dropped)
        with refused((ConfigError, DataError), ensemble, tmp_path / "run", *words):
            quick(ensemble, out=tmp_path / "run", **options)

    def test_a_network_instead_of_an_ensemble(self, tmp_path):
        with pytest.raises(ConfigError) as caught:
            shoal.fit(plain(), points(), out=tmp_path / "run")
        assert_one_sentence(caught.value, "not a Sequential", "Ensemble.init(build, members=5)")
        assert not (tmp_path / "run").exists()

    def test_weights_of_different_networks_cannot_repel_each_other(self, tmp_path):
        ensemble = shoal.Ensemble.init([(plain, 1), (dropped, 2)])
        with refused(ConfigError, ensemble, tmp_path / "run", "no common weight space", "f-kde"):
            quick(ensemble, method="kde", out=tmp_path / "run")

    @pytest.mark.parametrize("points_left", [1, 11])
    def test_a_last_batch_that_cannot_be_normalised(self, points_left, tmp_path):
        ensemble = shoal_of(normed)
        data = X[:points_left], Y[:points_left]
        with refused(DataError, ensemble, tmp_path / "run", "one data point", "batch_size=10"):
            quick(ensemble, data, out=tmp_path / "run")
        quick(shoal_of(dropped, members=1), data)

    def test_a_cuda_device_where_there_is_none(self, tmp_path):
        if torch.cuda.is_available():
            pytest.skip("there is one")
        ensemble = shoal_of(both)
        with refused(ConfigError, ensemble, tmp_path / "run", "'cuda' cannot be used"):
            quick(ensemble, device="cuda", out=tmp_path / "run")

    def test_a_loader_that_gives_less_than_it_promised(self):
        class Short:
            dataset = range(POINTS)

            def __len__(self):
                return 5

            def __iter__(self):
                return zip(X.split(10), Y.split(10), strict=True)

        with pytest.raises(DataError) as caught:
            quick(data=Short(), epochs=2)
        assert_one_sentence(caught.value, "is 5 batches", "gave 4")

    def test_a_bad_label_deep_in_a_loader(self, tmp_path):
        with pytest.raises(DataError) as caught:
            quick(data=loader(X, changed(Y, 33, 9)), out=tmp_path / "run", epochs=1)
        assert_one_sentence(caught.value, "batch 3", "y[3] is 9")

    def test_after_a_refusal_the_same_call_put_right_works(self, tmp_path):
        ensemble = shoal_of(both)
        with pytest.raises(DataError):
            quick(ensemble, augment="crop-flip", out=tmp_path / "run")
        assert_same_run(quick(ensemble, out=tmp_path / "run"), quick(both))

    def test_an_empty_folder_of_the_user_s_is_left_where_it_is(self, tmp_path):
        with pytest.raises(DataError):
            quick(augment="crop-flip", out=tmp_path)
        assert tmp_path.is_dir() and not list(tmp_path.iterdir())


class TestMembers:
    @pytest.mark.parametrize("count", [0, -1, None, 1.5])
    def test_fewer_than_one(self, count):
        with pytest.raises(ConfigError) as caught:
            shoal.Ensemble.init(plain, count)
        assert_one_sentence(caught.value, "at least one member")

    @pytest.mark.parametrize("legacy", [False, True])
    @pytest.mark.parametrize("method", list(METHODS))
    def test_a_single_one_is_not_repelled_by_anybody(self, method, legacy):
        run = quick(shoal_of(members=1), method=method, legacy=legacy)
        assert all(row["push"] == row["ratio"] == 0 for row in run.history)
        assert all(tensor.isfinite().all() for tensor in run.ensemble.weights.values())
        assert run.ensemble.alive.all() and run.notes == []
        if not legacy:
            alone = quick(shoal_of(members=1), method="ensemble")
            for name, tensor in run.ensemble.weights.items():
                torch.testing.assert_close(tensor, alone.ensemble.weights[name])

    @pytest.mark.parametrize("method", list(METHODS))
    def test_a_factory_that_seeds_itself_makes_members_that_differ_all_the_same(self, method):
        def seeded():
            torch.manual_seed(0)
            return plain()

        with pytest.warns(ShoalWarning, match="equal members"):
            ensemble = shoal_of(seeded)
        run = quick(ensemble, method=method)
        assert all(tensor.isfinite().all() for tensor in run.ensemble.weights.values())
        first, second = run.ensemble.weights["0.weight"][:2]
        assert not first.equal(second)

    @pytest.mark.parametrize("method", list(METHODS))
    def test_members_made_equal_by_hand_stay_finite(self, method):
        ensemble = shoal_of()
        with torch.no_grad():
            for tensor in ensemble.weights.values():
                tensor[1:] = tensor[0]
        repels = METHODS[method].repulsion is not None
        told = (
            pytest.warns(ShoalWarning, match="bandwidth collapsed")
            if repels
            else contextlib.nullcontext()
        )
        with told:
            run = quick(ensemble, method=method)
        assert all(tensor.isfinite().all() for tensor in run.ensemble.weights.values())
        assert run.ensemble.alive.all()


class TestPlaces:
    def test_below_a_file(self, tmp_path):
        (tmp_path / "file").write_text("mine")
        ensemble = shoal_of(both)
        words = "part of the path is a file", str(tmp_path / "file")
        with refused(StorageError, ensemble, tmp_path / "file" / "run", *words):
            quick(ensemble, out=tmp_path / "file" / "run")
        assert (tmp_path / "file").read_text() == "mine"

    def test_without_permission(self, tmp_path):
        if os.geteuid() == 0:
            pytest.skip("nothing is forbidden to the superuser")
        tmp_path.chmod(0o500)
        with refused(StorageError, shoal_of(both), tmp_path / "run", "no permission"):
            quick(both, out=tmp_path / "run")

    def test_a_name_that_is_too_long(self, tmp_path):
        folder = tmp_path / ("long" * 100)
        with pytest.raises(StorageError) as caught:
            quick(out=folder)
        assert_one_sentence(caught.value, "too long")

"""The look before training: every likely mistake is one warning, and sound data give none."""

import functools
import math
import warnings
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import shoal
from shoal.cli.main import main
from shoal.core.errors import DataError, ShoalError, ShoalWarning, StorageError
from shoal.data.batches.sources import batches_of
from shoal.data.sets.uci import PROBLEMS
from shoal.inference.likelihoods import default_for
from shoal.models import MLP, Blueprint
from shoal.training.options import look as looks
from shoal.training.options.look import CHECKS, look

N, D = 60, 4
RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(N, D))
LABELS = np.arange(N) % 3
REAL = X @ [1.0, -2.0, 0.5, 0.0] + 0.1 * RANDOM.normal(size=N)
BINARY = (X[:, 0] + X[:, 1] > 0).astype(float)
IMAGES = RANDOM.integers(0, 256, size=(N, 1, 6, 6))


def dense(outputs, *last, inputs=D):
    return lambda: nn.Sequential(nn.Linear(inputs, 8), nn.Tanh(), nn.Linear(8, outputs), *last)


def convolutional():
    return nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(32, 3))


def fitted(build, data, members=3, **options):
    settings = {"epochs": 1, "progress": False} | options
    return shoal.fit(shoal.Ensemble.init(build, members), data, **settings)


def told(build, data, members=3, **options):
    """The warnings of a run, each given once at the line that called `fit`, and kept with it."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run = fitted(build, data, members, **options)
    texts = tuple(str(each.message) for each in caught)
    assert {each.category for each in caught} <= {ShoalWarning}
    assert {each.filename for each in caught} <= {__file__}
    assert run.warnings == texts and set(texts) <= set(run.notes)
    return texts


def widened(*columns):
    return np.column_stack([X, *columns])


class Functional(nn.Module):
    """Ends in a function, where no module tells of it."""

    def __init__(self, end, outputs=3):
        super().__init__()
        self.inner, self.end = dense(outputs)(), end

    def forward(self, x):
        return self.end(self.inner(x))


class Scaling(nn.Module):
    """Standardises its inputs by itself."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(D, 3)

    def forward(self, x):
        return self.layer(x / 1000)


FLAG = {"likelihood": "bernoulli"}
RAW = X * [1, 5, 300, 1] + [0, 0, 700, 0]
RAW_IMAGES = IMAGES.astype(np.float32)
LEAK = widened(3 * REAL + 1)
HITS = {
    "softmax": (dense(3, nn.Softmax(-1)), (X, LABELS), {}, "leave out its last softmax"),
    "a function softmax": (
        lambda: Functional(lambda f: f.softmax(-1)), (X, LABELS), {}, "probabilities already",
    ),
    "sigmoid": (dense(1, nn.Sigmoid()), (X, BINARY), FLAG, "leave out its last sigmoid"),
    "a function sigmoid": (
        lambda: Functional(torch.sigmoid, 1), (X, BINARY), FLAG, "probabilities already",
    ),
    "sigmoid before softmax": (dense(3, nn.Sigmoid()), (X, LABELS), {}, "its last sigmoid"),
    "raw columns": (dense(3), (RAW, LABELS), {}, "x = (x - x.mean(0)) / x.std(0)"),
    "a tiny table": (dense(3), (1e-4 * X, LABELS), {}, "4 columns of x are far from unit scale"),
    "raw images": (convolutional, (RAW_IMAGES, LABELS), {}, "x = x / 255"),
    "a constant column": (
        dense(3, inputs=D + 1), (widened(np.full(N, 7.0)), LABELS), {}, "Column 4 of x is 7",
    ),
    "the target": (dense(1, inputs=D + 1), (LEAK, REAL), {}, "numpy.delete(x, 4, axis=1)"),
    "the label": (dense(3, inputs=D + 1), (widened(LABELS), LABELS), {}, "the target itself"),
    "0 and 1": (dense(1), (X, BINARY), {}, "type likelihood='bernoulli'"),
    "0 and 1 for two outputs": (dense(2), (X, BINARY), {}, "type y = y.astype(int)"),
    "one class": (dense(3), (X, LABELS * 0 + 1), {}, "of the class 1"),
    "one class of two": (dense(1), (X, BINARY * 0), FLAG, "of the class 0"),
    "two outputs too many": (dense(5), (X, LABELS), {}, "classes 3, 4 never occur in y"),
    "a gap in the labels": (dense(4), (X, LABELS + LABELS // 2), {}, "return_inverse=True"),
    "targets of known noise": (
        dense(1), (X, 1e6 * REAL), {"likelihood": "gaussian"}, "likelihood='homoscedastic'",
    ),
    "few points": (dense(3), (X[:3], LABELS[:3]), {"members": 5}, "type members=3"),
}  # fmt: skip


@pytest.mark.parametrize("name", HITS)
def test_a_likely_mistake_is_one_warning_with_the_line_to_write(name):
    build, data, options, words = HITS[name]
    (text,) = told(build, data, **options)
    assert words in text and text.endswith(".") and ";" in text


DARK = (IMAGES > 200).reshape(N, -1) * np.array([0.0, 1.0] * 18)
SOUND = {
    "logits": (dense(3), (X, LABELS), {}),
    "log_softmax": (dense(3, nn.LogSoftmax(-1)), (X, LABELS), {}),
    "relu": (dense(3, nn.ReLU()), (X, LABELS), {}),
    "one logit": (dense(1), (X, BINARY), FLAG),
    "one bounded logit": (dense(1, nn.Tanh()), (X, BINARY), FLAG),
    "normalised at the entry": (
        lambda: nn.Sequential(nn.BatchNorm1d(D), nn.Linear(D, 3)), (RAW, LABELS), {},
    ),
    "scaled by the network": (Scaling, (RAW, LABELS), {}),
    "bytes": (convolutional, (IMAGES.astype(np.uint8), LABELS), {}),
    "any unit of the targets": (dense(1), (X, 1e6 * REAL), {}),
    "0 and 1, named": (dense(1), (X, BINARY), {"likelihood": "homoscedastic"}),
    "a line through one input": (dense(1, inputs=1), (X[:, :1], 3 * X[:, 0]), {}),
    "few points of many classes": (dense(30), (X, LABELS), {}),
    "dark pixels": (dense(3, inputs=36), (DARK, LABELS), {}),
}  # fmt: skip


@pytest.mark.parametrize("name", SOUND)
def test_sound_data_give_no_warning(name):
    build, data, options = SOUND[name]
    assert told(build, data, **options) == ()


def test_outputs_of_a_last_layer_that_starts_at_zero_ask_for_no_drawn_networks(monkeypatch):
    def begun_at_zero():
        network = dense(3)()
        nn.init.zeros_(network[-1].weight)
        nn.init.zeros_(network[-1].bias)
        return network

    monkeypatch.setattr(looks, "drawn_outputs", lambda *given: pytest.fail("networks were drawn"))
    assert told(begun_at_zero, (X, LABELS)) == ()


def test_a_table_names_its_columns():
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame(LEAK, columns=[*"abcd", "price"])
    (text,) = told(dense(1, inputs=D + 1), (frame, pandas.Series(REAL)))
    assert "Column 'price' of x" in text and "x.drop(columns='price')" in text


def test_a_file_is_looked_at_and_the_command_line_says_it_in_one_line(tmp_path, capsys):
    np.savez(tmp_path / "own.npz", x=widened(np.full(N, 7.0)), y=LABELS)
    data = f"data={{name='file', train='{tmp_path / 'own.npz'}'}}"
    arguments = ["fit", "digits", data, "epochs=1", "-o", str(tmp_path / "run"), "--quiet"]
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        assert main(arguments) == 0
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("shoal: note: Column 4 of x is 7 for every data point")


def test_loaders_are_looked_at_where_it_costs_nothing():
    x, y = torch.tensor(RAW).float(), torch.tensor(LABELS)
    known = DataLoader(TensorDataset(x, y * 0), batch_size=20)
    first, second, *_ = told(dense(3), known)
    assert "far from unit scale" in first and "of the class 0" in second
    in_order = [(x[y == label] / 1000, y[y == label]) for label in range(3)]  # not one class each
    assert told(dense(3), in_order) == ()
    stream = iter([(x[start:stop], y[start:stop]) for start, stop in pairwise(range(0, 61, 10))])
    assert "far from unit scale" in told(dense(3), stream, epochs=None, steps=6)[0]  # all 6 come


def test_a_resumed_run_does_not_repeat_itself(tmp_path):
    (text,) = told(dense(3), (RAW, LABELS), out=tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again = fitted(dense(3), (RAW, LABELS), out=tmp_path, resume=True, epochs=2)
    assert again.warnings == (text,)
    assert shoal.load(tmp_path, dense(3)).warnings == (text,) and again.notes.count(text) == 1


def test_a_stepper_looks_at_its_first_batch():
    stepper = shoal.Stepper(shoal.Ensemble.init(dense(3), 2), n=N)
    with pytest.warns(ShoalWarning, match="far from unit scale") as caught:
        stepper((RAW, LABELS))
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        stepper((RAW, LABELS))


def test_it_changes_nothing():
    ensemble = shoal.Ensemble.init(lambda: nn.Sequential(nn.BatchNorm1d(D), dense(3)()), 2)
    before = {name: tensor.clone() for name, tensor in ensemble.state.items()}
    ensemble.train()
    torch.manual_seed(0)
    state = torch.get_rng_state()
    look(ensemble, default_for(torch.tensor(LABELS)), batches_of((X, LABELS)))
    assert ensemble.training and ensemble.groups[0].skeleton.training
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(tensor, before[name]) for name, tensor in ensemble.state.items())


def test_every_check_has_a_hit():
    found = set()
    for build, data, options, _ in HITS.values():
        members = options.get("members", 3)
        ensemble = shoal.Ensemble.init(build, members)
        batches = batches_of(data)
        named = options.get("likelihood")
        likelihood = (
            default_for(batches.y, ensemble(batches.x[:2]).shape[-1])
            if named is None
            else shoal.likelihoods.registry.make(named)
        )
        (text,) = look(ensemble, likelihood, batches, data, named is not None)
        found.add(text[:12])
    assert len(found) >= len(CHECKS)


@pytest.mark.parametrize("spec", ["toy-regression", "toy-classification"])
def test_toys_give_no_warning(spec):
    assert sentences_about(shoal.data.load(spec)) == []


IMAGE_SETS = ["mnist", "fashion-mnist", "kmnist", "notmnist", "cifar10", "svhn"]
TABLES = [{"name": "uci", "problem": problem} for problem in PROBLEMS]


LARGE = [pytest.param(name, marks=pytest.mark.nightly) for name in IMAGE_SETS]


@pytest.mark.parametrize("spec", ["digits", *LARGE, *TABLES], ids=str)
def test_no_data_set_gives_a_warning(spec):
    try:
        data = shoal.data.load(spec)
    except StorageError as error:
        pytest.skip(f"its files are not on this machine: {error}")
    assert sentences_about(data) == []


def sentences_about(data):
    """What the look says of a data set as it comes, and of its inputs as rows of a table."""
    y, found = data.train.y, []
    likelihood = default_for(y)
    for given in (data, (data.train.x.flatten(1), y)):
        batches = batches_of(given)
        build = Blueprint(MLP(), tuple(batches.x.shape[1:]), likelihood.width_for(y, data.outputs))
        found += look(shoal.Ensemble.init(build, 3), likelihood, batches, given, chosen=False)
    return found


UNITS = [(1e12, 1.0), (0.0, 1e-13), (0.0, 1e-60), (0.0, 1e20), (0.0, 1e100)]
OUTPUTS = {"homoscedastic": 1, "heteroscedastic": 2}


@functools.cache
def usual_scores(likelihood):
    return scores(REAL, likelihood, OUTPUTS[likelihood])


def scores(y, likelihood, outputs):
    run = fitted(dense(outputs), (X, y), epochs=3, likelihood=likelihood, lr=0.01)
    pred = shoal.predict(run, X)
    low, high = pred.interval(0.9)
    drawn = pred.sample(50, seed=1).double()
    found = shoal.evaluate(pred, y)
    width, deviation = (high - low).double().mean(), drawn.std(0).mean()
    return found | {"width": float(width), "drawn": float(deviation)}


@pytest.mark.parametrize("likelihood", OUTPUTS)
@pytest.mark.parametrize("location, scale", UNITS)
def test_targets_may_have_any_unit(location, scale, likelihood):
    usual = usual_scores(likelihood)
    other = scores(location + scale * REAL, likelihood, OUTPUTS[likelihood])
    for name in ("rmse", "crps", "sharpness", "width", "drawn"):
        assert other[name] / scale == pytest.approx(usual[name], rel=1e-3), name
    assert other["nll"] - math.log(scale) == pytest.approx(usual["nll"], abs=1e-3)
    assert other["coverage_90"] == pytest.approx(usual["coverage_90"], abs=0.02)


def test_a_loss_of_ones_own_gets_the_type_of_the_outputs():
    y, kinds = 1e12 + REAL, set()

    def loss(outputs, y):
        kinds.add(y.dtype)
        return (outputs[:, 0] - y).square()

    fitted(dense(1), (X, y), likelihood=shoal.likelihoods.Custom(loss))
    stepper = shoal.Stepper(shoal.Ensemble.init(dense(1), 2), n=N)
    stepper((X, y), loss=loss)
    assert torch.float64 not in kinds


@pytest.mark.parametrize("scale", [1e-200, 1e200])
def test_targets_whose_squares_no_number_holds_are_refused(scale):
    with pytest.raises(DataError, match="in another unit"):
        fitted(dense(1), (X, scale * REAL))


@pytest.mark.parametrize("location, scale", UNITS[:3])
def test_an_estimator_takes_targets_of_any_unit(location, scale):
    pytest.importorskip("sklearn")
    from shoal.sklearn import EnsembleRegressor

    model = EnsembleRegressor(members=2, epochs=5, random_state=0)
    usual, y = model.fit(X, REAL).score(X, REAL), location + scale * REAL
    assert model.fit(X, y).score(X, y) == pytest.approx(usual, abs=1e-3)


class TestIndices:
    @pytest.fixture
    def pandas(self):
        return pytest.importorskip("pandas")

    def test_another_order_or_other_labels_are_refused(self, pandas):
        x, y = pandas.DataFrame(X), pandas.Series(LABELS)
        mixed, moved = y.sample(frac=1, random_state=0), y.set_axis(range(5, N + 5))
        ensemble, run = shoal.Ensemble.init(dense(3), 2), fitted(dense(3), (x, y))
        stepper = shoal.Stepper(ensemble, n=N)
        for other, words in ((mixed, r"y = y.loc\[x.index\]"), (moved, r"y = y.to_numpy\(\)")):
            for call in (
                lambda other=other: fitted(dense(3), (x, other)),
                lambda other=other: fitted(dense(3), [(x, other)]),
                lambda other=other: shoal.evaluate(run, (x, other)),
                lambda other=other: stepper((x, other)),
            ):
                with pytest.raises(DataError, match=f"different indices.*{words}"):
                    call()
        with pytest.raises(DataError, match="x and sample_weight have different indices"):
            fitted(dense(3), (x, y), sample_weight=moved * 0 + 1)

    def test_the_same_index_is_fine_in_any_order(self, pandas):
        x, y = pandas.DataFrame(X), pandas.Series(LABELS)
        order = RANDOM.permutation(N)
        fitted(dense(3), (x.iloc[order], y.iloc[order]))
        fitted(dense(3), (x.iloc[order], y.iloc[order].to_numpy()))

    def test_estimators_refuse_them_too(self, pandas):
        pytest.importorskip("sklearn")
        from shoal.sklearn import EnsembleClassifier

        x, y = pandas.DataFrame(X, columns=list("abcd")), pandas.Series(LABELS)
        model, mixed = EnsembleClassifier(members=2, epochs=1), y.sample(frac=1, random_state=0)
        model.fit(x, y)
        for call in (model.fit, model.score, model.dataset):
            with pytest.raises(DataError, match="different indices"):
                call(x, mixed)


TEXTS = np.array(["a", "b", "c"] * (N // 3), dtype=object)
GAP = np.where(np.arange(N) == 5, None, TEXTS)
WRONG = {
    "integers to regress on": (1, (X, np.arange(N)), "y.astype(float)"),
    "integers for several outputs": (5, (X, np.arange(N) - 9), "to regress on y"),
    "two classes, one output": (1, (X, LABELS % 2), "likelihood='bernoulli'"),
    "classes from 1 on": (3, (X, LABELS + 1), "give it 4 outputs, or number the classes from 0"),
    "classes as floats": (3, (X, LABELS.astype(float)), "y = y.astype(int)"),
    "a gap in texts": (3, (X, GAP), "gap, None at y[5]; leave out such points"),
    "points in a list": (3, list(zip(X, LABELS, strict=True)), "a list of 60 data points"),
    "lists in a list": (3, list(zip(X.tolist(), LABELS.tolist(), strict=True)), "zip(*data)"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_message_points_the_right_way(name):
    outputs, data, words = WRONG[name]
    with pytest.raises(ShoalError) as caught:
        fitted(dense(outputs), data)
    assert words in str(caught.value)
    assert "one output per class" not in str(caught.value)
    assert "loader" not in str(caught.value)


def test_a_classifier_says_where_its_labels_have_a_gap():
    pytest.importorskip("sklearn")
    from shoal.sklearn import EnsembleClassifier

    with pytest.raises(DataError, match=r"gap, None at y\[5\]"):
        EnsembleClassifier(members=2, epochs=1).fit(X, GAP)


def test_plain_lists_are_arrays():
    usual = fitted(dense(3), (X, LABELS))
    rows, labels = X.tolist(), LABELS.tolist()
    batches = [(rows[:30], labels[:30]), (rows[30:], labels[30:])]
    for data in ((rows, labels), [rows, labels], [X, labels]):
        run = fitted(dense(3), data)
        assert run.history[-1]["loss"] == usual.history[-1]["loss"]
    assert len(fitted(dense(3), batches).history) == 1
    assert torch.equal(shoal.predict(usual, rows).members, shoal.predict(usual, X).members)

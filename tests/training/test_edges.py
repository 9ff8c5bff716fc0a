"""What a new user tries: it works as expected, or one sentence says what to type instead."""

import copy
import warnings

import numpy as np
import pytest
import torch
from small_runs import (
    CLASSES,
    POINTS,
    assert_equal_trees,
    assert_one_sentence,
    frozen,
    normed,
    plain,
    points,
    quick,
    shoal_of,
)
from torch import nn
from torch.nn.utils import parametrizations, prune
from torch.utils.data import DataLoader, TensorDataset

import shoal
from shoal.core.errors import ConfigError, DataError, ShoalWarning
from shoal.core.random import derive
from shoal.inference import members as initialise

X, Y = points()
WHOLE = (10 * X).long()
NAN = float("nan")
HUGE = 10**400


def refused(kind, act, *words):
    """The sentence of a refusal."""
    with pytest.raises(kind) as caught:
        act()
    assert_one_sentence(caught.value, *words)


def untouched(ensemble, folder, act, kind, *words):
    """A refusal that leaves the ensemble and the disk as they were."""
    before = frozen(ensemble)
    refused(kind, act, *words)
    assert_equal_trees(frozen(ensemble), before)
    assert not ensemble.training
    assert not list(folder.iterdir())


class TestShapesAtPrediction:
    @pytest.mark.parametrize("tries", [1, 2])
    def test_another_width_names_both(self, tries):
        run = quick()
        if tries == 2:  # a network that has predicted before does so in another way
            shoal.predict(run, X)
        refused(DataError, lambda: shoal.predict(run, X[:, :2]), "(2,)", "(3,)")
        assert len(shoal.predict(run, X)) == POINTS

    def test_real_numbers_for_an_embedding(self):
        run = quick(tokens, (torch.randint(0, 5, (POINTS, 4)), Y))
        shoal.predict(run, torch.zeros(2, 4, dtype=torch.int64))
        refused(DataError, lambda: shoal.predict(run, torch.rand(2, 4)), "float32")

    def test_a_token_that_the_embedding_does_not_have(self):
        run = quick(tokens, (torch.randint(0, 5, (POINTS, 4)), Y))
        shoal.predict(run, torch.zeros(2, 4, dtype=torch.int64))
        refused(DataError, lambda: shoal.predict(run, torch.full((2, 4), 9)), "out of range")

    def test_a_wider_batch_of_a_loader_in_the_middle_of_training(self):
        batches = [(X[:10], Y[:10]), (torch.rand(10, 5), Y[:10])]
        refused(DataError, lambda: quick(data=batches), "(5,)", "(3,)")


class Tokens(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(5, 6), nn.Linear(6, CLASSES)

    def forward(self, x):
        return self.head(self.embedding(x).mean(1))


def tokens():
    return Tokens()


class TestWholeNumbers:
    """Inputs of whole numbers mean the same real ones, unless the network looks them up."""

    @pytest.mark.parametrize("kind", [torch.int64, torch.int32, torch.int16, torch.int8])
    def test_a_linear_network_takes_them_as_real_numbers(self, kind):
        run, same = quick(data=(WHOLE.to(kind), Y)), quick(data=(WHOLE.float(), Y))
        assert_equal_trees(frozen(run.ensemble), frozen(same.ensemble))
        whole, real = (shoal.predict(run, x).members for x in (WHOLE.to(kind), WHOLE.float()))
        assert torch.equal(whole, real)

    def test_from_a_loader_too(self):
        loader = DataLoader(TensorDataset(WHOLE, Y), batch_size=10)
        same = DataLoader(TensorDataset(WHOLE.float(), Y), batch_size=10)
        run = quick(data=loader)
        assert_equal_trees(frozen(run.ensemble), frozen(quick(data=same).ensemble))
        torch.testing.assert_close(
            shoal.predict(run, loader).members, shoal.predict(run, WHOLE.float()).members
        )

    @pytest.mark.parametrize("options", [{"method": "forde"}, {"adversarial": 0.1}])
    def test_where_input_gradients_are_taken(self, options):
        run, same = (quick(data=(x, Y), **options) for x in (WHOLE, WHOLE.float()))
        assert_equal_trees(frozen(run.ensemble), frozen(same.ensemble))

    def test_in_double_precision(self):
        run = quick(data=(WHOLE, Y), precision="float64")
        same = quick(data=(WHOLE.double(), Y), precision="float64")
        assert_equal_trees(frozen(run.ensemble), frozen(same.ensemble))

    def test_an_embedding_looks_them_up(self):
        x = torch.randint(0, 5, (POINTS, 4))
        run = quick(tokens, (x, Y))
        expected = torch.stack([run.ensemble.member(i)(x) for i in range(3)])
        torch.testing.assert_close(shoal.predict(run, x).members, expected.detach())

    def test_each_of_mixed_architectures_takes_them_its_way(self):
        def real():
            return nn.Linear(4, CLASSES)

        x = torch.randint(0, 5, (POINTS, 4))
        ensemble = shoal.Ensemble.init([(tokens, 1), (real, 1)])
        run = quick(ensemble, (x, Y), epochs=1)
        shown = ensemble.member(0)(x), ensemble.member(1)(x.float())
        torch.testing.assert_close(shoal.predict(run, x).members, torch.stack(shown).detach())

    @pytest.mark.parametrize("kind", [bool, object, "float16", ">f4", "longdouble"])
    def test_other_kinds_of_numbers(self, kind):
        x = (WHOLE > 0).numpy().astype(kind)
        same = quick(data=((WHOLE > 0).float(), Y))
        assert_equal_trees(frozen(quick(data=(x, Y)).ensemble), frozen(same.ensemble))

    def test_brain_floats(self):
        run, same = quick(data=(X.bfloat16(), Y)), quick(data=(X.bfloat16().float(), Y))
        assert_equal_trees(frozen(run.ensemble), frozen(same.ensemble))


class Lazy(nn.Sequential):
    def __init__(self):
        super().__init__(nn.LazyLinear(8), nn.LazyBatchNorm1d(), nn.ReLU(), nn.LazyLinear(CLASSES))


def called_once():
    network = Lazy()
    network(X[:2])
    return network


class Kept(nn.Module):
    """A tensor that was computed from a parameter once and for all."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, CLASSES)
        self.doubled = 2 * self.layer.weight

    def forward(self, x):
        return x @ self.doubled.T


def on_meta():
    with torch.device("meta"):
        return plain()


class TestNetworks:
    def test_lazy_layers_say_what_to_do(self):
        refused(ConfigError, lambda: shoal_of(Lazy), "lazy", "in build, call the network once")

    def test_lazy_layers_that_were_called_once_train(self):
        run = quick(called_once)
        assert run.history[-1]["loss"] < run.history[0]["loss"]
        assert not torch.equal(*run.ensemble.weights["0.weight"][:2])

    def test_a_network_without_numbers(self):
        refused(ConfigError, lambda: shoal_of(on_meta), "'meta'", "on the CPU")

    def test_a_tensor_computed_once_from_the_weights(self):
        refused(ConfigError, lambda: shoal_of(Kept), "'doubled'", "compute it in forward")

    @pytest.mark.parametrize("members", [HUGE, 2**50, True, "5", NAN])
    def test_members_that_cannot_be(self, members):
        refused(ConfigError, lambda: shoal_of(members=members), "member")


def normalised(how):
    def build():
        return nn.Sequential(how(nn.Linear(3, 8)), nn.Tanh(), nn.Linear(8, CLASSES))

    return build


def pruned(layer):
    prune.l1_unstructured(layer, "weight", amount=5)
    return layer


@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
@pytest.mark.filterwarnings("ignore:There is a performance drop")
class TestComputedWeights:
    """Weights that a hook computes from others before every call."""

    def test_old_weight_norm_trains_as_the_new_one_does(self):
        old = quick(normalised(torch.nn.utils.weight_norm))
        new = quick(normalised(parametrizations.weight_norm))
        torch.testing.assert_close(
            shoal.predict(old, X).members, shoal.predict(new, X).members, rtol=1e-5, atol=1e-6
        )

    @pytest.mark.parametrize("how", [torch.nn.utils.weight_norm, pruned])
    def test_members_and_copies_are_the_same_networks(self, how):
        run = quick(normalised(how))
        outputs = shoal.predict(run, X).members
        members = [run.ensemble.member(i)(X).detach() for i in range(3)]
        torch.testing.assert_close(outputs, torch.stack(members))
        again = shoal.predict(copy.deepcopy(run.ensemble), X).members
        assert torch.equal(outputs, again)

    def test_pruned_weights_stay_zero(self):
        run = quick(normalised(pruned))
        member = run.ensemble.member(1)
        member(X)
        assert (member[0].weight == 0).sum() == 5


class Ends(nn.Module):
    """A network with a last step of its own."""

    def __init__(self, how):
        super().__init__()
        self.layer, self.how = nn.Linear(3, CLASSES), how

    def forward(self, x):
        return self.how(self.layer(x))


def silent(outputs):
    with torch.no_grad():
        return 2 * outputs


CUT = {
    "detached": lambda outputs: outputs.detach(),
    "data": lambda outputs: outputs.data,
    "without gradients": silent,
    "constant": lambda outputs: torch.ones(len(outputs), CLASSES),
}


class TestOutputs:
    @pytest.mark.parametrize("how", CUT)
    @pytest.mark.parametrize("method", ["ensemble", "kde", "f-kde"])
    @pytest.mark.filterwarnings("ignore:members run one after another")
    def test_outputs_that_do_not_depend_on_the_weights(self, how, method, tmp_path):
        ensemble = shoal_of(lambda: Ends(CUT[how]))
        words = "do not depend on its weights", "detach()"
        fit = lambda: quick(ensemble, method=method, out=tmp_path / "run")  # noqa: E731
        untouched(ensemble, tmp_path, fit, ConfigError, *words)

    def test_one_of_two_architectures(self, tmp_path):
        ensemble = shoal.Ensemble.init([(plain, 1), (lambda: Ends(CUT["detached"]), 1)])
        fit = lambda: quick(ensemble, out=tmp_path / "run")  # noqa: E731
        untouched(ensemble, tmp_path, fit, ConfigError, "do not depend on its weights")

    def test_fit_without_gradients(self):
        with torch.no_grad():
            refused(ConfigError, quick, "no_grad()", "around fit")

    def test_a_detached_trunk_is_the_users_choice(self):
        class Probe(nn.Module):
            def __init__(self):
                super().__init__()
                self.trunk, self.head = nn.Linear(3, 8), nn.Linear(8, CLASSES)

            def forward(self, x):
                return self.head(self.trunk(x).detach())

        run = quick(Probe, method="ensemble", prior="flat")
        assert run.history[-1]["loss"] < run.history[0]["loss"]

    @pytest.mark.parametrize("how", [lambda o: o.long(), lambda o: o + 1j])
    def test_outputs_that_are_not_real(self, how):
        refused(DataError, lambda: quick(lambda: Ends(how)), "must return real numbers")


class TestOnePoint:
    def loader(self, n, **options):
        x, y = points(n)
        return DataLoader(TensorDataset(x, y), batch_size=10, **options)

    def test_a_loader_whose_last_batch_cannot_be_normalised(self, tmp_path):
        ensemble = shoal_of(normed)
        fit = lambda: quick(ensemble, self.loader(31), out=tmp_path / "run")  # noqa: E731
        untouched(ensemble, tmp_path, fit, DataError, "one data point", "drop_last=True")

    def test_the_advice_helps(self):
        assert quick(normed, self.loader(31, drop_last=True)).ensemble.alive.all()
        assert quick(plain, self.loader(31)).ensemble.alive.all()

    def test_batches_whose_sizes_nobody_knows(self):
        batches = [(X[:10], Y[:10]), (X[:1], Y[:1])]
        refused(DataError, lambda: quick(normed, batches), "one data point", "drop_last=True")


def quantized(values):
    return torch.quantize_per_tensor(values, 0.1, 0, torch.qint8)


def nested(values):
    return torch.nested.nested_tensor(list(values))


def jagged(values):
    return torch.nested.nested_tensor(list(values), layout=torch.jagged)


TENSORS = {
    "complex": (lambda v: v + 0j, "complex64"),
    "meta": (lambda v: v.to("meta"), "'meta'"),
    "quantized": (quantized, "dequantize()"),
    "nested": (nested, "to_padded_tensor"),
    "jagged": (jagged, "to_padded_tensor"),
    "sparse": (lambda v: v.to_sparse(), "to_dense()"),
}


@pytest.mark.parametrize("kind", TENSORS)
@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
class TestTensors:
    def test_as_inputs(self, kind, tmp_path):
        make, word = TENSORS[kind]
        ensemble = shoal_of()
        fit = lambda: quick(ensemble, (make(X), Y), out=tmp_path / "run")  # noqa: E731
        untouched(ensemble, tmp_path, fit, DataError, "x is", word)

    def test_as_targets(self, kind, tmp_path):
        make, word = TENSORS[kind]
        ensemble = shoal_of()
        fit = lambda: quick(ensemble, (X, make(X)), out=tmp_path / "run")  # noqa: E731
        untouched(ensemble, tmp_path, fit, DataError, "y is", word)

    def test_at_prediction(self, kind):
        make, word = TENSORS[kind]
        run = quick(epochs=1)
        refused(DataError, lambda: shoal.predict(run, make(X)), "x is", word)
        refused(DataError, lambda: shoal.predict(run, [make(X)]), "x is", word)


SETTINGS = [
    ("lr", HUGE),
    ("lr", 1e300),
    ("lr", True),
    ("lr", 1j),
    ("temperature", 1e300),
    ("temperature", HUGE),
    ("strength", 1e300),
    ("strength", HUGE),
    ("clip", HUGE),
    ("adversarial", HUGE),
    ("adversarial", 1e300),
    ("epochs", HUGE),
    ("epochs", True),
    ("steps", HUGE),
    ("batch_size", HUGE),
    ("batch_size", True),
    ("keep_every", HUGE),
    ("frozen", HUGE),
    ("seed", HUGE),
    ("precision", []),
    ("device", "meta"),
    ("device", True),
    ("save_every", "a"),
    ("save_every", None),
    ("save_every", NAN),
    ("save_every", -1),
    ("callbacks", None),
    ("callbacks", 5),
    ("callbacks", [5]),
    ("prior", {"name": "gaussian", "std": HUGE}),
    ("prior", {"name": "gaussian", "std": 1e300}),
    ("prior", {"name": "gaussian", "std": 1e-300}),
    ("schedule", {"name": "cosine", "floor": 1e300}),
    ("optimizer", {"name": "sgd", "momentum": HUGE}),
    ("out", ""),
    ("out", "a\0b"),
    ("out", "\ud800"),
    ("out", b"a"),
    ("out", 5),
]


@pytest.mark.parametrize(
    ("name", "value"), SETTINGS, ids=[f"{n}-{i}" for i, (n, _) in enumerate(SETTINGS)]
)
def test_a_setting_that_cannot_be(name, value, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    ensemble, before = shoal_of(), shoal_of()
    options = {"out": "run", name: value} | ({"epochs": None} if name == "steps" else {})
    with pytest.raises(ConfigError) as caught:
        quick(ensemble, **options)
    assert_one_sentence(caught.value, name)
    assert len(str(caught.value)) < 250
    assert_equal_trees(frozen(ensemble), frozen(before))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("value", ["", "a\0b", 5])
def test_a_folder_that_cannot_be_loaded(value):
    refused(ConfigError, lambda: shoal.load(value), "folder")


@pytest.mark.parametrize("device", ["meta", "nope", True])
def test_a_device_that_cannot_predict(device):
    run = quick(epochs=1)
    refused(ConfigError, lambda: shoal.predict(run, X, device=device), "cannot be used", "cpu")


class Column(list):
    """A column of `Table`."""

    def __array__(self, dtype=None, copy=None):
        return np.array(list(self), dtype=dtype)


class Table:
    """What a DataFrame of any library has: named columns that each have a type."""

    def __init__(self, kinds=None, **columns):
        self.columns = list(columns)
        self.data = columns
        self.dtypes = [(kinds or {}).get(name, "") for name in columns]

    def __len__(self):
        return len(next(iter(self.data.values())))

    def __getitem__(self, name):
        return Column(self.data[name])

    def __array__(self, dtype=None, copy=None):
        rows = list(zip(*self.data.values(), strict=True))
        return np.array(rows, dtype=object)


def table(**changed):
    kinds = changed.pop("kinds", None)
    return Table(kinds, **({name: X[:, i].tolist() for i, name in enumerate("abc")} | changed))


class TestTables:
    def test_columns_of_numbers_become_floats_together(self):
        given = table(b=list(range(POINTS)), c=[k % 2 == 0 for k in range(POINTS)])
        flags = [float(k % 2 == 0) for k in range(POINTS)]
        x = torch.tensor([X[:, 0].tolist(), list(range(POINTS)), flags]).T
        run, same = quick(data=(given, Y)), quick(data=(x, Y))
        assert_equal_trees(frozen(run.ensemble), frozen(same.ensemble))
        assert torch.equal(shoal.predict(run, given).members, shoal.predict(run, x).members)

    def test_columns_of_whole_numbers_become_floats_too(self):
        given = Table(**{name: WHOLE[:, i].tolist() for i, name in enumerate("abc")})
        run, same = quick(data=(given, Y)), quick(data=(WHOLE.float(), Y))
        assert_equal_trees(frozen(run.ensemble), frozen(same.ensemble))

    @pytest.mark.parametrize(
        ("column", "kind", "word"),
        [
            (["x"] * POINTS, "", "str"),
            ([0.5, None] * (POINTS // 2), "", "NoneType"),
            ([1, 2] * (POINTS // 2), "category", "categorical"),
            ([1, 2] * (POINTS // 2), "Categorical", "categorical"),
            ([np.datetime64("2020-01-01")] * POINTS, "", "datetime64"),
        ],
    )
    def test_a_column_that_is_not_numbers_is_named(self, column, kind, word, tmp_path):
        given = table(b=column, kinds={"b": kind})
        ensemble = shoal_of()
        fit = lambda: quick(ensemble, (given, Y), out=tmp_path / "run")  # noqa: E731
        untouched(ensemble, tmp_path, fit, DataError, "column 'b' of x", word)
        run = quick(epochs=1)
        refused(DataError, lambda: shoal.predict(run, given), "column 'b' of x", word)

    def test_the_real_thing(self):
        pandas = pytest.importorskip("pandas")
        frame = pandas.DataFrame(X.numpy(), columns=list("abc"))
        whole = frame.assign(b=pandas.array(range(POINTS), dtype="Int64"), c=X[:, 2].numpy() > 0)
        x = torch.tensor(whole.astype(float).to_numpy()).float()
        run, same = quick(data=(whole, Y)), quick(data=(x, Y))
        assert_equal_trees(frozen(run.ensemble), frozen(same.ensemble))
        kinds = pandas.Categorical([10, 20] * (POINTS // 2))
        for column in ("x", kinds, pandas.Timestamp("2020-01-01")):
            wrong = frame.assign(b=column)
            refused(DataError, lambda wrong=wrong: quick(data=(wrong, Y)), "column 'b' of x")
        twice = pandas.DataFrame(X.numpy(), columns=["a", "a", "b"])
        assert_equal_trees(frozen(quick(data=(twice, Y)).ensemble), frozen(quick().ensemble))


BYTES = torch.randint(0, 256, (POINTS, 3), dtype=torch.uint8)


class TestBytes:
    """Bytes are divided by 255; a network that was trained on the one is not shown the other."""

    @pytest.mark.parametrize("kind", ["float32", "int64"])
    def test_numbers_to_255_for_a_network_of_bytes(self, kind):
        run = quick(data=(BYTES, Y))
        x = BYTES.numpy().astype(kind)
        with pytest.warns(ShoalWarning, match="divide x by 255, or pass it as uint8"):
            shoal.predict(run, x)
        loader = DataLoader(TensorDataset(torch.from_numpy(x)), batch_size=10)
        with pytest.warns(ShoalWarning, match="divide x by 255") as caught:
            shoal.predict(run, loader)
        assert len(caught) == 1

    @pytest.mark.parametrize("kind", ["float32", "int64"])
    @pytest.mark.parametrize("pass_loader", [False, True])
    @pytest.mark.filterwarnings("ignore:3 columns of x are far from unit scale")
    def test_bytes_for_a_network_of_numbers_to_255(self, kind, pass_loader):
        x = torch.from_numpy(BYTES.numpy().astype(kind))
        data = DataLoader(TensorDataset(x, Y), batch_size=10) if pass_loader else (x, Y)
        run = quick(data=data)
        refused(DataError, lambda: shoal.predict(run, BYTES), "divided by 255", "floats")

    @pytest.mark.filterwarnings("ignore:3 columns of x are far from unit scale")
    def test_a_folder_remembers(self, tmp_path):
        quick(data=(BYTES.float(), Y), out=tmp_path / "run")
        run = shoal.load(tmp_path / "run", plain)
        refused(DataError, lambda: shoal.predict(run, BYTES.numpy()), "divided by 255")

    def test_what_agrees_says_nothing(self):
        run = quick(data=(BYTES, Y))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            whole = shoal.predict(run, BYTES).members
            parts = shoal.predict(run, BYTES.float() / 255).members
            shoal.predict(run, 3 * torch.rand(5, 3) - 1)
            shoal.predict(quick(data=(BYTES.float() / 255, Y)), BYTES)
        torch.testing.assert_close(whole, parts)


class TestManyMembers:
    def test_they_are_not_compared_two_by_two(self, monkeypatch):
        calls, same = [], initialise._same
        monkeypatch.setattr(initialise, "_same", lambda a, b: calls.append(1) or same(a, b))
        shoal_of(members=300)
        assert len(calls) < 300

    def test_each_is_what_its_own_seed_draws(self):
        ensemble = shoal_of(members=20, seed=4)
        for i in range(20):
            torch.manual_seed(derive(4, "member", i))
            own = dict(plain().named_parameters())
            assert all(torch.equal(own[n], t[i]) for n, t in ensemble.weights.items())

    def test_those_that_differ_in_a_single_number_differ(self):
        def build():
            layer = nn.Linear(64, CLASSES)
            with torch.no_grad():
                layer.bias.zero_()
                drawn = float(layer.weight[1, 7])
                layer.weight.fill_(1.0)[1, 7] = drawn
            return layer

        with warnings.catch_warnings():
            warnings.simplefilter("error")
            ensemble = shoal_of(build, members=5)
        assert len(set(ensemble.weights["weight"][:, 1, 7].tolist())) == 5
        assert (ensemble.weights["bias"] == 0).all()

    def test_equal_ones_among_many_are_still_found(self):
        made = iter(range(60))

        def build():
            torch.manual_seed(next(made) // 2)
            return plain()

        with pytest.warns(ShoalWarning, match=r"members \[1, 3, 5, .* 30 in all\]"):
            ensemble = shoal_of(build, members=60)
        rows = torch.cat([t.detach().flatten(1) for t in ensemble.weights.values()], 1)
        assert len(rows.unique(dim=0)) == 60

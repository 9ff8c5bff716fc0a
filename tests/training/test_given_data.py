"""A run in memory knows its data; a run in a folder knows what one input looks like."""

import copy
import pickle
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import shoal
from shoal.core.errors import ConfigError, ShoalWarning
from shoal.core.structure import Structured
from shoal.data.dataset import Dataset, Split
from shoal.integrations import export
from shoal.training.folder.provenance import drawn_inputs

N, M = 20, 3
X = torch.linspace(-1, 1, 2 * N).view(N, 2)
Y = torch.cos(5 * X[:, 0])
TEST = X + 0.01, Y + 0.02


def build() -> nn.Module:
    return nn.Linear(2, 1)


def trained(data: object = (X, Y), make=build, **options: object) -> shoal.Run:
    ensemble = shoal.Ensemble.init(make, members=M, seed=0)
    settings = {"likelihood": "gaussian", "epochs": 2, "progress": False, **options}
    return shoal.fit(ensemble, data, **settings)  # pyright: ignore[reportArgumentType]


class Pair(nn.Module):
    """A network of two named inputs: whole numbers and real numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.last = nn.Embedding(7, 4), nn.Linear(6, 1)

    def forward(self, words: Tensor, size: Tensor) -> Tensor:
        return self.last(torch.cat([self.words(words).mean(1), size], 1))


PAIR = {"words": torch.arange(3 * N).view(N, 3) % 7, "size": X}


def test_the_description_of_one_input_makes_inputs_like_it(tmp_path) -> None:
    run = trained(({**PAIR}, Y), Pair, out=tmp_path / "run")
    loaded = shoal.load(tmp_path / "run", Pair)
    assert loaded.provenance["inputs"] == run.provenance["inputs"]
    drawn = drawn_inputs(loaded.provenance["inputs"], 5)
    assert isinstance(drawn, Structured) and drawn.original().keys() == PAIR.keys()
    assert drawn.tensors["words"].dtype == torch.int64 and drawn.tensors["words"].shape == (5, 3)
    assert 0 <= int(drawn.tensors["words"].min()) <= int(drawn.tensors["words"].max()) <= 6
    assert drawn.tensors["size"].dtype == torch.float32 and drawn.tensors["size"].shape == (5, 2)


def test_masks_are_drawn_as_ones() -> None:
    about = {"shape": [4], "dtype": "int64", "range": [0.0, 1.0]}
    assert bool((drawn_inputs({"tensors": {"x": about}}, 3) == 1).all())


@dataclass
class Own:
    a: Tensor


def test_an_object_of_ones_own_has_no_description() -> None:
    class Takes(nn.Linear):
        def forward(self, x: Own) -> Tensor:
            return super().forward(x.a)

    run = trained((Own(X), Y), lambda: Takes(2, 1))
    assert "inputs" not in run.provenance


LAST = nn.Linear(3, 1)
KINDS = {
    "arrays": ((X.numpy(), Y.numpy()), build),
    "Dataset": (Dataset("mine", Split(X, Y)), build),
    "words": ((PAIR["words"], Y), lambda: nn.Sequential(nn.Embedding(7, 1), nn.Flatten(), LAST)),
    "loader": (DataLoader(TensorDataset(X, Y), 10), build),
    "dict": (({**PAIR}, Y), Pair),
    "dict with labels": ({**PAIR, "labels": Y}, Pair),
    "tuple": (((PAIR["words"], X), Y), Pair),
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_data_gives_example_inputs(kind: str, tmp_path) -> None:
    data, make = KINDS[kind]
    run = trained(data, make, out=tmp_path / "run")
    here, there = (
        export._rows(each, each.ensemble, None, export._known_data(each))
        for each in (run, shoal.load(tmp_path / "run", make))
    )
    first, second = ([here], [there]) if isinstance(here, Tensor) else _parts(here, there)
    assert [t.shape for t in first] == [t.shape for t in second]
    assert [t.dtype for t in first] == [t.dtype for t in second]
    assert run.ensemble(there).shape == (M, 64, 1)


def _parts(*inputs: Structured) -> list[list[Tensor]]:
    assert len({repr(each.form) for each in inputs}) == 1
    return [list(each.tensors.values()) for each in inputs]


def test_export_to_onnx_right_after_fit(tmp_path) -> None:
    pytest.importorskip("onnxruntime")
    done = shoal.export(trained(), tmp_path / "a.onnx")
    assert done.difference < 1e-5 and done.metadata["inputs"][0]["shape"] == ["batch", 2]


def test_export_of_a_loaded_run_with_named_inputs(tmp_path) -> None:
    trained(({**PAIR}, Y), Pair, out=tmp_path / "run")
    done = shoal.export(shoal.load(tmp_path / "run", Pair), tmp_path / "a.pt2")
    about = {each["name"]: (each["dtype"], each["shape"]) for each in done.metadata["inputs"]}
    assert about == {"words": ("int64", ["batch", 3]), "size": ("float32", ["batch", 2])}
    assert done.difference < 1e-5


def test_grow_needs_no_data_again() -> None:
    weight = torch.linspace(0.5, 1.5, N)
    options = {"validation": TEST, "sample_weight": weight}
    run = trained(**options)
    grown = shoal.grow(run, 1, progress=False)
    told = shoal.grow(run, 1, data=(X, Y, weight), validation=TEST, progress=False)
    assert grown.ensemble.members == M + 1
    assert torch.equal(grown.ensemble.weights["weight"], told.ensemble.weights["weight"])
    assert grown.history[-1]["validation"] == told.history[-1]["validation"]
    assert grown.given is not None and grown.given.data[0] is X


def test_a_run_refers_to_its_data_and_does_not_copy_or_pickle_them() -> None:
    run = trained()
    assert run.given is not None and run.given.data[0] is X
    for other in (pickle.loads(pickle.dumps(run)), copy.deepcopy(run)):
        assert other.given is None and other.history == run.history


def test_compress_needs_no_data_again() -> None:
    with pytest.warns(ShoalWarning, match="no held-out data"):
        alone = shoal.compress(trained(), to=2)
    assert not alone.held_out and "of the training data" in str(alone)
    assert alone.run.ensemble.members == 2 and alone.points == N // 2
    held = shoal.compress(trained(validation=0.5), to=2)
    assert held.held_out and held.points == N // 4
    tested = shoal.compress(trained(Dataset("mine", Split(X, Y), test=Split(*TEST))), to=2)
    assert tested.held_out and tested.points == N // 2
    assert shoal.predict(tested.run, X).mean.shape == (N,)


def test_compress_of_a_loaded_run_names_all_that_is_missing(tmp_path) -> None:
    trained(out=tmp_path / "run")
    loaded = shoal.load(tmp_path / "run", build)
    with pytest.raises(ConfigError, match=r"test=\(x_test, y_test\)") as error:
        shoal.compress(loaded, to=2)
    assert "data=" not in str(error.value)
    with pytest.raises(ConfigError, match=r"data=\(x, y\), test=\(x_test, y_test\)"):
        shoal.compress(loaded, to=1, by="distil")
    done = shoal.compress(loaded, to=2, test=TEST, out=tmp_path / "small")
    small = shoal.load(tmp_path / "small", build)
    assert done.held_out and shoal.predict(small, X).mean.shape == (N,)
    assert small.provenance["inputs"] == loaded.provenance["inputs"]


def test_evaluate_and_report_take_the_test_set_of_a_data_set_in_memory(tmp_path) -> None:
    data = Dataset("mine", Split(X, Y), test=Split(*TEST))
    run = trained(data)
    shoal.report(run, tmp_path / "page.html")
    assert shoal.evaluate(run).test == run.results["evaluation"].test
    assert run.results["evaluation"].test["rmse"] > 0
    with pytest.raises(ConfigError, match="no test set"):
        shoal.evaluate(trained())


def test_an_estimator_does_not_keep_its_data() -> None:
    pytest.importorskip("sklearn")
    from shoal.sklearn import EnsembleRegressor

    model = EnsembleRegressor(members=2, epochs=1, early_stopping=False).fit(X.numpy(), Y.numpy())
    assert model.run_.given is None and model.run_.provenance["inputs"]

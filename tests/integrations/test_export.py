"""Exported files equal `predict`, in the exporter and in a process without Shoal."""

import json
import subprocess
import sys

import numpy as np
import pytest
import torch
from export_cases import CASES, perceptron
from small_runs import assert_one_sentence
from torch import nn

import shoal
from shoal.core.errors import ConfigError
from shoal.inference import likelihoods
from shoal.inference.ensemble import Ensemble
from shoal.inference.likelihoods import Gaussian, LogNormal, MixtureDensity, Poisson, StudentT
from shoal.integrations.export import export
from shoal.integrations.export.formats import onnx_session
from shoal.integrations.export.graph import TracedPrediction
from shoal.prediction import Predictive

for needed in ("onnx", "onnxscript", "onnxruntime"):
    pytest.importorskip(needed)

ONNX_ALONE = """
import json, sys
import numpy as np, onnxruntime
here = {"providers": ["CPUExecutionProvider"]}
for folder in sys.argv[1:]:
    session = onnxruntime.InferenceSession(f"{folder}/model.onnx", **here)
    about = json.loads(session.get_modelmeta().custom_metadata_map["shoal"])
    inputs = np.load(f"{folder}/in.npz")
    for size in (1, 7, 64):
        x = {each["name"]: inputs[each["name"]][:size] for each in about["inputs"]}
        names = [each["name"] for each in about["outputs"]]
        np.savez(f"{folder}/out-{size}.npz", **dict(zip(names, session.run(names, x))))
assert not {"torch", "shoal"} & set(sys.modules)
"""

TORCH_ALONE = """
import json, sys
import numpy as np, torch
for folder in sys.argv[1:]:
    extra = {"shoal.json": ""}
    module = torch.export.load(f"{folder}/model.pt2", extra_files=extra).module()
    about, inputs = json.loads(extra["shoal.json"]), np.load(f"{folder}/in.npz")
    for size in (1, 7, 64):
        x = [torch.from_numpy(inputs[each["name"]][:size]) for each in about["inputs"]]
        outputs = {name: t.detach().numpy() for name, t in module(*x).items()}
        np.savez(f"{folder}/out-{size}.npz", **outputs)
assert "shoal" not in sys.modules
"""


def rows(x, count=64):
    """Inputs repeated to `count`, as arrays by name."""
    tensors = x if isinstance(x, dict) else {"x": x}
    return {name: t[torch.arange(count) % len(t)] for name, t in tensors.items()}


def exported(request, folder, suffix, code):
    """Every case in a folder of its own; a fresh process, one for all, computes their outputs."""
    ensembles = {}
    for name in selected(request):
        place = folder / name.replace(" ", "-")
        place.mkdir()
        ensemble, x = CASES[name]()
        merge = suffix == "pt2" and name.startswith("lora")
        assert export(ensemble, place / f"model.{suffix}", x, merge=merge).difference <= 1e-5
        np.savez(place / "in.npz", **{key: t.numpy() for key, t in rows(x).items()})
        ensembles[name] = place, ensemble, x
    places = [str(place) for place, _, _ in ensembles.values()]
    done = subprocess.run([sys.executable, "-c", code, *places], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return ensembles


def selected(request):
    """The cases of the tests that ask for this fixture and are not left out."""
    items = [i for i in request.session.items if request.fixturename in i.fixturenames]
    return dict.fromkeys(item.callspec.params["name"] for item in items)


@pytest.fixture(scope="module")
def onnx_files(request, tmp_path_factory):
    return exported(request, tmp_path_factory.mktemp("onnx"), "onnx", ONNX_ALONE)


@pytest.fixture(scope="module")
def torch_programs(request, tmp_path_factory):
    return exported(request, tmp_path_factory.mktemp("programs"), "pt2", TORCH_ALONE)


def check_outputs(folder, ensemble, x):
    """Compare what the fresh process has computed with `predict`."""
    whole = rows(x)
    pred = shoal.predict(ensemble, whole if isinstance(x, dict) else whole["x"])
    for size in (1, 7, 64):
        outputs = np.load(folder / f"out-{size}.npz")
        expected = {
            "probs": pred.probs,
            "entropy": pred.entropy(),
            "aleatoric": pred.aleatoric(),
            "mutual_information": pred.mutual_information(),
            "disagreement": pred.disagreement(),
        }
        assert set(outputs) == set(expected)
        for name, value in expected.items():
            np.testing.assert_allclose(outputs[name], value[:size], atol=1e-5, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_onnx_equals_predict_without_shoal(name, onnx_files):
    check_outputs(*onnx_files[name])


# Both formats begin with the same graph; every network is exported to ONNX above.
PROGRAMS = [
    name if place < 3 else pytest.param(name, marks=pytest.mark.nightly)
    for place, name in enumerate(CASES)
]


@pytest.mark.slow
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_torch_program_equals_predict_without_shoal(name, torch_programs):
    check_outputs(*torch_programs[name])


def test_an_onnx_file_says_what_it_takes_and_refuses_the_rest(tmp_path):
    import onnxruntime

    x, y = torch.rand(40, 5), torch.randint(3, (40,))
    ensemble = Ensemble.init(perceptron, members=4)
    run = shoal.fit(ensemble, (x, y), method="ensemble", epochs=1, progress=False)
    scaling = {"columns": ["a", "b", "c", "d", "e"], "units": "mm"}
    done = export(
        run, tmp_path / "model.onnx", x, weights=[0.5, 0, 0.25, 0.25], members=True,
        classes=["cat", "dog", "fish"], preprocessing=scaling,
    )  # fmt: skip
    session = onnxruntime.InferenceSession(done.path, providers=["CPUExecutionProvider"])
    about = json.loads(session.get_modelmeta().custom_metadata_map["shoal"])
    assert about == done.metadata and about["classes"] == ["cat", "dog", "fish"]
    assert about["left_out"] == [1] and about["weights"] == [0.5, 0.25, 0.25]
    assert about["preprocessing"]["units"] == "mm" and about["preprocessing"]["input_range"]
    assert about["inputs"] == [{"name": "x", "dtype": "float32", "shape": ["batch", 5]}]
    assert session.get_inputs()[0].shape == ["batch", 5]
    pred = shoal.predict(run, x, weights=[0.5, 0, 0.25, 0.25])
    probs, members = session.run(["probs", "members"], {"x": x.numpy()})
    np.testing.assert_allclose(probs, pred.probs, atol=1e-5)
    np.testing.assert_allclose(members, pred.members[[0, 2, 3]], atol=1e-5)
    for wrong in (np.zeros((3, 4), np.float32), np.zeros((3, 5), np.float64)):
        with pytest.raises(Exception, match="INVALID_ARGUMENT|[Uu]nexpected"):
            session.run(None, {"x": wrong})
    assert not any(b"site-packages" in p.read_bytes() for p in tmp_path.iterdir())


def test_inner_values_may_have_the_names_of_outputs(tmp_path):
    """A graph whose inner nodes are called as its outputs and inputs still loads."""

    class Means(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.entropy = nn.Parameter(torch.ones(5))
            self.mean = nn.Linear(5, 3)

        def forward(self, probs):
            mean = (probs * self.entropy).mean(-1, keepdim=True)
            return self.mean(probs) + mean

    ensemble = Ensemble.init(Means, members=2)
    assert export(ensemble, tmp_path / "a.onnx", torch.randn(4, 5)).difference <= 1e-5


def test_diverged_members_are_left_out(tmp_path):
    ensemble, x = Ensemble.init(perceptron, members=3), torch.randn(6, 5)
    with torch.no_grad():
        ensemble.weights["0.weight"][1] = torch.nan
    with pytest.warns(shoal.ShoalWarning, match="diverged"):
        done = export(ensemble, tmp_path / "model.pt2", x)
    assert done.metadata["left_out"] == [1] and done.metadata["members"] == 2
    module = torch.export.load(done.path).module()
    kept = Predictive(ensemble(x)[[0, 2]].detach(), shoal.likelihoods.Categorical())
    torch.testing.assert_close(module(x)["probs"].detach(), kept.probs)


CALIBRATED = [each.calibrated(torch.tensor([1.7])) for each in (Gaussian(0.5), MixtureDensity(2))]


QUANTILES = [Gaussian(0.5), MixtureDensity(2), StudentT(3.0), LogNormal(), *CALIBRATED]


@pytest.mark.parametrize("likelihood", QUANTILES, ids=repr)
def test_quantiles_are_those_of_predict(likelihood):
    """The wide steps of a file find what bisection finds."""
    if not likelihood.calibration:  # training begins without one
        y = 100 + 15 * torch.randn(50, 1, generator=torch.manual_seed(0))
        likelihood = likelihood.initialised_from(y)
    outputs = torch.randn(3, 8, likelihood.width(1))
    weights = torch.tensor([0.5, 0.3, 0.2])
    for ndim, shape in ((None, (8, 1)), (1, (8,))):
        pred = Predictive(outputs, likelihood, weights, ndim)
        traced = TracedPrediction.of(outputs, likelihood, weights, ndim, 0.38)
        for level in (0.01, 0.5, 0.95):
            wanted = pred.quantile(level).float()
            assert wanted.shape == shape
            torch.testing.assert_close(traced.quantile(level), wanted, rtol=1e-5, atol=1e-5)


FACTOR = pytest.param("noise_factor", marks=pytest.mark.nightly)  # quantiles take half a minute


@pytest.mark.slow
@pytest.mark.parametrize("name", [FACTOR, "temperature"])
def test_a_file_has_the_calibrated_numbers(name, tmp_path):
    more = {}
    if name == "noise_factor":
        known = StudentT(3.0).initialised_from(40 + 3 * torch.randn(9))
        known, outputs, more = known.calibrated(torch.tensor([1.7])), 2, {"quantiles": (0.9,)}
    else:
        known, outputs = likelihoods.Categorical().calibrated(torch.tensor(2.5)), 3
    ensemble, x = Ensemble.init(lambda: perceptron(outputs), members=3), torch.randn(64, 5)
    done = export(ensemble, tmp_path / "model.onnx", x, likelihood=known, **more)
    session = onnx_session(done.path)
    names = [each.name for each in session.get_outputs()]
    found = dict(zip(names, session.run(names, {"x": x.numpy()}), strict=True))
    pred = shoal.predict(ensemble, x, likelihood=known)
    assert str(known) == done.metadata["likelihood"] and name in str(known)
    if name == "temperature":
        wanted = {"probs": (pred.members / 2.5).softmax(-1).mean(0)}
    else:
        wanted = {"stddev": pred.stddev, "quantile_0.9": pred.quantile(0.9)}
    for key, value in wanted.items():
        np.testing.assert_allclose(found[key], value, atol=2e-5, rtol=0)


def test_a_file_that_differs_is_an_error_and_never_appears(tmp_path, monkeypatch):
    ensemble, x = Ensemble.init(perceptron, members=2), torch.randn(6, 5)
    path = tmp_path / "model.pt2"
    path.write_text("an older file")
    average = TracedPrediction.average
    monkeypatch.setattr(
        TracedPrediction, "average", lambda self, values: 0.99 * average(self, values)
    )
    with pytest.raises(ConfigError) as caught:
        export(ensemble, path, x)
    assert_one_sentence(caught.value, "differs", "tolerance")
    assert [p.name for p in tmp_path.iterdir()] == ["model.pt2"]
    assert path.read_text() == "an older file"


@pytest.mark.parametrize(
    ("name", "options", "word"),
    [
        ("model.bin", {}, ".onnx"),
        ("model.pt2", {"precision": "int8"}, "onnx"),
        ("model.onnx", {"precision": "int4"}, "int8"),
        ("model.onnx", {"compile": True}, ".pt2"),
        ("model.onnx", {"x": None}, "export(run, path, x)"),
        ("model.onnx", {"classes": ["a"]}, "names"),
        ("model.onnx", {"preprocessing": {"f": print}}, "JSON"),
        ("model.onnx", {"likelihood": Poisson(), "quantiles": (0.5,)}, "quantiles"),
        ("model.onnx", {"likelihood": Gaussian(), "quantiles": (2,)}, "between 0 and 1"),
    ],
)
def test_what_cannot_be_exported(name, options, word, tmp_path):
    with pytest.raises(ConfigError) as caught:
        export(
            Ensemble.init(perceptron, members=2),
            tmp_path / name,
            **{"x": torch.ones(3, 5)} | options,
        )
    assert_one_sentence(caught.value, word)
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.parametrize(("precision", "limit"), [("float16", 1e-2), ("int8", 0.1)])
def test_fewer_bits_tell_their_difference(precision, limit, tmp_path):
    ensemble = Ensemble.init(
        lambda: nn.Sequential(nn.Linear(5, 256), nn.ReLU(), nn.Linear(256, 3)), members=2
    )
    x = torch.randn(9, 5)
    whole = export(ensemble, tmp_path / "whole.onnx", x)
    small = export(ensemble, tmp_path / "small.onnx", x, precision=precision)
    assert small.bytes < whole.bytes and whole.difference < small.difference <= limit
    with pytest.raises(ConfigError, match="differs"):
        export(ensemble, tmp_path / "none.onnx", x, precision=precision, tolerance=1e-7)
    assert not (tmp_path / "none.onnx").exists()


@pytest.mark.nightly
@pytest.mark.slow
def test_a_compiled_package_equals_predict(tmp_path):
    ensemble, x = Ensemble.init(perceptron, members=2), torch.randn(9, 5)
    try:
        done = export(ensemble, tmp_path / "model.pt2", x, compile=True)
    except ConfigError as error:
        pytest.skip(str(error))
    assert done.difference <= 1e-5

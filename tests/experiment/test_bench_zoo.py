"""`shoal bench --fit`, and networks of torchvision and transformers by their names there."""

import json
import sys
from dataclasses import replace
from types import ModuleType

import pytest
import torch
from torch import nn

from shoal.cli.main import main
from shoal.core.errors import ConfigError
from shoal.experiment.bench.battery import LOOP, Case, Contestant, EnsembleSteps, ModuleLoop
from shoal.experiment.bench.fits import measure_fits
from shoal.experiment.bench.networks import perceptron
from shoal.experiment.bench.zoo import Torchvision, Transformer, find_network

pytestmark = pytest.mark.usefixtures("warm")

CPU = torch.device("cpu")
NO_DROPOUT = (
    "hidden_dropout_prob",
    "attention_probs_dropout_prob",
    "dropout",
    "attention_dropout",
    "seq_classif_dropout",
)


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def small(name):
    """A network of transformers with two blocks of width 8, without dropout."""
    found = find_network(f"transformers:{name}")
    settings = {word: 0.0 for word in NO_DROPOUT} | {"patch_size": 4, "pad_token_id": 0}
    settings |= {"vocab_size": 9} if found.places == () else {}
    assert isinstance(found.architecture, Transformer)
    tiny = replace(found.architecture, width=8, depth=2, heads=2, settings=tuple(settings.items()))
    shape, places = ((3, 8, 8), ()) if found.words is None else ((5,), (5,) if found.places else ())
    words, classes = found.words and 9, 9 if found.places else found.classes
    return replace(
        found, architecture=tiny, input_shape=shape, words=words, places=places, classes=classes
    )


# Transformers --------------------------------------------------------------------------------


def test_a_type_of_transformers_is_a_classifier_or_a_language_model():
    bert, llama, vit = (find_network(f"transformers:{kind}") for kind in ("bert", "llama", "vit"))
    assert (bert.input_shape, bert.words, bert.places, bert.classes) == ((128,), 30522, (), 10)
    assert (llama.words, llama.places, llama.classes) == (32000, (128,), 32000)
    assert (vit.input_shape, vit.words, vit.members, vit.batch_size) == ((3, 224, 224), None, 5, 16)
    config = llama.architecture.config((128,), llama.classes)
    sizes = config.hidden_size, config.num_hidden_layers, config.vocab_size, config.use_cache
    assert sizes == (256, 4, 32000, False)


@pytest.mark.parametrize("name", ["bert", "distilbert", "modernbert", "llama", "vit"])
def test_the_loop_trains_a_transformer_as_the_ensemble_does(name):
    case = Case(small(name), 2, 4, "float64", "sgd", CPU, points=8, lr=0.1)
    ensemble = case.make()
    loop = ModuleLoop(case, case.make())
    ours = EnsembleSteps(case, ensemble, "ensemble", "vmap")
    loop(2), ours(2)
    for i, module in enumerate(loop.modules):
        for weight_name, weight in module.named_parameters():
            mine = ensemble.weights[weight_name][i]
            torch.testing.assert_close(mine, weight.detach(), atol=1e-9, rtol=0)


def test_fit_trains_a_transformer_whose_architecture_no_run_can_store():
    case = Case(small("bert"), 2, 2, "float32", "sgd", CPU, points=4)
    (row,) = measure_fits([Contestant(case, "shoal", "f-kde", "vmap")], 0.0)
    assert row["ms"] > 0 and row["model"] == "transformers:bert"


# Torchvision ---------------------------------------------------------------------------------


class Segments(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.conv = nn.Conv2d(3, classes, 1)

    def forward(self, x):
        return {"out": self.conv(x)}


@pytest.fixture
def torchvision(monkeypatch):
    """A library with a classifier, a segmentation, a video and a detection network."""

    def classifier(weights, num_classes):
        assert weights is None
        return nn.Sequential(nn.Flatten(), nn.LazyLinear(num_classes))

    def segmentation(weights, num_classes, weights_backbone):
        assert weights is None and weights_backbone is None
        return Segments(num_classes)

    builders = {"resnet50": (classifier, "resnet"), "lraspp": (segmentation, "segmentation.lraspp")}
    builders |= {"r3d_18": (classifier, "video.resnet"), "ssd": (classifier, "detection.ssd")}
    models = ModuleType("torchvision.models")
    for function, module in builders.values():
        function.__module__ = f"torchvision.models.{module}"

    def builder(name):
        function, module = builders[name]
        function.__module__ = f"torchvision.models.{module}"
        return function

    models.list_models = lambda: list(builders)
    models.get_model_builder = builder
    models.get_model = lambda name, **options: builder(name)(**options)
    monkeypatch.setitem(sys.modules, "torchvision", ModuleType("torchvision"))
    monkeypatch.setitem(sys.modules, "torchvision.models", models)


def test_networks_of_torchvision_have_the_inputs_of_their_kind(torchvision):
    found = {name: find_network(f"torchvision:{name}") for name in ("resnet50", "lraspp", "r3d_18")}
    assert {name: each.input_shape for name, each in found.items()} == {
        "resnet50": (3, 224, 224), "lraspp": (3, 224, 224), "r3d_18": (3, 16, 112, 112)
    }  # fmt: skip
    assert found["lraspp"].places == (224, 224) and found["resnet50"].places == ()
    assert Torchvision("lraspp").build((3, 4, 4), 7).conv.out_channels == 7
    with pytest.raises(ConfigError, match="'torchvision:ssd' has outputs or a loss of its own"):
        find_network("torchvision:ssd")


def test_places_of_a_dict_are_trained_as_by_the_loop(torchvision):
    network = replace(find_network("torchvision:lraspp"), input_shape=(3, 4, 4), places=(4, 4))
    case = Case(network, 2, 4, "float64", "sgd", CPU, points=8, lr=0.1)
    ensemble = case.make()
    loop, ours = ModuleLoop(case, case.make()), EnsembleSteps(case, ensemble, "ensemble", "vmap")
    loop(2), ours(2)
    for i, module in enumerate(loop.modules):
        torch.testing.assert_close(ensemble.weights["conv.weight"][i], module.conv.weight.detach())


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("torchvision:resnet5", "torchvision has no network 'resnet5'; did you mean 'resnet50'"),
        ("transformers:lama", "transformers has no network 'lama'; did you mean 'llama'"),
        ("transformers:detr", "'transformers:detr' classifies neither images nor texts"),
        (
            "torchvison:resnet50",
            "there are no networks of 'torchvison'; did you mean 'torchvision'",
        ),
    ],
)
def test_unknown_networks_are_answered_with_a_name_that_exists(torchvision, name, sentence):
    with pytest.raises(ConfigError) as refusal:
        find_network(name)
    assert sentence in str(refusal.value)


def test_a_missing_library_is_told_in_a_line(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "torchvision", None)
    assert main(["bench", "--quick", "--quiet", "--models", "torchvision:resnet50"]) == 2
    complaint = capsys.readouterr().err
    assert "this needs torchvision" in complaint and "pip install torchvision" in complaint
    assert len(complaint.splitlines()) == 1


# Whole calls of fit --------------------------------------------------------------------------


def test_a_call_of_fit_has_a_start_and_milliseconds_per_step(monkeypatch):
    now = iter([0.0, 10.0, 10.4, 10.8, 11.6, 20.0])  # begin; ends of epochs of four steps
    monkeypatch.setattr("shoal.experiment.bench.fits.time.perf_counter", lambda: next(now))
    case = Case(perceptron(4), 2, 2, "float32", "sgd", CPU, points=8)
    (row,) = measure_fits([Contestant(case, "shoal", "ensemble", "vmap")], 1.5)
    assert row["rounds_ms"] == pytest.approx([100, 100, 200]) and row["steps_a_round"] == 4
    assert row["ms"] == pytest.approx(100) and row["setup_seconds"] == pytest.approx(10 - 0.4)


def test_the_command_times_fit_beside_the_loop(tmp_path, capsys):
    file = tmp_path / "fits.json"
    sizes = ["--members", "2", "--batch-size", "4", "--seconds", "0.01", "--device", "cpu"]
    asked = ["--models", "mlp", "--methods", "ensemble,nonsense", "-o", str(file)]
    assert main(["bench", "--fit", "--quick", "--quiet", *sizes, *asked]) == 0
    value = json.loads(file.read_text())
    assert value["settings"]["fit"] and value["settings"]["engines"] == ["auto"]
    loop, _, ours, wrong = value["steps"]
    assert loop["what"] == LOOP and "nonsense" in wrong["error"]
    assert ours["times_faster_than_loop"] == pytest.approx(loop["ms"] / ours["ms"])
    assert ours["setup_seconds"] > 0 and "ensemble, auto" in capsys.readouterr().out
    assert main(["bench", "--fit", "--predict", "--quiet"]) == 2

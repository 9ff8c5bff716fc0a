"""Exchange with the library peft: models as members, folders written and read."""

import copy
import json
import warnings

import kinds_networks as networks
import pytest
import torch
from kinds_table import IMAGES, TEXT
from small_runs import assert_one_sentence
from torch import nn

import shoal
from shoal.inference.adapting.layers import root_mean_square

library = pytest.importorskip("peft")
pytestmark = [
    pytest.mark.filterwarnings("ignore:members run:shoal.core.errors.ShoalWarning"),
    pytest.mark.filterwarnings("ignore:.*no digest:shoal.core.errors.ShoalWarning"),
]
"""The attention of the library cannot run under `vmap`."""


def mlp():
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))


def cnn():
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 5, 2, stride=2),
        nn.Flatten(), nn.Linear(20, 3),
    )  # fmt: skip


class Attends(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(networks.WORDS, 4)
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.last = nn.Linear(4, 3)

    def forward(self, x):
        x = self.embed(x)
        return self.last(self.attention(x, x, x)[0].mean(1))


FEATURES = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
NETWORKS = {
    "mlp": (mlp, FEATURES, ["0", "2"], ["4"]),
    "cnn": (cnn, IMAGES, ["0", "3"], ["5"]),
    "attention": (Attends, TEXT["input_ids"], ["embed", "attention"], ["last"]),
    "bert": (networks.bert, TEXT, ["query", "value"], ["classifier"]),
    "gpt2": (networks.gpt2, TEXT, ["c_attn"], None),
    "vit": (networks.vit, {"pixel_values": IMAGES}, ["q_proj", "v_proj"], ["classifier"]),
}
OUR_TARGETS = {"attention": ["embed", "attention"]}
"""The library adds adapters of the last projection of attention twice (huggingface/peft 3774)."""


def outputs(network, x):
    with torch.no_grad():
        found = network.eval()(**x) if isinstance(x, dict) else network.eval()(x)
    return getattr(found, "logits", found)


def peft_model(name, **options):
    make, x, targets, saved = NETWORKS[name]
    settings = {"r": 2, "target_modules": targets, "modules_to_save": saved} | options
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(1)
        base = make()
        return base, library.get_peft_model(copy.deepcopy(base), library.LoraConfig(**settings)), x


def from_pretrained(base, folder, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return library.PeftModel.from_pretrained(copy.deepcopy(base), folder, **options)


@pytest.mark.parametrize("name", NETWORKS)
def test_the_library_makes_our_members_from_our_folders(name, tmp_path):
    make, x, _, _ = NETWORKS[name]
    base, targets = make(), OUR_TARGETS.get(name)
    build = shoal.adapters.lora(base, rank=3, alpha=5.0, targets=targets, spread=0.5)
    ensemble = shoal.Ensemble.init(build, members=2)
    folders = shoal.adapters.save_peft(ensemble, tmp_path)
    assert [folder.name for folder in folders] == ["member-000", "member-001"]
    together = shoal.predict(ensemble, x).members
    for index, folder in enumerate(folders):
        theirs = outputs(from_pretrained(base, folder), x)
        ours = outputs(ensemble.member(index), x)
        torch.testing.assert_close(theirs, ours, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(theirs, together[index], rtol=1e-5, atol=1e-5)
        assert not torch.allclose(theirs, outputs(base, x), atol=1e-3)


@pytest.mark.parametrize("name", NETWORKS)
def test_our_folders_come_back(name, tmp_path):
    make, x, _, _ = NETWORKS[name]
    base = make()
    build = shoal.adapters.lora(base, rank=3, alpha=5.0, targets=OUR_TARGETS.get(name))
    ensemble = shoal.Ensemble.init(build, members=2)
    shoal.adapters.save_peft(ensemble, tmp_path)
    again = shoal.adapters.load_peft(base, tmp_path)
    assert again.weights.keys() == ensemble.weights.keys()
    for key, tensor in ensemble.weights.items():
        assert torch.equal(again.weights[key], tensor)
    found = shoal.predict(again, x).members
    torch.testing.assert_close(found, shoal.predict(ensemble, x).members, rtol=0, atol=0)


@pytest.mark.parametrize("name", NETWORKS)
def test_folders_of_the_library_are_read(name, tmp_path):
    base, model, x = peft_model(name, lora_alpha=3, use_rslora=True)
    for index in range(2):
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for key, parameter in model.named_parameters():
                if parameter.requires_grad and "out_proj" not in key:
                    parameter += 0.3 * torch.randn_like(parameter)
            model.save_pretrained(tmp_path / str(index))
        wanted = outputs(model, x)
    ensemble = shoal.adapters.load_peft(base, [tmp_path / "0", tmp_path / "1"])
    assert ensemble.members == 2
    torch.testing.assert_close(shoal.predict(ensemble, x).members[1], wanted)
    torch.testing.assert_close(outputs(ensemble.member(1), x), wanted, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("plain", [False, True])
def test_the_adapters_of_a_peft_model_are_private_and_differ(name, plain):
    base, model, x = peft_model(name)
    build = (lambda: copy.deepcopy(model)) if plain else shoal.adapters.peft(model)
    ensemble = shoal.Ensemble.init(build, members=3)
    trained = [n for n, p in model.named_parameters() if p.requires_grad]
    assert list(ensemble.weights) == trained
    found = shoal.predict(ensemble, x).members
    for index in range(3):
        torch.testing.assert_close(found[index], outputs(ensemble.member(index), x))
    assert not torch.allclose(found[0], found[1], atol=1e-8, rtol=1e-5)
    wide = [n for n in trained if "lora_B" in n]
    assert all(len(ensemble.weights[n].flatten(1).unique(dim=0)) == 3 for n in wide)
    assert not any(model.get_parameter(n).any() for n in wide)


def test_adapters_of_a_peft_model_are_drawn_as_ours():
    _, model, _ = peft_model("mlp", lora_alpha=3, modules_to_save=None)
    first, second = shoal.adapters.peft(model, spread=0.1)(), shoal.adapters.peft(model)()
    layer = first.base_model.model[0]
    change = layer.get_delta_weight("default")
    size = root_mean_square(layer.base_layer.weight)
    assert root_mean_square(change) == pytest.approx(0.1 * size, rel=1e-5)
    assert layer.base_layer.weight is second.base_model.model[0].base_layer.weight
    assert "LORA" in repr(shoal.adapters.peft(model))


def test_a_trained_peft_model_is_only_perturbed():
    _, model, x = peft_model("mlp")
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter += 1.0
    near = shoal.adapters.peft(model)()
    for (name, own), original in zip(near.named_parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(own, original, rtol=0.2, atol=0.2, msg=name)
        assert torch.equal(own, original) != own.requires_grad


def test_members_of_a_peft_model_are_written_as_the_library_does(tmp_path):
    base, model, x = peft_model("bert", lora_alpha=3)
    ensemble = shoal.Ensemble.init(shoal.adapters.peft(model), members=2)
    folders = shoal.adapters.save_peft(ensemble, tmp_path)
    for index, folder in enumerate(folders):
        theirs = outputs(from_pretrained(base, folder), x)
        torch.testing.assert_close(theirs, outputs(ensemble.member(index), x), rtol=0, atol=1e-6)
    again = shoal.adapters.load_peft(base, tmp_path)
    torch.testing.assert_close(
        shoal.predict(again, x).members, shoal.predict(ensemble, x).members, rtol=1e-5, atol=1e-6
    )


def test_factors_of_the_library_are_private_too():
    config = library.IA3Config(target_modules=["0", "2"], feedforward_modules=[])
    model = library.get_peft_model(mlp(), config)
    ensemble = shoal.Ensemble.init(shoal.adapters.peft(model), members=3)
    assert all("ia3_l" in name for name in ensemble.weights)
    found = ensemble(FEATURES)
    assert not torch.allclose(found[0], found[1], atol=1e-5)


def test_a_run_with_a_peft_model_trains_its_adapters_alone(tmp_path):
    _, model, x = peft_model("bert")
    ensemble = shoal.Ensemble.init(shoal.adapters.peft(model), members=2)
    before = {name: t.detach().clone() for name, t in ensemble.state.items()}
    y = torch.arange(12) % 3
    options = {"steps": 2, "batch_size": 6, "progress": False}
    run = shoal.fit(ensemble, {**x, "labels": y}, out=tmp_path / "run", **options)
    for name, tensor in run.ensemble.state.items():
        assert torch.equal(tensor, before[name]) != name.startswith("weights/"), name
    again = shoal.load(tmp_path / "run", shoal.adapters.peft(model))
    assert torch.equal(shoal.predict(again, x).members, shoal.predict(run, x).members)
    assert len(shoal.adapters.save_peft(run, tmp_path / "peft")) == 2


def shared_base():
    base = mlp()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = library.LoraConfig(r=2, target_modules=["0"])
        shoal.Ensemble.init(lambda: library.get_peft_model(base, config), members=2)


def frozen_model():
    _, model, _ = peft_model("mlp")
    shoal.adapters.peft(model.requires_grad_(False))


@pytest.mark.parametrize(
    "make, word",
    [
        (shared_base, "shoal.adapters.peft"),
        (frozen_model, "is_trainable=True"),
        (lambda: shoal.adapters.peft(mlp()), "adapters.lora"),
        (lambda: shoal.adapters.peft(peft_model("mlp")[1], spread=-1), "spread"),
    ],
)
def test_peft_models_that_cannot_be_members_are_one_sentence(make, word):
    with pytest.raises(shoal.ConfigError) as caught:
        make()
    assert_one_sentence(caught.value, word)


def saved(build, folder):
    return shoal.adapters.save_peft(shoal.Ensemble.init(build, members=1), folder)


def dilated():
    return nn.Sequential(nn.Conv2d(1, 2, 2, dilation=2), nn.Flatten(), nn.Linear(8, 3))


class Narrow(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, kdim=3)
        self.last = nn.Linear(4, 3)

    def forward(self, x):
        return self.last(self.attention(x, x[..., :3], x)[0])


@pytest.mark.parametrize(
    "build, word",
    [
        (lambda: shoal.adapters.last_layer(mlp()), "shoal.adapters.lora"),
        (lambda: shoal.adapters.scale(mlp()), "shoal.adapters.lora"),
        (lambda: shoal.adapters.lora(nn.Linear(4, 3), train=()), "nn.Sequential"),
        (lambda: shoal.adapters.lora(mlp(), train="*.bias"), "train"),
        (lambda: shoal.adapters.lora(dilated()), "dilation"),
        (lambda: shoal.adapters.lora(Narrow(), targets="attention"), "width"),
        (lambda: shoal.adapters.lora(Attends(), targets="attention.out_proj"), "twice"),
    ],
)
def test_what_the_library_cannot_hold_is_one_sentence(build, word, tmp_path):
    with pytest.raises(shoal.ConfigError) as caught:
        saved(build(), tmp_path)
    assert_one_sentence(caught.value, word)


def test_a_folder_of_members_is_not_mixed_with_others(tmp_path):
    saved(shoal.adapters.lora(mlp()), tmp_path)
    with pytest.raises(shoal.ConfigError) as caught:
        saved(shoal.adapters.lora(mlp()), tmp_path)
    assert_one_sentence(caught.value, "new folder")
    with pytest.raises(shoal.ConfigError):
        shoal.adapters.save_peft(mlp(), tmp_path / "other")


BAD_CONFIGS = [
    "", "[]", "{", '{"peft_type": "LORA"}', '{"peft_type": "LORA", "r": 2, "r": 3}',
    '{"peft_type": "IA3"}', '{"peft_type": "LORA", "r": true, "lora_alpha": 2}',
    '{"peft_type": "LORA", "r": 2, "lora_alpha": NaN}', '{"peft_type": "LORA", "r": 2}',
    '{"peft_type": "LORA", "r": 3, "lora_alpha": 2}',
    '{"peft_type": "LORA", "r": 2, "lora_alpha": 1e9}',
    '{"peft_type": "LORA", "r": 2, "lora_alpha": 2, "use_dora": true}',
    '{"peft_type": "LORA", "r": 2, "lora_alpha": 2, "bias": "all"}',
    '{"peft_type": "LORA", "r": 2, "lora_alpha": 2, "rank_pattern": {"0": 4}}',
    "[" * 100_000,
]  # fmt: skip


@pytest.mark.parametrize("text", BAD_CONFIGS)
def test_a_bad_config_is_one_sentence(text, tmp_path):
    (folder,) = saved(shoal.adapters.lora(mlp(), rank=2), tmp_path)
    (folder / "adapter_config.json").write_text(text)
    with pytest.raises(shoal.ShoalError) as caught:
        shoal.adapters.load_peft(mlp(), folder)
    assert_one_sentence(caught.value)


def changed(tensors):
    """Ways to spoil the tensors of a sound folder."""
    first, second = (f"base_model.model.0.lora_{side}.weight" for side in "AB")
    a, b = tensors[first], tensors[second]
    rest = {name: t for name, t in tensors.items() if name not in (first, second)}
    yield {}
    yield rest | {first: a}
    yield rest | {first: a.T.contiguous(), second: b}
    yield rest | {first: a[:, :2].contiguous(), second: b}
    yield rest | {first: a.flatten(), second: b}
    yield rest | {first: a.long(), second: b}
    yield tensors | {"base_model.model.0.lora_C.weight": a}
    yield tensors | {"base_model.model.9.lora_A.weight": a, "base_model.model.9.lora_B.weight": b}
    yield tensors | {"base_model.model.9.weight": a}
    yield tensors | {"base_model.model.4.weight": a}
    yield tensors | {"base_model.model.0.weight": torch.zeros(6, 4)}


@pytest.mark.parametrize("way", range(11))
def test_wrong_tensors_are_one_sentence(way, tmp_path):
    from shoal.core.storage.files import read_tensors, write_tensors

    (folder,) = saved(shoal.adapters.lora(mlp(), rank=2), tmp_path)
    path = folder / "adapter_model.safetensors"
    write_tensors(path, list(changed(read_tensors(path)))[way])
    with pytest.raises(shoal.ShoalError) as caught:
        shoal.adapters.load_peft(mlp(), folder)
    assert_one_sentence(caught.value)


def test_an_adapter_that_the_library_adds_twice_is_not_read(tmp_path):
    base, model, _ = peft_model("attention", init_lora_weights=False)
    model.save_pretrained(tmp_path, save_embedding_layers=False)
    with pytest.raises(shoal.ConfigError) as caught:
        shoal.adapters.load_peft(base, tmp_path)
    assert_one_sentence(caught.value, "twice")


def test_flipped_bytes_never_end_in_another_error(tmp_path):
    (folder,) = saved(shoal.adapters.lora(mlp(), rank=2), tmp_path)
    path = folder / "adapter_model.safetensors"
    sound = path.read_bytes()
    for place in range(0, 400, 7):
        path.write_bytes(sound[:place] + bytes([sound[place] ^ 0x15]) + sound[place + 1 :])
        try:
            shoal.adapters.load_peft(mlp(), folder)
        except shoal.ShoalError as error:
            assert_one_sentence(error)
    path.write_bytes(sound[:50])
    with pytest.raises(shoal.ShoalError):
        shoal.adapters.load_peft(mlp(), folder)
    path.unlink()
    (folder / "adapter_model.bin").write_bytes(b"pickled")
    with pytest.raises(shoal.StorageError) as caught:
        shoal.adapters.load_peft(mlp(), folder)
    assert_one_sentence(caught.value, "adapter_model.safetensors")


def test_folders_that_do_not_belong_together_are_one_sentence(tmp_path):
    builds = [shoal.adapters.lora(mlp(), rank=2), shoal.adapters.lora(mlp(), rank=3),
              shoal.adapters.lora(mlp(), rank=2, targets="0")]  # fmt: skip
    a, b, c = (saved(build, tmp_path / str(i))[0] for i, build in enumerate(builds))
    for pair in ([a, b], [a, c], [], [tmp_path / "none"]):
        with pytest.raises(shoal.ShoalError) as caught:
            shoal.adapters.load_peft(mlp(), pair)
        assert_one_sentence(caught.value)
    with pytest.raises(shoal.ConfigError):
        shoal.adapters.load_peft(cnn(), a)
    with pytest.raises(shoal.ConfigError):
        shoal.adapters.load_peft("mlp", a)


def test_the_config_names_each_layer_once(tmp_path):
    """Names of layers may end alike: '0' and '1.0', '2' and '1.2'."""
    inner = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    base = nn.Sequential(nn.Linear(4, 4), inner, nn.Linear(4, 3))
    build = shoal.adapters.lora(base, rank=2, targets=["0"], spread=0.5)
    ensemble = shoal.Ensemble.init(build, members=1)
    (folder,) = shoal.adapters.save_peft(ensemble, tmp_path)
    assert json.loads((folder / "adapter_config.json").read_text())["r"] == 2
    theirs = outputs(from_pretrained(base, folder), FEATURES)
    torch.testing.assert_close(theirs, outputs(ensemble.member(0), FEATURES), rtol=0, atol=1e-6)

"""Config files: what they may hold, what they mean, and what is said about the rest."""

from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import shoal
from shoal.core.errors import ConfigError, ShoalError, StorageError
from shoal.core.values import check_spec
from shoal.data import registry as datasets
from shoal.data.dataset import Dataset, Split
from shoal.experiment.build import check_names, default_folder, make_data, make_ensemble, train
from shoal.experiment.config import KEYS, Config, experiments, load_config, make_config, summary
from shoal.training.options.options import NAMES

TINY = ["data=toy-classification", "model.hidden=[8]", "members=2", "steps=4"]

RUN = """
data = {name = "digits", seed = 0, test_size = 500}
members = 3
model = [{name = "mlp", hidden = [16], activation = "relu", input_shape = [1, 8, 8], outputs = 10, \
members = 3}]
method = {name = "repulsion", kernel = {name = "rbf"}, flow = {name = "stein"}, strength = 1.0}
prior = {name = "gaussian", std = 1.0}
optimizer = {name = "sgd", momentum = 0.9}
adversarial = {name = "fgsm", epsilon = 0.01}
lr = 0.001
epochs = 2
"""


# What a file may hold


def test_the_keys_are_the_arguments_of_fit_and_what_is_trained():
    assert set(KEYS) == {*NAMES, "data", "out", "model", "members", "init_seed"}


def test_a_config_is_checked_as_the_options_of_fit_are():
    with pytest.raises(ConfigError, match="clip must be positive, not 0"):
        make_config({"data": "digits", "clip": 0})
    with pytest.raises(ConfigError, match="give epochs or steps, not both"):
        Config("name", "digits", epochs=1, steps=1)


def alike(*shape, classes=None):
    """Data of the shape that a set has which would have to be downloaded."""
    y = torch.zeros(2) if classes is None else torch.arange(2)
    names = None if classes is None else tuple(map(str, range(classes)))
    return Dataset("alike", Split(torch.zeros(2, *shape), y), classes=names)


STAND_INS = {
    "mnist": alike(1, 28, 28, classes=10),
    "fashion-mnist": alike(1, 28, 28, classes=10),
    "cifar10": alike(3, 32, 32, classes=10),
    "uci": alike(8),
}


@pytest.mark.parametrize("name", experiments())
def test_every_experiment_can_be_built(name):
    config = load_config(name)
    check_names(config)
    check_spec("data", config.data, datasets)
    assert config.name == name
    source = config.data if isinstance(config.data, str) else config.data["name"]
    data = STAND_INS[source] if source in STAND_INS else make_data(config)
    assert make_ensemble(config, data).members == config.members
    assert summary(experiments()[name]).endswith(".")


@pytest.mark.parametrize("name", [name for name in experiments() if name.endswith("-published")])
def test_published_variants_are_legacy_or_plain_and_have_a_corrected_one(name):
    published, corrected = load_config(name), load_config(name.removesuffix("-published"))
    assert published.legacy or published.method == "ensemble"
    assert not corrected.legacy
    assert published.model == corrected.model


# Overrides


@pytest.mark.parametrize(
    "change, key, value",
    [
        ("lr=0.5", "lr", 0.5),
        ("lr=1", "lr", 1),
        ("lr=1e-2", "lr", 0.01),
        ("lr=.5", "lr", 0.5),
        ("method=kde", "method", "kde"),
        ("method='kde'", "method", "kde"),
        (" seed = 3 ", "seed", 3),
        ("legacy=true", "legacy", True),
        ("prior.std=0.5", "prior", {"name": "gaussian", "std": 0.5}),
        ("prior={name='flat'}", "prior", {"name": "flat"}),
        ("model.hidden=[50, 50]", "model", {"name": "mlp", "hidden": [50, 50]}),
        ("adversarial=0.1", "adversarial", 0.1),
        ("data.seed=4", "data", {"name": "digits", "seed": 4}),
        ("strength=none", "strength", None),
        ("steps=10", "epochs", None),
        ("out=runs/a=b", "out", "runs/a=b"),
        ("device=cuda:0", "device", "cuda:0"),
        ("method.kernel.name=imq", "method", {"name": "ensemble", "kernel": {"name": "imq"}}),
    ],
)
def test_overrides(change, key, value):
    assert getattr(load_config("digits", [change]), key) == value


def test_a_plain_ensemble_in_place_of_a_repulsion_has_no_strength():
    assert load_config("toy-regression").strength == 100
    assert load_config("toy-regression", ["method=kde"]).strength == 100
    assert load_config("toy-regression", ["method=ensemble"]).strength is None
    assert load_config("toy-regression", ["method=ensemble", "strength=3"]).strength == 3


def test_later_overrides_build_on_earlier_ones(tmp_path):
    config = load_config("digits", ["prior=fan-in", "prior.scale=2", "adversarial=0.1"])
    assert config.prior == {"name": "fan-in", "scale": 2}
    changed = load_config("digits", ["adversarial=0.1", "adversarial.shared=true"])
    assert changed.adversarial == {"epsilon": 0.1, "shared": True}


def test_an_override_reaches_into_the_list_of_a_run(tmp_path):
    path = tmp_path / "config.toml"
    path.write_text(RUN)
    config = load_config(path, ["model.hidden=[4]", "members=7"])
    assert isinstance(config.model, list) and config.model[0]["hidden"] == [4]
    assert make_ensemble(config, make_data(config)).members == 7
    assert config.name == "digits"


# Mistakes


@pytest.mark.parametrize(
    "text, sentence",
    [
        (
            "data = 'digits'\nepoch = 3",
            "there is no key 'epoch' in a config; did you mean 'epochs'?",
        ),
        ("data = 'digits'\nlr = '1e-3'", "lr must be a number, not the text '1e-3'"),
        ("data = 'digits'\nlr = true", "lr must be a number, not true"),
        ("data = 'digits'\nlr = nan", "lr must be a number, not nan"),
        ("data = 'digits'\nepochs = 2.0", "epochs must be a whole number, not 2.0"),
        ("data = 'digits'\nseed = 99999999999999999999", "seed must be a whole number, not one of"),
        ("data = 'digits'\nlegacy = 1", "legacy must be true or false, not 1"),
        ("data = 'digits'\nmethod = ['kde']", "method must be a name or a table, not the list"),
        ("data = 'digits'\nlr = 2020-01-01", "lr must be a number, not 2020-01-01"),
        ("data = 3", "data must be a name or a table, not 3"),
        ("lr = 0.1", "a config needs a data set"),
        ("data = 'digits'\nmembers = 0", "members must be 1 or more, not 0"),
        ("data = 'digits'\nmodel = []", "model is an empty list"),
        ("data = 'digits'\nmodel = [{name = 'mlp'}]", "must be a whole number, not None"),
        (
            "data = 'digits'\nmembers = 4\nmodel = [{name = 'mlp', members = 1}, "
            "{name = 'linear', members = 2}]",
            "have 3 members together, but members is 4",
        ),
        ("lr = ", "is not sound TOML"),
        ("lr = 1\nlr = 2", "is not sound TOML"),
        ("\x00", "is not sound TOML"),
        ("lr = " + "9" * 5000, "is not sound TOML"),
        ("lr = " + "[" * 30_000, "too deeply nested"),
        ("lr = " + "{a=" * 15_000, "too deeply nested"),
        ("a." * 30_000 + "a = 1", "too deeply nested"),
        ("a." * 20 + "a = 1", "nested more than 12 levels deep"),
        ("#" * 70_000, "65,536 bytes"),
    ],
)
def test_mistakes_in_a_file(text, sentence, tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "change, sentence",
    [
        ("lr", "typed as key=value"),
        ("=3", "typed as key=value"),
        ("prior..std=1", "typed as key=value"),
        ("." * 50 + "=1", "typed as key=value"),
        ("epoch=3", "did you mean 'epochs'?"),
        ("epoch.x=3", "did you mean 'epochs'?"),
        ("lr=fast", "lr must be a number, not the text 'fast'"),
        ("model.hidden=[50,", "the value of model.hidden is not sound TOML"),
        ('lr="1"\nseed=3', "is not one TOML value"),
        ("lr.x=1", "lr.x cannot be set, since lr is 0.001 and not a table"),
        ("model.hidden={a=" * 15, "is not sound TOML"),
        ("data=" + "[" * 5000, "too deeply nested"),
    ],
)
def test_mistakes_in_an_override(change, sentence):
    with pytest.raises(ConfigError) as caught:
        load_config("digits", [change])
    assert sentence in str(caught.value)


@pytest.mark.parametrize(
    "change, sentence",
    [
        ("method=kdee", "there is no method called 'kdee'; did you mean 'kde'?"),
        (
            "method={name='kde',kernel='rbff'}",
            "there is no kernel called 'rbff'; did you mean 'rbf'?",
        ),
        ("method={name='kde',kernel={name='matern',nu='x'}}", "method.kernel.nu must be a number"),
        ("method={name='ensemble',kernel='rbf'}", "has no repulsion that could be changed"),
        ("prior.std=wide", "prior.std must be a number, not the text 'wide'"),
        ("prior=gausian", "did you mean 'gaussian'?"),
        ("schedule.floor=0.1", "schedule needs a name"),
        ("adversarial.epsilon=x", "adversarial.epsilon must be a number"),
        ("optimizer.name=3", "optimizer.name must be text"),
        ("augment={custom='mine'}", "your own 'mine', which a file cannot name"),
        ("method={custom='mine'}", "your own 'mine', which a file cannot name"),
    ],
)
def test_names_and_nested_settings_are_checked_before_any_work(change, sentence):
    with pytest.raises(ConfigError) as caught:
        check_names(load_config("digits", [change]))
    assert sentence in str(caught.value)


@pytest.mark.parametrize(
    "change, sentence",
    [
        ("model=resnet", "there is no model called 'resnet'"),
        ("model.dropout=x", "model.dropout must be a number"),
        ("model={name='mlp',input_shape=[3]}", "takes inputs of shape (3,), but inputs"),
        ("model=[{custom='mine',members=2}]", "your own 'mine', which a file cannot name"),
        ("model.hidden=[1000000000000]", "use fewer members or smaller networks"),
        ("members=1000000000000", "use fewer members or smaller networks"),
    ],
)
def test_networks_that_cannot_be_made(change, sentence):
    config = load_config("toy-classification", [change])
    with pytest.raises(ConfigError) as caught:
        make_ensemble(config, make_data(config))
    assert sentence in str(caught.value)


def test_names_that_are_no_experiment(tmp_path):
    with pytest.raises(ConfigError, match="did you mean 'digits'"):
        load_config("digit")
    with pytest.raises(StorageError, match="there is no file called nowhere.toml"):
        load_config("nowhere.toml")
    with pytest.raises(StorageError, match="is a folder"):
        load_config(tmp_path)
    (tmp_path / "latin.toml").write_bytes(b"data = '\xff'")
    with pytest.raises(ConfigError, match="not text in UTF-8"):
        load_config(tmp_path / "latin.toml")
    with pytest.raises(ShoalError):
        load_config("\0")
    with pytest.raises(ShoalError):
        load_config("x" * 5000)


def test_a_file_comes_before_an_experiment_of_its_name(tmp_path, monkeypatch):
    (tmp_path / "digits").write_text("data = 'toy-regression'")
    monkeypatch.chdir(tmp_path)
    assert load_config("digits").data == "toy-regression"


# From a config to a run, and back


@pytest.mark.parametrize(
    "changes",
    [
        [],
        ["method=kde", "legacy=true", "strength=2.5", "optimizer={name='sgd',momentum=0.9}"],
        ["method=f-kde", "legacy=true", "schedule=cosine", "annealing=linear", "clip=1"],
        [
            "method=f-kde",
            "method.kernel=laplace",
            "prior=fan-in",
            "adversarial=0.1",
            "precision=float64",
        ],
        ["data=toy-regression", "likelihood=heteroscedastic", "seed=5"],
        ["model=[{name='linear',members=1},{name='mlp',hidden=[4],members=2}]", "members=none"],
    ],
    ids=["plain", "legacy-weights", "legacy-functions", "composed", "regression", "mixed"],
)
def test_the_config_of_a_run_repeats_it(changes, tmp_path):
    config = load_config("digits", [*TINY, *changes])
    first = train(config, make_data(config), tmp_path / "first", progress=False)
    saved = tmp_path / "first" / "config.toml"
    again = load_config(saved)
    second = train(again, make_data(again), tmp_path / "second", progress=False)
    assert (tmp_path / "second" / "config.toml").read_text() == saved.read_text()
    for name, tensor in first.ensemble.state.items():
        assert torch.equal(tensor, second.ensemble.state[name]), name


def test_what_came_from_python_says_so(tmp_path):
    x, y = torch.randn(20, 2), torch.arange(20) % 2
    ensemble = shoal.Ensemble.init(lambda: torch.nn.Linear(2, 2), members=2)
    shoal.fit(ensemble, (x, y), method="ensemble", steps=1, out=tmp_path, progress=False)
    config = load_config(tmp_path / "config.toml")
    with pytest.raises(ConfigError, match=r"your own .*shoal\.fit\("):
        make_data(config)
    with pytest.raises(ConfigError, match="which a file cannot name"):
        make_ensemble(config, shoal.data.load("toy-classification"))


def test_the_default_folder_tells_the_run():
    config = load_config("digits", ["method=kde", "members=7", "seed=3"])
    assert str(default_folder(config)) == "runs/digits-kde-m7-s3"
    composed = replace(config, method={"kernel": "rbf"})
    assert str(default_folder(composed)) == "runs/digits-custom-m7-s3"


# Whatever comes


def mutations(text):
    """Texts that are nearly the given one."""

    def mutate(edits):
        mutated = text
        for place, cut, extra in edits:
            at = int(place * len(mutated))
            mutated = mutated[:at] + extra + mutated[at + cut :]
        return mutated

    piece = st.sampled_from(list("=[]{}\"'#\n.,-0e_ ") + ["true", "[[a]]", "1e9", "'''", "\\u"])
    edit = st.tuples(st.floats(0, 1), st.integers(0, 6), piece | st.text(max_size=3))
    return st.lists(edit, min_size=1, max_size=6).map(mutate)


quiet = settings(
    max_examples=300,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


@quiet
@given(text=mutations(experiments()["digits"]) | mutations(RUN) | st.text(max_size=80))
def test_a_damaged_file_gives_one_documented_error(text, tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(text, encoding="utf-8", errors="surrogatepass")
    try:
        check_names(load_config(path))
    except (ConfigError, StorageError) as error:
        assert "\n" not in str(error)


plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["name", "std", "kernel", "x"]), inner, max_size=3)
    ),
    max_leaves=6,
)
named = st.sampled_from(["kde", "gaussian", "repulsion", "rbf", "cosine", "mlp", "crop-flip"])


@quiet
@given(
    key=st.sampled_from(KEYS),
    value=plain | st.fixed_dictionaries({"name": named}, optional={"std": plain, "kernel": plain}),
)
def test_any_value_of_any_key_gives_one_documented_error(key, value):
    try:
        check_names(make_config({"data": "digits"} | {key: value}))
    except ConfigError as error:
        assert len(str(error)) < 1000


@quiet
@given(change=st.text(max_size=30) | st.from_regex(r"[a-z_.]{1,12}=[\[\]{}'\"a-z0-9.,=]{0,12}"))
def test_any_override_gives_one_documented_error(change):
    try:
        load_config("digits", [change])
    except ConfigError as error:
        assert len(str(error)) < 1000

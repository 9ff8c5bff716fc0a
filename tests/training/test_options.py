"""One list of options: every call, config files, resuming and `--help` take them from it."""

import dataclasses
import inspect
import re
import subprocess
import sys
import types
import typing
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from small_runs import assert_same_run, quick, shoal_of

import shoal
from shoal.core.errors import ConfigError, ShoalWarning
from shoal.experiment.config import keys, load_config
from shoal.inference.likelihoods import Likelihood
from shoal.inference.priors import FunctionalPrior, WeightPrior
from shoal.interaction.methods import Method
from shoal.interaction.repulsion import Repulsion
from shoal.training import fit as fit_module
from shoal.training.fit import fit
from shoal.training.folder.run import RunFolder
from shoal.training.options.adversarial import Adversarial
from shoal.training.options.options import (
    DEFAULTS,
    KEPT,
    NAMES,
    RETIRED,
    FitOptions,
    Options,
    RunOptions,
    StepOptions,
)
from shoal.training.options.settings import REGISTRIES, Settings

OF_ONE_CALL = {"ensemble", "data", "sample_weight", "resume", "out", "loggers", "callbacks"}
OF_ONE_CALL |= {"progress"}
"""What `fit` takes besides: members, data, and where this call leaves what it does."""

FIELDS = {entry.name: entry for entry in dataclasses.fields(Options)}
TYPES = {kind.__name__: kind for kind in (Adversarial, Method, Repulsion, Likelihood)}
TYPES |= {"WeightPrior": WeightPrior, "FunctionalPrior": FunctionalPrior, "torch": torch}
NAMED = {
    name: parameter
    for name, parameter in inspect.signature(fit).parameters.items()
    if parameter.kind is not parameter.VAR_KEYWORD
}
OF_0_2 = """
    method legacy calibrated likelihood prior optimizer lr schedule epochs steps batch_size
    validation patience keep sample_weight outputs temperature strength noise annealing adversarial
    augment clip seed device precision engine memory resident offload cache frozen mesh trunk
    peer_timeout resume out save_every stall_after keep_every loggers callbacks progress
""".split()
"""Every name that `fit` took in version 0.2, besides the ensemble and the data."""

VALUES = {"validation": 0.2, "patience": 3, "strength": 2.0, "annealing": "linear"}
VALUES |= {"method": "kde", "likelihood": "categorical", "prior": "fan-in", "optimizer": "sgd"}
VALUES |= {"schedule": "cosine", "keep": "best", "outputs": 0, "adversarial": 0.01}
VALUES |= {"augment": "crop-flip", "device": "cpu", "precision": "float32", "engine": "loop"}
VALUES |= {"memory": "1GiB", "offload": "disk", "mesh": "1x1", "trunk": "sharded", "noise": 0.5}
CHECKED = [name for name, entry in FIELDS.items() if entry.metadata["check"] is not None]
for name in ("engine", "outputs"):  # names, which are looked up when the members are known
    CHECKED.remove(name)


def alternatives(annotation):
    """The types of a union, tables as one kind."""
    union = typing.get_origin(annotation) in (typing.Union, types.UnionType)
    parts = typing.get_args(annotation) if union else (annotation,)
    origins = [typing.get_origin(part) or part for part in parts]
    return {Mapping if origin is dict else origin for origin in origins}


def documented(function):
    """The sentences of a docstring about each argument."""
    found, name = {}, None
    for line in inspect.getdoc(function).splitlines():
        if (start := re.match(r" {4}(\w+): (.*)", line)) is not None:
            name, text = start.groups()
            found[name] = text
        elif name is not None and line.startswith(" " * 8):
            found[name] += f" {line.strip()}"
        else:
            name = None
    return found


def hints(table):
    """The types of a table, which names classes that its module does not load."""
    return typing.get_type_hints(table, localns=TYPES)


def caught(call, **arguments):
    """The options of a call of `fit`, which ends as soon as it has them."""

    class Caught(Exception):
        pass

    def stop(ensemble, device, precision):
        raise Caught

    made, of = [], Options.of
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Options, "of", lambda given: made.append(of(given)) or made[-1])
        patch.setattr(fit_module, "destination", stop)
        with pytest.raises(Caught):
            call(**arguments)
    return made[0]


def test_the_options_are_the_arguments_of_fit():
    assert set(NAMES) == (NAMED.keys() | hints(FitOptions).keys()) - OF_ONE_CALL
    assert not NAMED.keys() & hints(FitOptions).keys()


def test_grow_and_compare_take_every_option_but_the_number_of_frozen_members():
    assert hints(RunOptions).keys() == set(NAMES) - {"frozen"}
    shared = hints(FitOptions).keys() & hints(RunOptions).keys()
    assert {n: hints(FitOptions)[n] for n in shared} == {n: hints(RunOptions)[n] for n in shared}
    named = hints(RunOptions).keys() - shared
    taken = typing.get_type_hints(fit)
    assert {n: hints(RunOptions)[n] for n in named} == {n: taken[n] for n in named}


@pytest.mark.parametrize(
    "call, table, most",
    [
        (shoal.fit, FitOptions, 21),
        (shoal.grow, RunOptions, 12),
        (shoal.compare, RunOptions, 18),
        (shoal.Stepper, StepOptions, 13),
    ],
)
def test_a_call_names_few_arguments_and_takes_the_rest_from_a_table(call, table, most):
    parameters = inspect.signature(call).parameters
    assert len(parameters) == most
    *_, rest = parameters.values()
    assert rest.kind is rest.VAR_KEYWORD
    assert typing.get_args(rest.annotation) == (table,)


@pytest.mark.parametrize("name", OF_0_2)
def test_every_name_of_0_2_is_still_an_argument(name):
    assert name in NAMED or name in hints(FitOptions) or name in RETIRED


@pytest.mark.parametrize("name", [name for name in OF_0_2 if name in NAMES])
def test_a_name_of_0_2_gives_the_option_of_that_name(name):
    default = FIELDS[name].default
    value = VALUES.get(name) or (not default if isinstance(default, bool) else 7)
    options = caught(lambda **more: fit(shoal_of(), None, **more), **{name: value})
    assert options == Options(**{name: value})
    assert getattr(options, name) != default or name == "offload"


@pytest.mark.parametrize("name", RETIRED)
def test_a_name_that_is_no_option_any_more_is_ignored_with_a_warning(name, tmp_path):
    with pytest.warns(ShoalWarning, match=f"{name} is no longer an option") as said:
        options = caught(lambda **more: fit(shoal_of(), None, **more), **{name: 5.0})
    assert options == Options() and said[0].filename == __file__
    file = tmp_path / "old.toml"
    file.write_text(f'data = "digits"\n{name} = 5.0\n')
    for source, changes in ((file, []), ("digits", [f"{name}=5"])):
        with pytest.warns(ShoalWarning, match=f"{name} is no longer an option"):
            assert name not in load_config(source, changes).table


@pytest.mark.parametrize(
    "call",
    [
        lambda **more: shoal.fit(shoal_of(), None, **more),
        lambda **more: shoal.grow("nowhere", **more),
        lambda **more: shoal.compare("digits", **more),
        lambda **more: shoal.Stepper(shoal_of(), 10, **more),
    ],
    ids=["fit", "grow", "compare", "Stepper"],
)
def test_an_unknown_name_is_refused_with_the_nearest(call):
    with pytest.raises(TypeError, match=r"argument 'precison'; did you mean 'precision'\?"):
        call(precison="tf32")


@pytest.mark.parametrize("name", [name for name in NAMES if name in NAMED])
def test_an_option_has_the_default_of_the_argument(name):
    assert NAMED[name].default == FIELDS[name].default


@pytest.mark.parametrize("name", NAMES)
def test_what_a_file_may_hold_fit_takes(name):
    taken = (typing.get_type_hints(fit) | hints(FitOptions))[name]
    if taken is not typing.Any:
        assert alternatives(typing.get_type_hints(Options)[name]) <= alternatives(taken)


@pytest.mark.parametrize("name", NAMES)
def test_fit_says_of_an_option_what_the_list_says(name):
    assert documented(fit)[name].startswith(FIELDS[name].metadata["doc"])


def test_every_argument_of_fit_is_documented():
    assert documented(fit).keys() == NAMED.keys() | hints(FitOptions).keys()
    assert max(map(len, fit.__doc__.splitlines())) <= 96


def test_no_sentence_about_an_option_is_written_twice():
    docstring = Path(fit_module.__file__).read_text().split('"""')[3]
    assert "ensemble: the members" in docstring
    assert not any(f" {name}: " in docstring for name in NAMES)


def test_objects_are_made_from_options():
    own = {entry.name for entry in dataclasses.fields(Settings)} - {"options"}
    assert own <= set(NAMES) and REGISTRIES.keys() <= own


def test_what_a_run_remembers_is_what_decides_its_numbers():
    placing = {"cache", "device", "memory", "mesh", "offload", "resident", "trunk"}
    assert set(NAMES) - set(KEPT) == placing | {"save_every"}
    remembered = Settings.resolve(Options(likelihood="categorical")).config()
    assert tuple(remembered) == KEPT


@pytest.mark.parametrize("name", CHECKED)
@pytest.mark.parametrize("value", [object(), float("nan"), "1", [1, 2], {}, 10**400])
def test_what_is_no_value_of_an_option_is_refused(name, value):
    with pytest.raises(ConfigError, match=rf"^{name} must be"):
        Options(**{name: value})


@pytest.mark.parametrize(
    "given, taken",
    [
        ({"lr": np.float32(0.5)}, 0.5),
        ({"lr": torch.tensor(0.5)}, 0.5),
        ({"epochs": np.int64(3)}, 3),
        ({"seed": -(2**63)}, -(2**63)),
        ({"legacy": np.bool_(True)}, True),
        ({"clip": None}, None),
        ({"frozen": np.int64(0)}, 0),
        ({"save_every": float("inf")}, float("inf")),
    ],
)
def test_numbers_of_any_library_become_plain_ones(given, taken):
    (name,) = given
    found = getattr(Options(**given), name)
    assert found == taken and type(found) is type(taken)


def test_a_text_that_only_looks_true_is_not_true():
    with pytest.raises(ConfigError, match="legacy must be True or False, not the text 'false'"):
        shoal.fit(shoal_of(), (torch.zeros(4, 3), torch.arange(4)), legacy="false")


def test_options_that_exclude_each_other():
    with pytest.raises(ConfigError, match="give epochs or steps, not both"):
        Options(epochs=1, steps=1)


def test_a_run_that_is_older_than_an_option_had_its_default(tmp_path, monkeypatch):
    """Nothing that such a run could not know keeps it from being resumed."""
    whole = quick(out=tmp_path, method="kde")
    config = RunFolder.config
    young = {"legacy", "calibrated", "frozen", "keep_every"}
    assert young <= DEFAULTS.keys()
    monkeypatch.setattr(
        RunFolder,
        "config",
        lambda folder: {key: value for key, value in config(folder).items() if key not in young},
    )
    assert_same_run(quick(out=tmp_path, method="kde", resume=True), whole)
    with pytest.raises(ConfigError, match="has legacy = False, this call has True"):
        quick(out=tmp_path, method="kde", legacy=True, resume=True)


def test_keys_are_told_as_they_are_typed():
    told = keys()
    assert told["lr=0.001"] == FIELDS["lr"].metadata["doc"]
    assert {typed.partition("=")[0] for typed in told} >= set(NAMES)


def test_the_list_loads_neither_torch_nor_numpy():
    code = "import sys, shoal.training.options.options, shoal.experiment.config\n"
    code += "sys.exit(bool({'torch', 'numpy'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0

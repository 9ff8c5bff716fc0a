"""One list of options: `fit`, config files, resuming and `--help` say the same of each."""

import dataclasses
import inspect
import re
import subprocess
import sys
import types
import typing
from collections.abc import Mapping

import numpy as np
import pytest
import torch
from small_runs import assert_same_run, quick, shoal_of

import shoal
from shoal.core.errors import ConfigError
from shoal.experiment.config import keys
from shoal.inference import priors
from shoal.training.fit import fit
from shoal.training.folder.run import RunFolder
from shoal.training.options.options import DEFAULTS, KEPT, NAMES, Options
from shoal.training.options.settings import REGISTRIES, Settings

OF_ONE_CALL = {"ensemble", "data", "sample_weight", "resume", "out", "loggers", "callbacks"}
OF_ONE_CALL |= {"progress"}
"""What `fit` is told besides: members, data, and where this call leaves what it does."""

FIELDS = {entry.name: entry for entry in dataclasses.fields(Options)}
ARGUMENTS = inspect.signature(fit).parameters
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


def test_the_options_are_the_arguments_of_fit():
    assert set(NAMES) == set(ARGUMENTS) - OF_ONE_CALL


@pytest.mark.parametrize("name", NAMES)
def test_an_option_has_the_default_of_the_argument(name):
    default, argument = FIELDS[name].default, ARGUMENTS[name].default
    assert argument == (priors.registry.make(default) if name == "prior" else default)


@pytest.mark.parametrize("name", NAMES)
def test_what_a_file_may_hold_fit_takes(name):
    taken = typing.get_type_hints(fit)[name]
    if taken is not typing.Any:
        assert alternatives(typing.get_type_hints(Options)[name]) <= alternatives(taken)


@pytest.mark.parametrize("name", NAMES)
def test_fit_says_of_an_option_what_the_list_says(name):
    assert documented(fit)[name] == FIELDS[name].metadata["doc"]


def test_every_argument_of_fit_is_documented():
    assert documented(fit).keys() == ARGUMENTS.keys()


def test_objects_are_made_from_options():
    own = {entry.name for entry in dataclasses.fields(Settings)} - {"options"}
    assert own <= set(NAMES) and REGISTRIES.keys() <= own


def test_what_a_run_remembers_is_what_decides_its_numbers():
    placing = {"cache", "device", "memory", "mesh", "offload", "resident", "trunk"}
    waiting = {"peer_timeout", "save_every", "stall_after"}
    assert set(NAMES) - set(KEPT) == placing | waiting
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

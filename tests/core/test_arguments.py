"""Arguments of public functions: nonsense is refused in one sentence, and nothing is raw."""

import warnings

import fuzz_calls
import numpy as np
import pytest
import torch
from small_runs import plain, points, quick

import shoal
from shoal.core.arguments import checked, list_of, positive, share, whole, whole_from
from shoal.core.errors import ConfigError, DataError
from shoal.engine.processes.mesh import Mesh

QUICK = (
    "conformal",
    "selective",
    "cheapest",
    "Predictive of",
    "metrics.ece",
    "adapters.",
    "points.",
)
"""Cases of which the suite runs some calls; `python tests/fuzz_calls.py` runs all."""


def test_odd_arguments_are_accepted_or_refused_in_one_sentence(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        some = [call for call in fuzz_calls.calls() if call[0].name.startswith(QUICK)][::7]
        outcomes = [(fuzz_calls.outcome(*call), call) for call in some]
    raw = [
        (case.name, parameter, odd, text)
        for (kind, text), (case, parameter, odd) in outcomes
        if kind == "raw"
    ]
    assert not raw and len(outcomes) > 150


def test_a_check_sees_arguments_by_place_and_by_name_and_leaves_defaults_alone():
    @checked(level=share, counts=list_of(whole))
    def rule(level=None, counts=(), *, quiet: bool = False, size: int | None = None):
        return level, counts, quiet, size

    assert rule() == (None, (), False, None)
    assert rule(np.float32(0.5), counts=(1, np.int64(2))) == (0.5, [1, 2], False, None)
    assert rule(size=torch.tensor(3))[-1] == 3
    for wrong in ({"level": 1}, {"counts": "12"}, {"counts": [0]}, {"quiet": 1}, {"size": 2.0}):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            rule(**wrong)
    with pytest.raises(TypeError, match="unexpected keyword"):
        rule(levels=0.5)


@pytest.mark.parametrize("value", [0, -1, 1e-320, float("nan"), float("inf"), True, "1", 1j, None])
def test_a_positive_number_is_finite_and_has_an_inverse(value):
    with pytest.raises(ConfigError, match="^lr must be"):
        positive("lr", value)
    assert positive("lr", 1e-15) == 1e-15 and whole_from(1, 3)("k", 3) == 3


@pytest.fixture(scope="module")
def run():
    return quick(steps=2)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda run: shoal.compress(run, 1, by="distil", epochs=0, data=points()), "epochs"),
        (lambda run: shoal.predict(run.ensemble, points()[0], likelihood="a"), "likelihood"),
        (lambda run: shoal.predict(run, points()[0], likelihood=3), "likelihood"),
        (lambda run: quick(strength=-1.0), "strength"),
        (lambda run: shoal.Repulsion(strength=-1.0), "strength"),
        (lambda run: shoal.adapters.last_layer(plain(), ""), "layer is empty"),
        (lambda run: quick(data=(points()[0], points()[1].to(torch.complex64))), "complex64"),
        (lambda run: shoal.predict(run, points()[0]).log_prob(np.zeros(40, complex)), "complex"),
    ],
)  # fmt: skip
def test_nonsense_is_refused(call, words, run):
    with pytest.raises((ConfigError, DataError), match=words) as refusal:
        call(run)
    assert "\n" not in str(refusal.value)


def test_processes_of_torchrun_without_a_group_hear_what_is_missing(monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "a")
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert Mesh.current(2) is None
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="init_process_group"):
        quick(steps=1)


def test_metrics_of_published_code_come_last(run):
    x, y = points()
    names = list(shoal.evaluate(shoal.predict(run, x), y))
    assert names[:2] == ["accuracy", "nll"]
    assert {*names[-3:]} == {"nll_legacy", "ece_30", "ece_adaptive"}

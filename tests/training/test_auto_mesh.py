"""Several processes search for method and strength as one process does (gloo, real processes)."""

import json

import auto_cases
import pytest
import torch
from mesh_cases import started, together

import shoal
from shoal.core.storage.files import read_tensors
from shoal.training.folder.choice import Choice

pytestmark = pytest.mark.usefixtures("warm")

FAILED = {
    "mixed": {"kde:1000": "no common weight space", "forde:4": "no second derivative",
              "forde:16": "no second derivative"},
    "diverges": {"kde:1e+15": "diverged"},
    "fails late": {"kde:1000": "had enough"},
    "sharded, fails": {"kde:1000": "had enough"},
}  # fmt: skip
"""Candidates that fail, and why: the first two on every process, the others on the second alone."""


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """Every case in two processes, with 4 + 3 members."""
    return together(2, tmp_path_factory.mktemp("two"), "-", script=auto_cases.__file__)


@pytest.fixture(scope="module")
def alone():
    """The run of one process, computed once a case."""
    known = {}

    def get(name, **options):
        if name not in known:
            known[name] = auto_cases.searched(name, **options)
        return known[name]

    return get


def found(out, name, processes):
    """What each process has stored."""
    return [json.loads((out / f"{name}-{rank}.json").read_text()) for rank in range(processes)]


def check_same(out, name, run, processes, differing=()):
    """The choice of all processes is that of one process, and so are the members."""
    choices = [each["choice"] for each in found(out, name, processes)]
    assert all(choice == choices[0] for choice in choices)
    choice, expected = Choice.of(choices[0]), run.choice
    for key in ("asked", "chosen", "judge", "points", "shifts", "cost"):
        assert getattr(choice, key) == getattr(expected, key)
    for candidate, other in zip(choice.candidates, expected.candidates, strict=True):
        if candidate.label in differing:
            continue
        assert (candidate.label, candidate.failed) == (other.label, other.failed)
        for trial, one in zip(candidate.trials, other.trials, strict=True):
            assert trial.steps == one.steps
            assert (trial.nll, trial.shifted_nll) == pytest.approx((one.nll, one.shifted_nll), 1e-9)
    tensors = auto_cases.result(run)[0]
    for rank in range(processes):
        for key, tensor in read_tensors(out / f"{name}-{rank}.safetensors").items():
            torch.testing.assert_close(tensor, tensors[key], rtol=0, atol=1e-10)


@pytest.mark.parametrize("name", auto_cases.CASES)
def test_processes_choose_as_one_and_their_run_equals_one_with_these_settings(two, alone, name):
    check_same(two, name, alone(name), 2, FAILED.get(name, {}) if name == "fails late" else ())
    assert all(each["equal"] for each in found(two, name, 2))


@pytest.mark.parametrize("name", ["mixed", "diverges", "fails late"])
def test_a_candidate_that_fails_on_one_process_loses_on_all(two, name):
    for each in found(two, name, 2):
        failed = {
            candidate["label"]: candidate["failed"]
            for candidate in each["choice"]["arms"]
            if candidate["failed"]
        }
        assert failed.keys() == FAILED[name].keys()
        assert all(FAILED[name][label] in why for label, why in failed.items())


def test_the_cases_choose_repulsion_and_the_plain_ensemble(two):
    chosen = {found(two, name, 1)[0]["choice"]["chosen"] for name in auto_cases.CASES}
    assert "ensemble" in chosen
    assert len(chosen) > 2


def test_a_stopped_run_goes_on_without_a_second_search(two, alone):
    check_same(two, "resumed", alone("auto"), 2)
    assert not any(each["searches"] for each in found(two, "resumed", 2))
    stored = shoal.load(two / "run", auto_cases.Perceptron).choice
    assert stored == Choice.of(found(two, "resumed", 1)[0]["choice"])


@pytest.mark.parametrize(
    ("name", "words"), [("taken", "already holds"), ("other", "no such search"), ("once", "once")]
)
def test_all_processes_refuse_alike(two, name, words):
    first, second = (each["error"] for each in found(two, name, 2))
    assert first == second
    assert words in first


def test_members_that_only_their_process_has_drawn_are_searched(two, alone):
    check_same(two, "divided", alone("auto"), 2)


@pytest.mark.nightly
def test_a_search_that_lost_a_process_begins_again(tmp_path, alone):
    done = started(2, tmp_path, "killed", restarts=1, script=auto_cases.__file__)
    assert done.returncode == 0, done.stderr[-3000:]
    check_same(tmp_path, "killed", alone("kde"), 2)


@pytest.mark.nightly
@pytest.mark.parametrize("name", auto_cases.SHARDED)
def test_a_trunk_in_shards_is_whole_again_after_a_candidate(tmp_path, alone, name):
    out = together(2, tmp_path, "1x2", name, script=auto_cases.__file__)
    one = alone(name, trunk="replicated")
    check_same(out, name, one, 2, FAILED.get(name, ()))
    assert all(each["equal"] for each in found(out, name, 2))


@pytest.mark.nightly
def test_four_processes_choose_as_one(tmp_path, alone):
    names = "auto", "frozen", "fails late"
    out = together(4, tmp_path, "2x2", *names, script=auto_cases.__file__)
    for name in names:
        check_same(out, name, alone(name), 4, FAILED.get(name, ()))
        assert all(each["equal"] for each in found(out, name, 4))

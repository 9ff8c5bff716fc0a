"""Damaged run folders: an error of ours, or the right prediction, nothing else.

One file is damaged at a time: bits are flipped, bytes replaced by digits and structure, cut off,
taken out or put in, or the file is that of another run. `make nightly` damages two thousand
folders, and SHOAL_MUTATIONS asks for more.
"""

import os
import random
import shutil

import pytest
import torch
from fuzzed_files import attempt, damaged
from small_runs import CLASSES, Fuse, assert_equal_trees, frozen, points, shoal_of

import shoal
from shoal.analysis.evidence.compute_evidence import evidence, save_evidence
from shoal.data.dataset import Dataset, Split
from shoal.evaluation.evaluate import evaluate_run
from shoal.models import MLP, Blueprint
from shoal.page.report_data import load_report_data
from shoal.training.fit import fit

MUTATIONS = int(os.environ.get("SHOAL_MUTATIONS", "2000"))
RESUMED = MUTATIONS // 40
INPUTS = points(5, seed=3)[0]
BLUEPRINT = Blueprint(MLP((4,), "tanh"), (3,), CLASSES)


def data_of(seed):
    x, y = points(seed=seed)
    return Dataset("mine", train=Split(x, y), test=Split(x, y))


def train(path, seed=0, **options):
    """Two epochs of two steps, saved after each of them; the method has axes to keep."""
    given = {"batch_size": 20, "progress": False, "out": path, "save_every": 0.0, "seed": seed}
    given |= {"method": "forde", "epochs": 2, "keep_every": 1} | options
    return fit(shoal_of(BLUEPRINT, 2, seed), data_of(seed), **given)


def finished(path, seed):
    """A run with every file that there can be."""
    run = train(path, seed)
    evaluate_run(run, data_of(seed))
    save_evidence(evidence(run, data_of(seed), priors=False), path)
    (path / "lock").write_bytes(b"1234567 here\n")
    return path


def files_of(folder):
    return sorted(path.relative_to(folder) for path in folder.rglob("*") if path.is_file())


def outputs(path):
    run = shoal.load(path)
    assert all(isinstance(row, dict) for row in run.history)
    assert isinstance(run.provenance, dict) and isinstance(run.config, dict)
    return shoal.predict(run, INPUTS).members


def weighted(path):
    return shoal.predict(path, INPUTS, weights="posterior").mean


def mutations(folder, other, count, chance):
    """Damages a file of the folder, and mends it when the caller has seen it."""
    names = files_of(folder)
    for _ in range(count):
        name = chance.choice(names)
        sound, place = (folder / name).read_bytes(), folder / name
        bad = damaged(sound, (other / name).read_bytes(), chance)
        place.unlink() if bad is None else place.write_bytes(bad)
        yield name, bad
        place.parent.mkdir(exist_ok=True)
        place.write_bytes(sound)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    base = tmp_path_factory.mktemp("fuzz")
    return finished(base / "run", 0), finished(base / "other", 1)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("count", [300, pytest.param(MUTATIONS, marks=pytest.mark.nightly)])
def test_a_damaged_folder_gives_an_error_or_the_right_prediction(folders, count):
    folder, other = folders
    assert {str(name) for name in files_of(folder)} >= {
        "config.toml", "provenance.json", "history.jsonl", "scores.json", "samples.safetensors",
        "evidence.json", "axes.safetensors", "lock", "trajectory/epoch-000001.safetensors",
        "checkpoints/step-000000004/manifest.json", "checkpoints/step-000000003/state.json",
    }  # fmt: skip
    right, mean = outputs(folder), weighted(folder)
    newest = folder / "checkpoints" / "step-000000004"
    aside = newest.rename(folder.parent / "newest")
    before = outputs(folder)
    aside.rename(newest)
    assert not torch.equal(right, before)
    refused, chance = 0, random.Random(17)
    for name, bad in mutations(folder, other, count, chance):
        if name.parts[0] != "checkpoints":
            story, *_ = attempt(lambda: load_report_data([folder]))
            assert story is None or all(map(len, story.entries[0].history))
        found, _, warned = attempt(lambda: outputs(folder))
        refused += found is None
        if found is not None and not torch.equal(found, right):
            fallen = warned and name.parts[1:2] == (newest.name,)
            assert fallen and torch.equal(found, before), (name, bad)
        if name.name in ("evidence.json", "history.jsonl"):
            found, *_ = attempt(lambda: weighted(folder))
            assert found is None or torch.equal(found, mean), (name, bad)
    assert count / 20 < refused < count / 2
    assert torch.equal(outputs(folder), right)


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_a_damaged_folder_is_resumed_to_the_right_end_or_not_at_all(tmp_path):
    whole = train(None, keep_every=None, schedule=Fuse())
    for seed, name in enumerate(("run", "other")):
        with pytest.raises(Fuse.Blown):
            train(tmp_path / name, seed, keep_every=None, schedule=Fuse(3))
    folder, copy, ended = tmp_path / "run", tmp_path / "copy", 0
    for name, bad in mutations(folder, tmp_path / "other", RESUMED, random.Random(18)):
        shutil.copytree(folder, copy)
        run, *_ = attempt(lambda: train(copy, keep_every=None, schedule=Fuse(), resume=True))
        if run is not None:
            assert_equal_trees(frozen(run.ensemble), frozen(whole.ensemble))
            assert [row["epoch"] for row in run.history] == [1, 2], (name, bad)
        ended += run is not None
        shutil.rmtree(copy)
    assert 0 < ended < RESUMED

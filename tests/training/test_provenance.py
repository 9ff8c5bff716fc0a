"""What a run remembers of how it was made."""

import json
import platform
import subprocess

import pytest
import torch
from small_runs import plain, points, quick
from torch.utils.data import DataLoader, TensorDataset

import shoal
from shoal.data.batches.sources import batches_of
from shoal.training.folder.provenance import digest, provenance

CPU = torch.device("cpu")


def of(x, y, **options):
    return digest(batches_of((x, y), **options))


class TestDigest:
    x, y = points()

    def test_the_same_numbers_have_the_same_digest_however_they_are_stored(self):
        whole = of(self.x, self.y)
        assert len(whole) == 64
        assert of(self.x.numpy(), self.y.tolist()) == whole
        assert of(self.x.T.contiguous().T, self.y) == whole
        assert of(torch.cat([self.x, self.x])[: len(self.x)], self.y) == whole

    def test_it_does_not_depend_on_how_they_are_read(self):
        assert of(self.x, self.y, batch_size=7, seed=3) == of(self.x, self.y)

    @pytest.mark.parametrize("place", [(0, 0), (-1, -1)])
    def test_the_last_bit_counts(self, place):
        x = self.x.clone()
        x[place] = torch.nextafter(x[place], torch.tensor(9.0))
        assert of(x, self.y) != of(self.x, self.y)

    def test_shape_type_and_labels_count(self):
        seen = {
            of(self.x, self.y),
            of(self.x, self.y.float()),
            of(self.x, self.y.flip(0)),
            of(self.x.reshape(len(self.x), 3, 1), self.y),
            of(self.x, self.y, dtype=torch.float64),
        }
        assert len(seen) == 5

    def test_a_loader_has_none(self):
        loader = DataLoader(TensorDataset(self.x, self.y), batch_size=8)
        assert digest(batches_of(loader)) is None
        assert provenance(batches_of(loader), CPU)["data"] == {"points": 40, "sha256": None}


def test_versions_machine_and_data_are_told():
    told = quick(epochs=1).provenance
    assert told["versions"]["torch"] == torch.__version__
    assert told["versions"]["python"] == platform.python_version()
    assert told["versions"]["shoal"]
    assert platform.machine() in told["device"] and told["threads"] == torch.get_num_threads()
    assert told["data"]["points"] == 40
    assert told["seconds"] > 0


def test_the_folder_keeps_it(tmp_path):
    run = quick(out=tmp_path)
    kept = json.loads((tmp_path / "provenance.json").read_text())
    assert kept.pop("notes") == run.notes
    assert len(kept.pop("sha256")) == 64
    assert kept == run.provenance == shoal.load(tmp_path, plain).provenance


def test_the_commit_of_the_working_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    batches = batches_of(points())
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert provenance(batches, CPU)["commit"] is None
    identity = ["-c", "user.name=a", "-c", "user.email=a@b.c"]
    for command in (["init"], [*identity, "commit", "--allow-empty", "-m", "first"]):
        done = subprocess.run(["git", *command], capture_output=True, text=True, check=False)
        if done.returncode:
            pytest.skip(f"git does not work here: {done.stderr}")
    head = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=True)
    commit = provenance(batches, CPU)["commit"]
    assert len(commit) >= 7 and head.stdout.startswith(commit)


def test_without_git_there_is_no_commit(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert provenance(batches_of(points()), CPU)["commit"] is None


def test_a_package_that_was_never_installed_has_no_version(monkeypatch):
    from importlib import metadata

    def missing(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr("shoal.training.folder.provenance.version", missing)
    assert provenance(batches_of(points()), CPU)["versions"]["shoal"] is None

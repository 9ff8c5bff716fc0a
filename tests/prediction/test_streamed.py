"""Predictions of any length: one batch beside the result, files that are whole or absent."""

import errno
import json
import os
import platform
import subprocess
import sys
import textwrap

import numpy as np
import pytest
import torch
from likelihood_examples import DEFAULTS, drawn, targets, width
from safetensors import safe_open
from torch import nn

import shoal
from shoal.core.errors import CheckpointCorrupt, ConfigError, DataError, ShoalWarning, StorageError
from shoal.inference.ensemble import Ensemble
from shoal.inference.likelihoods import Custom, Gaussian
from shoal.prediction import Predictive, evaluate, metrics, mixture, predict
from shoal.prediction.predict import CollectedOutputs

X = drawn(23, 3)
LENGTHS = {
    "array": X,
    "loader": torch.utils.data.DataLoader(torch.utils.data.TensorDataset(X), batch_size=4),
    "list": list(X.split(4)),
    "too many promised": torch.utils.data.DataLoader(
        torch.utils.data.TensorDataset(X[:20]), batch_size=4, sampler=[*range(20)] * 2
    ),
}


def ensemble(members=3):
    return Ensemble.init(lambda: nn.Linear(3, 4), members, seed=0)


def endless(parts):
    """A generator, which knows neither its length nor its beginning."""
    yield from parts


# In memory -----------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [None, 0, 5, 23, 40])
@pytest.mark.parametrize("size", [1, 4, 23])
def test_collected_outputs_are_the_joined_batches(count, size, monkeypatch):
    monkeypatch.setattr(sys.modules["shoal.prediction.predict"], "_CHUNK", 150)
    outputs = drawn(3, 23, 2)
    collected = CollectedOutputs(count)
    for batch in outputs.split(size, dim=1):
        collected.add(batch.clone())
    found = collected.finish([0, 2])
    assert torch.equal(found, outputs[[0, 2]]) and found.is_contiguous()


def test_a_known_length_is_filled_in_place():
    collected = CollectedOutputs(4)
    collected.add(torch.ones(2, 3, 1))
    place = collected.parts[0].data_ptr()
    collected.add(torch.ones(2, 1, 1))
    assert collected.finish([0, 1]).data_ptr() == place


def measured(body):
    """What a script in a process of its own prints, with a function for its peak of memory."""
    start = """
        import gc, torch
        torch.set_num_threads(1)
        import shoal
        from shoal.prediction import mixture
        from torch import nn

        def high():
            lines = open("/proc/self/status").read().splitlines()
            return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 1024

        def now():
            lines = open("/proc/self/status").read().splitlines()
            return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS")) / 1024

        def peak_of(call):
            gc.collect()
            open("/proc/self/clear_refs", "w").write("5")
            before = now()
            found = call()
            return high() - before, found

        ensemble = shoal.Ensemble.init(lambda: nn.Linear(8, 100), members=10)
        def few():
            return torch.randn(4096, 8)
        shoal.evaluate(shoal.predict(ensemble, few()), torch.zeros(4096, dtype=torch.int64))
        """
    code = textwrap.dedent(start) + textwrap.dedent(body)
    # Freed tensors go back to the system at once: what the allocator keeps depends on chance.
    frugal = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=frugal)
    assert done.returncode == 0, done.stderr
    return [float(number) for number in done.stdout.split()]


needs_peaks = pytest.mark.skipif(
    not os.access("/proc/self/clear_refs", os.W_OK), reason="the system does not tell peaks"
)


@needs_peaks
@pytest.mark.skipif(platform.machine() != "x86_64", reason="mimalloc keeps freed tensors")
def test_a_prediction_needs_its_result_and_one_batch(tmp_path):
    """40,000 points x 100 classes x 10 members are 153 MiB; a batch of 1,024 has 4."""
    array, stream, scores, file = measured(
        f"""
        x = torch.randn(40_000, 8)
        peak, pred = peak_of(lambda: shoal.predict(ensemble, x))
        print(peak)
        del pred
        peak, pred = peak_of(lambda: shoal.predict(ensemble, (part for part in x.split(1024))))
        print(peak)
        mixture._BLOCK = 1 << 20
        y = torch.zeros(40_000, dtype=torch.int64)
        print(peak_of(lambda: shoal.evaluate(pred, y))[0])
        print(peak_of(lambda: shoal.predict(ensemble, x, out="{tmp_path}/p.safetensors"))[0])
        """
    )
    assert 150 < array < 153 + 25
    assert stream < 153 + 64 + 25
    assert scores < 0.6 * 153
    assert file < 40


def in_unnamed_file():
    """Whether this process has a temporary file of ours in its memory map."""
    with open("/proc/self/maps") as maps:
        return any("shoal-" in line and "(deleted)" in line for line in maps)


@pytest.mark.skipif(not os.path.exists("/proc/self/maps"), reason="the system has no such list")
@pytest.mark.parametrize("data", [X, list(X.split(4))], ids=["length known", "length unknown"])
@pytest.mark.parametrize("full", [False, True], ids=["disk", "full disk"])
def test_large_outputs_are_in_a_temporary_file_if_the_disk_has_room(data, full, monkeypatch):
    expected = predict(ensemble(), X).members
    module = sys.modules["shoal.prediction.predict"]
    monkeypatch.setattr(module, "_IN_MEMORY", 3 * 9 * 4 * 4)
    monkeypatch.setattr(module, "_CHUNK", 3 * 4 * 4 * 4)
    if full:

        def no_room(*_):
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(os, "posix_fallocate", no_room)
    pred = predict(ensemble(), data, batch_size=4)
    assert torch.equal(pred.members, expected) and in_unnamed_file() is not full
    del pred
    assert not in_unnamed_file()


# In blocks -----------------------------------------------------------------------------------


@pytest.mark.parametrize("likelihood", DEFAULTS, ids=lambda each: type(each).__name__)
@pytest.mark.parametrize("weights", [None, torch.tensor([0.5, 0.2, 0.3])])
def test_blocks_have_the_numbers_of_the_whole(likelihood, weights, monkeypatch):
    outputs, y = drawn(3, 21, width(likelihood)).double(), targets(likelihood, 21)
    whole = Predictive(outputs, likelihood, weights)
    wanted = evaluate(whole, y)
    monkeypatch.setattr(mixture, "_BLOCK", 3 * 8 * width(likelihood))
    parts = Predictive(outputs, likelihood, weights)
    assert len([*mixture.blocks(parts)]) == 3
    found = evaluate(parts, y)
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert found[name] == pytest.approx(value, rel=1e-12, abs=1e-12, nan_ok=True), name
    for quantity in ("mean", "variance"):
        assert torch.equal(getattr(parts, quantity), getattr(whole, quantity))
    assert torch.equal(parts.log_prob(y), whole.log_prob(y))
    if "gaussian" in likelihood.about.kinds or type(likelihood).__name__ == "Poisson":
        assert torch.equal(parts.quantile(0.3), whole.quantile(0.3))
    if likelihood.about.has_classes:
        assert torch.equal(
            metrics.pairwise_disagreement(parts), metrics.pairwise_disagreement(whole)
        )


def test_a_custom_loss_sees_all_data_points(monkeypatch):
    loss = Custom(lambda f, y: (f[:, 0] - y).square().mean())
    pred, y = Predictive(drawn(2, 30, 1), loss), drawn(30)
    wanted = evaluate(pred, y)
    monkeypatch.setattr(mixture, "_BLOCK", 8)
    assert evaluate(Predictive(pred.members, loss), y) == pytest.approx(wanted, rel=1e-12)


# In a file -----------------------------------------------------------------------------------


@pytest.mark.parametrize("x", LENGTHS.values(), ids=LENGTHS)
def test_a_file_holds_what_memory_would(tmp_path, x):
    file = tmp_path / "new folder" / "p.safetensors"
    wanted, found = predict(ensemble(), x, batch_size=4), None
    found = predict(ensemble(), x, batch_size=4, out=file)
    assert torch.equal(found.members, wanted.members)
    assert torch.equal(found.probs, wanted.probs)
    again = Predictive.load(file)
    assert torch.equal(again.members, wanted.members) and again.likelihood == wanted.likelihood
    assert [path.name for path in file.parent.iterdir()] == [file.name]


def test_a_stream_without_length_grows(tmp_path):
    file = tmp_path / "p.safetensors"
    found = shoal.predict(ensemble(), endless(X.split(2)), out=str(file))
    assert torch.equal(found.members, predict(ensemble(), [*X.split(2)]).members)
    assert file.stat().st_size < 3 * 23 * 4 * 4 + 4096


def test_others_read_the_file(tmp_path):
    file = tmp_path / "p.safetensors"
    pred = predict(ensemble(), X.double(), out=file)
    with safe_open(file, framework="np") as opened:
        outputs = opened.get_tensor("members")
        facts = opened.metadata()
    np.testing.assert_array_equal(outputs, pred.members.numpy())
    assert json.loads(facts["likelihood"])["name"] == "categorical"
    start = int.from_bytes(file.read_bytes()[:8], "little") + 8
    raw = np.memmap(file, dtype="<f4", offset=start, shape=outputs.shape, mode="r")
    np.testing.assert_array_equal(raw, outputs)


@pytest.mark.parametrize("x", [X, endless(X.split(2))], ids=["array", "stream"])
def test_diverged_members_are_not_in_the_file(tmp_path, x):
    broken = ensemble(4)
    with torch.no_grad():
        broken.weights["weight"][1] = torch.nan
    weights = [0.1, 0.2, 0.3, 0.4]
    with pytest.warns(ShoalWarning, match="members 1 of 4"):
        wanted = predict(broken, X, batch_size=2, weights=weights)
    with pytest.warns(ShoalWarning, match="members 1 of 4"):
        found = predict(broken, x, batch_size=2, weights=weights, out=tmp_path / "p.safetensors")
    assert torch.equal(found.members, wanted.members)
    assert torch.equal(found.weights, wanted.weights)


@pytest.mark.parametrize("likelihood", DEFAULTS, ids=lambda each: type(each).__name__)
def test_every_likelihood_comes_back_with_what_it_learned(tmp_path, likelihood):
    y = targets(likelihood, 41)
    begun = likelihood.initialised_from(y if y.is_floating_point() or y.ndim == 1 else y.float())
    pred = Predictive(drawn(3, 41, width(likelihood)).double(), begun)
    pred.save(tmp_path / "p.safetensors")
    found = Predictive.load(tmp_path / "p.safetensors")
    assert torch.equal(found.members, pred.members)
    assert evaluate(found, y) == pytest.approx(evaluate(pred, y), rel=1e-15, nan_ok=True)


def test_a_likelihood_of_ones_own_is_given_again(tmp_path):
    def pinball(outputs, y):
        return (y - outputs[:, 0]).abs()

    file = tmp_path / "p.safetensors"
    own = Custom(pinball)
    assert predict(ensemble(), X, likelihood=own, out=file).likelihood is own
    with pytest.raises(ConfigError, match="pinball.*likelihood="):
        Predictive.load(file)
    assert Predictive.load(file, likelihood=own).likelihood is own


class Breaks(torch.utils.data.Dataset):
    """Data whose last point cannot be read."""

    def __init__(self, error):
        self.error = error

    def __len__(self):
        return 12

    def __getitem__(self, index):
        if index == 11:
            raise self.error
        return X[index]


@pytest.mark.parametrize("error", [KeyboardInterrupt(), FileNotFoundError(2, "no", "point-11")])
def test_an_interrupted_prediction_leaves_the_folder_as_it_was(tmp_path, error):
    file = tmp_path / "p.safetensors"
    file.write_text("old")
    with pytest.raises(type(error)):  # what the data raise is not taken for a full disk
        predict(ensemble(), Breaks(error), batch_size=4, out=file)
    assert file.read_text() == "old" and [*tmp_path.iterdir()] == [file]


def test_a_killed_prediction_leaves_nothing_that_stays(tmp_path):
    code = f"""
import os, torch, shoal
from torch import nn
ensemble = shoal.Ensemble.init(lambda: nn.Linear(3, 4), members=3)
def batches():
    yield torch.ones(2, 3)
    os.kill(os.getpid(), 9)
shoal.predict(ensemble, batches(), out="{tmp_path}/p.safetensors")
"""
    assert subprocess.run([sys.executable, "-c", code]).returncode == -9
    assert not (tmp_path / "p.safetensors").exists() and len([*tmp_path.iterdir()]) == 1
    predict(ensemble(), X, out=tmp_path / "p.safetensors")
    assert [path.name for path in tmp_path.iterdir()] == ["p.safetensors"]


@pytest.mark.skipif(not hasattr(os, "posix_fallocate"), reason="space cannot be reserved here")
def test_a_full_disk_is_found_before_the_first_pass_ends(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    seen = []
    with pytest.raises(StorageError, match=r"bytes needed\): disk full"):
        predict(
            ensemble(),
            (seen.append(1) or part for part in X.split(2)),
            out=tmp_path / "p.safetensors",
        )
    assert len(seen) == 1 and not [*tmp_path.iterdir()]


@pytest.fixture
def small_files():
    """A block in which the system allows no file above 100 kB."""
    resource = pytest.importorskip("resource")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_disk_that_fills_up_has_its_sentence(tmp_path, small_files):
    batches = (torch.ones(500, 3) for _ in range(100))
    with pytest.raises(StorageError, match="larger than the system allows"):
        predict(ensemble(), batches, out=tmp_path / "p.safetensors")
    assert not [*tmp_path.iterdir()]


def test_names_and_contents_are_checked(tmp_path):
    with pytest.raises(ConfigError, match="safetensors"):
        predict(ensemble(), X, out=tmp_path / "p.npy")
    with pytest.raises(DataError, match="nothing to predict"):
        predict(ensemble(), [], out=tmp_path / "p.safetensors")
    with pytest.raises(StorageError, match="no such file"):
        Predictive.load(tmp_path / "p.safetensors")
    assert not [*tmp_path.iterdir()]


def test_a_damaged_file_is_refused(tmp_path):
    file = tmp_path / "p.safetensors"
    predict(ensemble(), X, out=file)
    sound = file.read_bytes()
    header = int.from_bytes(sound[:8], "little") + 8
    damaged = {
        "cut": sound[:-1],
        "longer": sound + b"0",
        "another tensor": sound.replace(b'"members": {', b'"weights": {'),
        "no likelihood": sound.replace(b'"likelihood"', b'"likelihoop"'),
        "unknown": sound.replace(b"shoal prediction 1", b"shoal prediction 9"),
        "weights": sound.replace(b'"weights": "null"', b'"weights": "[1]" '),
        "huge header": (1 << 60).to_bytes(8, "little") + sound[8:],
        "header alone": sound[: header // 2],
    }
    for name, content in damaged.items():
        assert content != sound, name
        file.write_bytes(content)
        with pytest.raises((CheckpointCorrupt, DataError)):
            Predictive.load(file)


def test_large_arrays_are_converted_batch_by_batch(monkeypatch):
    sources = sys.modules["shoal.data.batches.sources"]
    bytes_ = np.arange(69, dtype=np.uint8).reshape(23, 3)
    wanted = predict(ensemble(), bytes_, batch_size=4).members
    sizes = []
    real = sources.as_inputs
    monkeypatch.setattr(sources, "_LARGE", 10)
    monkeypatch.setattr(
        sources, "as_inputs", lambda x, *more: sizes.append(len(x)) or real(x, *more)
    )
    assert torch.equal(predict(ensemble(), bytes_, batch_size=4).members, wanted)
    assert max(sizes) == 4
    holes = X.clone()
    holes[9, 1] = torch.nan
    with pytest.raises(DataError, match=r"x\[9, 1\]"):
        predict(ensemble(), holes, batch_size=4)


def test_read_only_memory_maps_are_inputs(tmp_path):
    np.save(tmp_path / "x.npy", X.numpy())
    mapped = np.load(tmp_path / "x.npy", mmap_mode="r")
    assert torch.equal(predict(ensemble(), mapped).members, predict(ensemble(), X).members)


def test_gaussian_scores_of_a_file_are_those_of_memory(tmp_path):
    run = type("R", (), {"ensemble": ensemble(), "likelihood": Gaussian(0.3)})()
    y = drawn(23, 4)
    wanted = evaluate(predict(run, X), y)
    assert evaluate(predict(run, X, out=tmp_path / "p.safetensors"), y) == wanted
    assert Predictive.load(tmp_path / "p.safetensors").likelihood == Gaussian(0.3)

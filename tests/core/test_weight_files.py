"""Weights from files of anyone: read without running code, or refused in one sentence."""

import os
import pickle
import zipfile

import pytest
import torch
from safetensors.torch import save_file
from small_runs import assert_equal_trees, assert_one_sentence, normed, plain
from torch import nn

from shoal.core.errors import DataError, StorageError
from shoal.core.storage.files import layout
from shoal.core.storage.weight_files import difference, read_weights, renamed, weight_files


def states(count=3, build=plain):
    torch.manual_seed(0)
    return [build().state_dict() for _ in range(count)]


@pytest.mark.parametrize("ending", ["safetensors", "pt", "pth", "bin"])
def test_a_state_dict_is_read_bit_for_bit(ending, tmp_path):
    (state,) = states(1, normed)
    path = tmp_path / f"net.{ending}"
    save_file(state, path) if ending == "safetensors" else torch.save(state, path)
    assert_equal_trees(read_weights(path), dict(state))


def test_the_old_format_of_torch_is_read(tmp_path):
    (state,) = states(1)
    torch.save(state, tmp_path / "net.pt", _use_new_zipfile_serialization=False)
    assert_equal_trees(read_weights(tmp_path / "net.pt"), dict(state))


@pytest.mark.parametrize("key", ["state_dict", "model_state_dict", "model"])
def test_a_training_checkpoint_gives_the_weights_of_its_network(key, tmp_path):
    (state,) = states(1)
    torch.save({key: state, "epoch": 3, "optimizer": {"lr": 0.1}}, tmp_path / "last.ckpt")
    assert_equal_trees(read_weights(tmp_path / "last.ckpt"), dict(state))


@pytest.mark.parametrize("prefix", ["module.", "model.", "_orig_mod.", "module.model."])
def test_a_prefix_of_all_names_is_taken_off(prefix):
    (state,) = states(1)
    long = {prefix + name: tensor for name, tensor in state.items()}
    assert_equal_trees(renamed(long, state), dict(state))
    assert renamed(long | {"other": torch.zeros(1)}, state).keys() == {*long, "other"}
    assert renamed(state, state).keys() == state.keys()


class Attack:
    """Runs a command when it is unpickled."""

    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return os.system, (f"touch {self.marker}",)


@pytest.mark.parametrize("new", [True, False])
def test_a_file_that_would_run_code_does_not(new, tmp_path):
    marker, path = tmp_path / "ran", tmp_path / "net.pt"
    torch.save({"a": Attack(marker)}, path, _use_new_zipfile_serialization=new)
    with pytest.raises(DataError) as error:
        read_weights(path)
    assert_one_sentence(error.value, "net.pt", "system", "state_dict")
    assert not marker.exists()


def test_a_bare_pickle_that_would_run_code_does_not(tmp_path):
    marker, path = tmp_path / "ran", tmp_path / "net.bin"
    path.write_bytes(pickle.dumps(Attack(marker)))
    with pytest.raises(DataError) as error:
        read_weights(path)
    assert_one_sentence(error.value, "net.bin")
    assert not marker.exists()


def test_the_environment_cannot_allow_pickles(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    torch.save(Attack(tmp_path / "ran"), tmp_path / "net.pt")
    with pytest.raises(DataError):
        read_weights(tmp_path / "net.pt")
    assert not (tmp_path / "ran").exists()


def test_a_whole_pickled_network_is_refused(tmp_path):
    torch.save(plain(), tmp_path / "net.pt")
    with pytest.raises(DataError) as error:
        read_weights(tmp_path / "net.pt")
    assert_one_sentence(error.value, "torch.save(network.state_dict(), FILE)")


@pytest.mark.parametrize("ending", ["safetensors", "pt"])
@pytest.mark.parametrize("share", [0, 0.01, 0.5, 0.99])
def test_a_truncated_file_is_refused(ending, share, tmp_path):
    (state,) = states(1)
    path = tmp_path / f"net.{ending}"
    save_file(state, path) if ending == "safetensors" else torch.save(state, path)
    path.write_bytes(path.read_bytes()[: int(share * path.stat().st_size)])
    with pytest.raises(DataError) as error:
        read_weights(path)
    assert_one_sentence(error.value, path.name)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (torch.zeros(3), ["Tensor"]),
        ({}, ["dict"]),
        ([1, 2], ["list"]),
        ({"a": 3.0}, ["'a'", "float"]),
        ({1: torch.zeros(2)}, ["'1'"]),
        ({"a": torch.eye(3).to_sparse()}, ["'a'"]),
    ],
)
def test_a_file_without_weights_is_refused(value, words, tmp_path):
    torch.save(value, tmp_path / "net.pt")
    with pytest.raises(DataError) as error:
        read_weights(tmp_path / "net.pt")
    assert_one_sentence(error.value, "net.pt", *words)


def test_a_compressed_archive_is_refused(tmp_path):
    torch.save(states(1)[0], tmp_path / "a.pt")
    with (
        zipfile.ZipFile(tmp_path / "a.pt") as old,
        zipfile.ZipFile(tmp_path / "b.pt", "w", zipfile.ZIP_DEFLATED) as new,
    ):
        for entry in old.infolist():
            new.writestr(entry.filename, old.read(entry))
    with pytest.raises(DataError) as error:
        read_weights(tmp_path / "b.pt")
    assert_one_sentence(error.value, "compressed")


def test_a_folder_gives_its_files_in_natural_order(tmp_path):
    for name in ("net10.pt", "net2.pt", "net1.safetensors", "notes.txt", "curve.npz"):
        (tmp_path / name).touch()
    found = [path.name for path in weight_files([tmp_path])]
    assert found == ["net1.safetensors", "net2.pt", "net10.pt"]


def test_folders_of_saved_models_are_one_network_each(tmp_path):
    for index in (0, 1, 10):
        inner = tmp_path / f"seed{index}"
        inner.mkdir()
        for name in ("pytorch_model.bin", "optimizer.pt", "training_args.bin"):
            (inner / name).touch()
    (tmp_path / "seed1" / "model.safetensors").touch()
    found = [str(path.relative_to(tmp_path)) for path in weight_files([tmp_path])]
    assert found == [
        "seed0/pytorch_model.bin",
        "seed1/model.safetensors",
        "seed10/pytorch_model.bin",
    ]
    assert weight_files([tmp_path / "seed1"]) == [tmp_path / "seed1" / "model.safetensors"]


def test_files_keep_the_order_in_which_they_are_named(tmp_path):
    paths = [tmp_path / name for name in ("b.pt", "a.pt")]
    for path in paths:
        path.touch()
    assert weight_files(paths) == paths


def test_files_that_cannot_be_members_get_one_sentence(tmp_path):
    (tmp_path / "a.pt").touch()
    (tmp_path / "a.npz").touch()
    (tmp_path / "empty").mkdir()
    (tmp_path / "parts").mkdir()
    (tmp_path / "parts" / "model.safetensors.index.json").touch()
    for paths, kind, word in [
        ([], DataError, "no files"),
        ([tmp_path / "a.pt", tmp_path / "." / "a.pt"], DataError, "twice"),
        ([tmp_path / "a.npz"], DataError, ".safetensors"),
        ([tmp_path / "empty"], DataError, "empty"),
        ([tmp_path / "parts"], DataError, "several files"),
        ([tmp_path / "none.pt"], StorageError, "none.pt"),
    ]:
        with pytest.raises(kind) as error:
            weight_files(paths)
        assert_one_sentence(error.value, word)


def test_a_difference_names_the_nearest_right_name():
    wanted = layout(plain().state_dict())
    right = dict(plain().state_dict())
    assert difference(right, wanted) is None
    wrong = {name.replace("2.weight", "2.weights"): t for name, t in right.items()}
    assert difference(wrong, wanted) == "there is no '2.weight'; did you mean '2.weights'?"
    more = right | {"2.biass": torch.zeros(4)}
    assert difference(more, wanted) == "the network has no '2.biass'; did you mean '2.bias'?"
    other = dict(nn.Sequential(nn.Linear(3, 9), nn.Tanh(), nn.Linear(9, 4)).state_dict())
    told = difference(other, wanted)
    assert told is not None and "(9, 3)" in told and "(8, 3)" in told

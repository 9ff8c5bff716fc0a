"""A flipped bit in a prediction file or an adapter folder is an error or a warning."""

import random
import warnings

import pytest
import torch
from torch import nn

from shoal.core.errors import ShoalError, ShoalWarning
from shoal.core.storage.files import read_tensors, write_tensors
from shoal.inference import adapters
from shoal.inference.adapting.peft import CONFIG, TENSORS, read_folder
from shoal.inference.ensemble import Ensemble
from shoal.inference.likelihoods import Gaussian
from shoal.prediction.predictive import Predictive

FLIPS, SEED = 150, 0


def silent_flips(path, read, flips=FLIPS):
    """How many of some single-bit flips are read without an error and without a warning."""
    data, chance, silent = path.read_bytes(), random.Random(SEED), 0
    for _ in range(flips):
        place, bit = chance.randrange(len(data)), chance.randrange(8)
        damaged = bytearray(data)
        damaged[place] ^= 1 << bit
        path.write_bytes(damaged)
        with warnings.catch_warnings():
            warnings.simplefilter("error", ShoalWarning)
            try:
                read()
            except (ShoalError, ShoalWarning):
                continue
        silent += 1
    path.write_bytes(data)
    read()  # the file itself is sound
    return silent


def test_no_flip_of_a_prediction_file_is_silent(tmp_path):
    path, weights = tmp_path / "p.safetensors", torch.tensor([0.25, 0.75])
    Predictive(torch.randn(2, 9, 1), Gaussian(0.5), weights).save(path)
    assert silent_flips(path, lambda: Predictive.load(path)) == 0


@pytest.mark.parametrize("name", [TENSORS, CONFIG])
def test_no_flip_of_an_adapter_folder_is_silent(name, tmp_path):
    ensemble = Ensemble.init(
        adapters.lora(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)), rank=2), members=1
    )
    adapters.save_peft(ensemble, tmp_path)
    folder = next(tmp_path.iterdir())
    assert silent_flips(folder / name, lambda: read_folder(folder)) == 0


def test_files_without_a_digest_are_read_with_a_note(tmp_path):
    path = tmp_path / "p.safetensors"
    Predictive(torch.randn(2, 9, 1), Gaussian(0.5)).save(path)
    import safetensors

    with safetensors.safe_open(path, "pt") as file:
        facts = {key: value for key, value in file.metadata().items() if key != "sha256"}
    write_tensors(path, read_tensors(path), facts)
    with pytest.warns(ShoalWarning, match="no digest"):
        assert len(Predictive.load(path)) == 9

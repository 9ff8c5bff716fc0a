"""`shoal predict` on bad files: one sentence, the exit status of bad data or of storage."""

import gzip
import io
import os
import pickle
import random
import struct

import numpy as np
import pytest
from fuzzed_files import damaged, finished_run
from small_runs import points

from shoal.cli.main import main

SOUND = points(3)[0].numpy()


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return str(finished_run(tmp_path_factory.mktemp("bad") / "run"))


def npy(array, **options):
    stream = io.BytesIO()
    np.save(stream, array, **options)
    return stream.getvalue()


def claim(shape):
    text = f"{{'descr': '<f8', 'fortran_order': False, 'shape': {shape}, }}\n".encode()
    return b"\x93NUMPY\1\0" + struct.pack("<H", len(text)) + text


BAD = {
    "empty.csv": b"",
    "words.csv": b"a,b,c\nx,y,z\n",
    "ragged.csv": b"1,2,3\n4,5\n",
    "latin.csv": b"1,2,\xe9\n",
    "nan.csv": b"1,2,nan\n",
    "huge.csv": b"1,2,1e999\n",
    "wide.csv": b"1,2,3,4\n",
    "empty.npy": b"",
    "text.npy": b"hello",
    "short.npy": npy(SOUND)[:-5],
    "claims.npy": claim((10**11, 3)),
    "negative.npy": claim((-1, 3)),
    "objects.npy": npy(np.array([[print, 1, 2]], dtype=object), allow_pickle=True),
    "complex.npy": npy(SOUND.astype(complex)),
    "infinite.npy": npy(np.full((2, 3), np.inf)),
    "none.npy": npy(np.zeros((0, 3))),
    "scalar.npy": npy(np.float64(3)),
    "pickle.npy": pickle.dumps(SOUND),
    "no.npz": b"PK\3\4",
    "gzip.npz": gzip.compress(npy(SOUND)),
    "array.npz": npy(SOUND),
    "page.html": b"<html>",
    "noending": b"1,2,3\n",
}


def one_sentence(arguments, capsys, *statuses):
    assert main(arguments) in statuses
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("shoal: ") and err.count("\n") == 1 and "Traceback" not in err, err
    return err


@pytest.mark.parametrize("name", BAD)
def test_one_sentence_names_the_file(name, run, tmp_path, capsys):
    (tmp_path / name).write_bytes(BAD[name])
    assert name in one_sentence(["predict", run, str(tmp_path / name)], capsys, 65)


def test_what_is_no_file(run, tmp_path, capsys):
    os.mkfifo(tmp_path / "pipe.csv")
    (tmp_path / "folder.npy").mkdir()
    (tmp_path / "gone.csv").symlink_to(tmp_path / "nowhere.csv")
    for name in ("pipe.csv", "folder.npy", "gone.csv", "nowhere.csv"):
        assert name in one_sentence(["predict", run, str(tmp_path / name)], capsys, 74)


@pytest.mark.parametrize("ending", ["csv", "npy"])
def test_damaged_files_give_predictions_or_one_sentence(ending, run, tmp_path, capsys):
    path, chance = tmp_path / f"a.{ending}", random.Random(ending)
    text = "\n".join(",".join(map(str, row)) for row in SOUND.tolist()).encode()
    sound = {"csv": text, "npy": npy(SOUND)}[ending]
    for _ in range(30):
        path.write_bytes(damaged(sound, b"", chance) or b"")
        status = main(["predict", run, str(path)])
        out, err = capsys.readouterr()
        assert (status, err) == (0, "") or (status == 65 and err.count("\n") == 1 and not out)

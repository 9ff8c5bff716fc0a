"""Damaged files of every format that Shoal reads, and a watch over what reading them does.

A damaged file gives its content or an error of ours in one sentence, within bounds of time and
memory. Nothing of it runs: an audit hook sees code, processes, sockets and pickles.
"""

import codecs
import gzip
import json
import random
import resource
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from small_runs import points, shoal_of
from torch import nn

import shoal
from shoal.analysis.evidence.compute_evidence import evidence, load_evidence, save_evidence
from shoal.core.errors import ShoalError, ShoalWarning
from shoal.core.storage.files import read_tensors, sealed, write_tensors
from shoal.core.storage.formats import to_json
from shoal.core.storage.weight_files import read_weights
from shoal.data.dataset import Dataset, Split
from shoal.data.files.raw import read_batch
from shoal.data.files.readers import read_idx
from shoal.data.load import load_file
from shoal.evaluation.evaluate import evaluate_run
from shoal.experiment.build import check_names
from shoal.experiment.config import experiments, load_config
from shoal.inference.adapting.peft import read_folder, write_folder
from shoal.models import MLP, Blueprint
from shoal.page.report_data import load_report_data
from shoal.prediction.predictive import Predictive
from shoal.training.fit import fit
from shoal.training.folder.choice import CandidateResult, Choice, Trial, write_choice
from shoal.training.folder.history import read_history

STRUCTURE = b'0123456789{}[]",:=.-+eE \n\x00\xff'
TOKENS = (
    b"nan", b"-Infinity", b"1e999", b"9" * 400, b"null", b"true", b"[" * 3000, b'{"a":' * 300,
    b'"\\ud800"', b"\xff\xfe", b"-1", b"0", b"__reduce__", b"../../x", b"\r\n", b"'''", b"#",
    b"a." * 600, b"=", b"1979-05-27", b"0x7fffffffffffffff", b"\x00" * 64,
    "\u202e\x1b[31m".encode(),
)  # fmt: skip
NUMBERS = (0, 1, 0x7F, 0xFF, 0x7FFF, 0xFFFF, 0x7FFFFFFF, 0xFFFFFFFF, 2**40, 2**63 - 1, 2**64 - 1)
ODD = (None, True, -1, 0, 2**70, 1e308, "", "x" * 9999, "<b>", [], {}, [[]], {"a": {}}, [None] * 9)
SECONDS, MEGABYTES = 2.0, 256
"""Limits of one file, in seconds of the processor and in growth of the resident set."""


def damaged(data: bytes, other: bytes, chance: random.Random) -> bytes | None:
    """One way to damage the content of a file; None removes it."""
    data, kind = bytearray(data), chance.randrange(12)
    at = chance.randrange(len(data) or 1)
    if kind < 3 and data:
        data[at] ^= 1 << chance.randrange(8)
    elif kind == 3 and data:
        data[at] = chance.choice(STRUCTURE)
    elif kind == 4:
        del data[at:]
    elif kind == 5:
        del data[at : at + chance.choice((1, 2, 20))]
    elif kind == 6:
        data[at:at] = bytes(chance.choice(STRUCTURE) for _ in range(chance.choice((1, 2, 20))))
    elif kind == 7:
        return other
    elif kind == 8 and chance.random() < 0.2:
        return None
    elif kind == 9:
        token = chance.choice(TOKENS)
        data[at : at + chance.choice((0, len(token)))] = token
    elif kind == 10:
        size = chance.choice((1, 2, 4, 8))
        number = chance.choice(NUMBERS) & (256**size - 1)
        data[at : at + size] = number.to_bytes(size, chance.choice(("little", "big")))
    else:
        end = chance.randrange(len(data) or 1)
        data[at : at + 9], data[end : end + 9] = data[end : end + 9], data[at : at + 9]
    return bytes(data)


def resealed(data: bytes, _: bytes, chance: random.Random) -> bytes:
    """A JSON table with one odd value, under a right digest: the work of a forger."""
    table = json.loads(data)
    place, key = table, chance.choice([*table])
    while isinstance(place[key], dict | list) and place[key] and chance.random() < 0.8:
        place = place[key]
        key = chance.choice([*place] if isinstance(place, dict) else range(len(place)))
    if isinstance(place, dict) and chance.random() < 0.2:
        del place[key]
    else:
        place[key] = chance.choice(ODD)
    return to_json(sealed(table) if "sha256" in table else table).encode()


@dataclass(frozen=True)
class Reader:
    """A reader, its sound files, and how they are damaged.

    Attributes:
        make: writes sound files into a folder, and returns those to damage.
        read: reads the folder.
        damage: from content, content of another file and random numbers to damaged content.
    """

    make: Callable[[Path], list[Path]]
    read: Callable[[Path], object]
    damage: Callable[[bytes, bytes, random.Random], bytes | None] = damaged


BLUEPRINT = Blueprint(MLP((4,), "tanh"), (3,), 4)


def _tensors(folder):
    path = folder / "a.safetensors"
    write_tensors(path, {"a": torch.ones(3), "b": torch.ones(2, 2, dtype=torch.int8)})
    return [path]


def _configs(folder):
    (folder / "a.toml").write_text(experiments()["digits"])
    (folder / "b.toml").write_text(experiments()["digits-forde"])
    return sorted(folder.glob("*.toml"))


def _read_configs(folder):
    for path in sorted(folder.glob("*.toml")):
        check_names(load_config(path))


def _idx(folder):
    content = b"\0\0\x08\3" + bytes((0, 0, 0, 3, 0, 0, 0, 4, 0, 0, 0, 5)) + bytes(60)
    (folder / "a.idx").write_bytes(content)
    (folder / "b.gz").write_bytes(gzip.compress(content))
    return [folder / "a.idx", folder / "b.gz"]


def _arrays(folder):
    x, y = np.arange(12.0).reshape(4, 3), np.array([0, 1, 1, 0])
    np.savez(folder / "a.npz", x=x, y=y)
    np.savez_compressed(folder / "b.npz", x=x, y=y)
    np.save(folder / "c.npy", np.asfortranarray(x))
    return sorted(folder.glob("*.np?"))


def _table(folder):
    path = folder / "a.csv"
    path.write_text('"a","b",c\n1,2.5,0\n3e2,-4,1\n5,6,1\n')
    return [path]


def _pictures(folder):
    from PIL import Image

    Image.init()  # imports every format now, not while a damaged file is read
    noise = np.random.default_rng(0).integers(0, 255, (6, 5, 3), np.uint8)
    for ending in ("png", "jpg", "gif", "bmp", "tif", "webp", "ppm"):
        (folder / ending).mkdir()
        Image.fromarray(noise).save(folder / ending / f"a.{ending}")
    return sorted(folder.glob("*/*"))


def _history(folder):
    row = {"epoch": 1, "step": 3, "loss": 0.5, "member_loss": [0.5, None], "alive": 2}
    row |= dict.fromkeys(("drive", "push", "ratio", "ratio_max", "h2", "effective", "lr"), 0.25)
    rows = [row | {"epoch": epoch, "seconds": 0.1} for epoch in range(1, 5)]
    (folder / "history.jsonl").write_text("".join(to_json(row) + "\n" for row in rows))
    return [folder / "history.jsonl"]


def _adapter(folder):
    base = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    ensemble = shoal.Ensemble.init(shoal.adapters.lora(base, rank=2, targets="0"), 1)
    write_folder(folder, ensemble.member(0), ensemble.weights)
    return [folder / "adapter_config.json", folder / "adapter_model.safetensors"]


def _weights(folder):
    torch.save(nn.Linear(3, 2).state_dict(), folder / "a.pt")
    torch.save({"epoch": 3, "state_dict": nn.Linear(3, 2).state_dict()}, folder / "b.pt")
    return sorted(folder.glob("*.pt"))


def _batch(folder):
    (folder / "a.bin").write_bytes(bytes(3073) * 2)
    return [folder / "a.bin"]


def _prediction(folder):
    members = torch.randn(2, 5, 4, generator=torch.Generator().manual_seed(0))
    Predictive(members, shoal.likelihoods.Categorical()).save(folder / "a.safetensors")
    return [folder / "a.safetensors"]


def _ensemble(folder):
    shoal_of(BLUEPRINT, 2).save(folder / "a.safetensors")
    return [folder / "a.safetensors"]


LONGER = Trial(2, 0.1, 0.9, 1.2, (-0.1, 0.02), (-0.3, 0.1))
CHOSEN = Choice(
    {"method": "auto"}, "forde:4", "It is better.",
    (
        CandidateResult("ensemble", "ensemble", None, (Trial(2, 0.1, 1.0, 1.5),)),
        CandidateResult("forde:4", "forde", 4.0, (LONGER,)),
        CandidateResult("kde:9", "kde", 9.0, failed="all members diverged"),
    ),
    "held-out training data", 8, ("noise",), 1.5, 4, 0.2,
)  # fmt: skip


def finished_run(folder: Path, seed: int = 0) -> Path:
    """A run with every file that training, evaluation and evidence write."""
    x, y = points(seed=seed)
    data = Dataset("mine", train=Split(x, y), test=Split(x, y), ood={"far": Split(x + 9)})
    run = fit(
        shoal_of(BLUEPRINT, 2, seed), data, method="forde", epochs=2, batch_size=20, seed=seed,
        out=folder, save_every=0.0, keep_every=1, progress=False,
    )  # fmt: skip
    evaluate_run(run, data)
    save_evidence(evidence(run, data, priors=False), folder)
    write_choice(folder, CHOSEN)
    return folder


def _run(folder):
    finished_run(folder)
    return sorted(path for path in folder.rglob("*") if path.is_file())


def _read_run(folder):
    run = shoal.load(folder)
    assert all(isinstance(row, dict) for row in run.history)
    return shoal.predict(run, points(2)[0]).members


def _forged(folder):
    finished_run(folder)
    return [
        folder / "provenance.json",
        folder / "scores.json",
        folder / "evidence.json",
        folder / "choice.json",
    ]


def _read_forged(folder):
    found = load_report_data([folder])
    load_evidence(folder)
    return found.entries[0].name, found.groups


def _read_page(folder):
    from shoal.page.report import _built_sections

    return _built_sections(load_report_data([folder]))


READERS = {
    "safetensors": Reader(_tensors, lambda f: read_tensors(f / "a.safetensors")),
    "TOML config": Reader(_configs, _read_configs),
    "IDX": Reader(_idx, lambda f: [read_idx(f / name, 3) for name in ("a.idx", "b.gz")]),
    "npz and npy": Reader(_arrays, lambda f: [load_file(path) for path in sorted(f.glob("*.np?"))]),
    "CSV": Reader(_table, lambda f: load_file(f / "a.csv", target="class")),
    "images": Reader(_pictures, lambda f: load_file(f, shape=(3, 6, 5))),
    "history (JSON lines)": Reader(_history, lambda f: read_history(f / "history.jsonl")),
    "adapter folder": Reader(_adapter, read_folder),
    "weights of torch.save": Reader(
        _weights, lambda f: [read_weights(f / name) for name in ("a.pt", "b.pt")]
    ),
    "CIFAR batch": Reader(_batch, lambda f: read_batch(f / "a.bin")),
    "prediction file": Reader(
        _prediction, lambda f: Predictive.load(f / "a.safetensors").mean.sum()
    ),
    "ensemble file": Reader(
        _ensemble, lambda f: shoal.Ensemble.load(f / "a.safetensors", BLUEPRINT)
    ),
    "run folder": Reader(_run, _read_run),
    "report of a run folder": Reader(_run, _read_forged),
    "forged provenance, scores, evidence": Reader(_forged, _read_forged, resealed),
    "page of a forged folder": Reader(_forged, _read_page, resealed),
}  # fmt: skip
"""Every reader of files, by name."""


class Watch:
    """Sees whether something runs while a file is read; Python never removes an audit hook."""

    SUSPECT = (
        "exec", "os.system", "os.exec", "os.fork", "os.posix_spawn", "subprocess.Popen",
        "socket.connect", "socket.getaddrinfo", "pickle.find_class", "ctypes.dlopen",
        "webbrowser.open", "shutil.rmtree", "os.remove", "os.rename",
    )  # fmt: skip

    def __init__(self):
        for codec in ("unicode_escape", "cp437"):  # of messages and archives
            codecs.lookup(codec)  # imported now, not while it watches
        self.seen, self.on = [], False
        sys.addaudithook(self._note)

    def _note(self, event, arguments):
        if self.on and event in self.SUSPECT:
            self.seen.append((event, str(arguments)[:200]))


_watches = []


def watch() -> Watch:
    """The watch of this process."""
    if not _watches:
        _watches.append(Watch())
    return _watches[0]


def resident_peak() -> float:
    """Largest resident set of this process so far, in MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def attempt(action: Callable[[], object]) -> tuple[Any, ShoalError | None, bool]:
    """The result, or the error of ours in one line; and whether there was a warning of ours."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result, refusal = None, None
        try:
            result = action()
        except ShoalError as error:
            refusal = error
            assert str(error) and "\n" not in str(error), str(error)
            assert type(error).__module__ == "shoal.core.errors", type(error)
    for warned in caught:
        assert issubclass(warned.category, ShoalWarning), str(warned.message)
    return result, refusal, bool(caught)


def fuzz(name: str, count: int, folder: Path, seed: int = 0) -> dict[str, float]:
    """Read `count` damaged files; counts and the largest time and growth of memory.

    Args:
        name: a key of `READERS`.
        count: number of damaged files.
        folder: an empty folder.
        seed: with the name, fixes the damage.
    """
    reader, chance, seen = READERS[name], random.Random(f"{name} {seed}"), watch()
    seen.seen.clear()
    places = reader.make(folder)
    sound = {place: place.read_bytes() for place in places}
    assert reader.read(folder) is not None or name == "TOML config"  # imports what is lazy, too
    refused, slowest, before = 0, 0.0, resident_peak()
    for _ in range(count):
        place = chance.choice(places)
        other = sound[chance.choice(places)]
        bad = reader.damage(sound[place], other, chance)
        for _ in range(chance.choice((0, 0, 1, 3)) if reader.damage is damaged and bad else 0):
            bad = damaged(bad, other, chance) or b""
        place.unlink() if bad is None else place.write_bytes(bad)
        started = time.process_time()
        seen.on = True
        try:
            _, refusal, _ = attempt(lambda: reader.read(folder))
        except Exception as error:
            raise AssertionError(f"{name}: {place.name} of {bad!r:.2000}") from error
        finally:
            seen.on = False
        taken = time.process_time() - started
        assert taken < SECONDS, (name, place.name, taken, (bad or b"")[:500])
        assert not seen.seen, (name, place.name, seen.seen, (bad or b"")[:500])
        refused, slowest = refused + (refusal is not None), max(slowest, taken)
        place.write_bytes(sound[place])
    grown = resident_peak() - before
    assert grown < MEGABYTES, (name, grown)
    return {"files": count, "refused": refused, "slowest": round(slowest, 3), "grown": round(grown)}

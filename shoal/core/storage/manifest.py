"""The manifest of a checkpoint: its files, what it belongs to, and digests of both."""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from shoal.core.errors import CheckpointCorrupt
from shoal.core.storage.disk import size_of
from shoal.core.storage.files import header_sha256, put_bytes, read_sealed, sealed, sha256
from shoal.core.storage.formats import to_json

__all__ = [
    "PART",
    "SHARDED",
    "Files",
    "check_digests",
    "check_headers",
    "check_sizes",
    "entry",
    "put_manifest",
    "read_manifest",
]

FORMAT, SHARDED = 2, 3
"""Format of a checkpoint that one process writes, and that several processes write."""

MAX_MANIFEST = 1 << 20
NAME = "manifest.json"

PART = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,99}")
"""Names that a file of tensors may have, without its ending."""

_FILE = re.compile(rf"state\.json|{PART.pattern}\.safetensors")
_NAMES = {"format", "step", "files", "run"}
_KEYS = {1: _NAMES - {"run"}, FORMAT: _NAMES, SHARDED: _NAMES}

Files = dict[str, dict[str, Any]]
"""Size and SHA-256 of files, by name."""


def entry(path: Path, sharded: bool = False) -> dict[str, Any]:
    """What the manifest says about a file.

    A process that reads one shard needs the headers of all, so each has a digest of its own.
    """
    found = {"size": path.stat().st_size, "sha256": sha256(path)}
    return found | ({"header": header_sha256(path)} if sharded else {})


def put_manifest(
    folder: Path, step: int, run: Mapping[str, str], files: Files, sharded: bool = False
) -> None:
    """Write the manifest of a folder which is still temporary.

    Args:
        folder: of one checkpoint, complete but for its manifest.
        step: of training.
        run: digests of what the checkpoint belongs to.
        files: all files of the checkpoint.
        sharded: whether parts may have several files.
    """
    kind = SHARDED if sharded else FORMAT
    manifest = sealed({"format": kind, "step": step, "files": files, "run": dict(run)})
    put_bytes(folder / NAME, to_json(manifest, indent=2).encode())


def read_manifest(folder: Path, step: int, run: Mapping[str, str]) -> dict[str, Any]:
    """The manifest of a checkpoint of this step and run, with the keys of its format alone."""
    manifest = read_sealed(folder / NAME, MAX_MANIFEST, since="run")
    version = manifest.get("format")
    if type(version) is not int or version not in _KEYS:
        raise CheckpointCorrupt(f"{folder} is not a checkpoint of a format from 1 to {SHARDED}")
    if odd := sorted(manifest.keys() ^ _KEYS[version]):
        raise CheckpointCorrupt(f"{folder} has a manifest that lacks or does not know {odd[0]!r}")
    files = manifest["files"]
    if manifest["step"] != step or not isinstance(files, dict) or "state.json" not in files:
        raise CheckpointCorrupt(f"{folder} has a manifest of another step or without files")
    _check_run(folder, manifest.get("run", {}), run)
    return manifest


def _check_run(folder: Path, found: Any, wanted: Mapping[str, str]) -> None:
    if found == dict(wanted):
        return
    known = found if isinstance(found, dict) else {}
    names = [name for name in {**known, **wanted} if known.get(name) != wanted.get(name)]
    raise CheckpointCorrupt(
        f"{folder} does not belong to this run, or {names[0] if names else 'a file'} was changed "
        f"since it was saved; put the file back as it was"
    )


def check_sizes(folder: Path, files: Mapping[str, Any], limit: int | None) -> None:
    """Refuse a checkpoint whose files have other names or sizes than the manifest says.

    More than `limit` bytes in all are refused before any file is read through.
    """
    for name, entry in files.items():
        if not _FILE.fullmatch(name) or not isinstance(entry, dict):
            raise CheckpointCorrupt(f"{folder} has a manifest with the strange file name {name!r}")
        size = size_of(folder / name)
        if entry.keys() - {"header"} != {"size", "sha256"} or size != entry["size"]:
            raise CheckpointCorrupt(
                f"{folder / name} has {size} bytes where the manifest says {entry.get('size')!r}"
            )
        limit = None if limit is None else limit - size
        if limit is not None and limit < 0:
            raise CheckpointCorrupt(f"{folder / name} is larger than it can be")


def check_headers(folder: Path, files: Mapping[str, Any]) -> None:
    """Refuse shards whose header is not what the manifest says."""
    for name, entry in files.items():
        if "header" in entry and header_sha256(folder / name) != entry["header"]:
            raise CheckpointCorrupt(f"{folder / name} is not what was saved: its header differs")


def check_digests(folder: Path, files: Mapping[str, Any], names: Iterable[str]) -> None:
    """Refuse files whose content is not what the manifest says; each is read through once."""
    for name in names:
        if sha256(folder / name) != files[name]["sha256"]:
            raise CheckpointCorrupt(f"{folder / name} is not what was saved: its SHA-256 differs")

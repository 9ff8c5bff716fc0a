"""What to type to make the runs of a page again."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from shoal.app.story import Entry
from shoal.app.toml import parse_toml
from shoal.app.variants import Variant, variant_of

__all__ = ["commands"]

_FITS = 20


def commands(entries: Sequence[Entry]) -> Iterator[str]:
    """One `shoal compare` for all runs of a grid, one `shoal fit` for each other run."""
    grids: dict[Path, list[Entry]] = {}
    alone = []
    for entry in entries:
        folder = None if entry.folder is None else entry.folder.resolve().parent
        if folder is not None and (folder / "grid.toml").exists():
            grids.setdefault(folder, []).append(entry)
        else:
            alone.append(entry)
    for folder, runs in grids.items():
        yield _compare(folder, runs)
    for entry in alone[:_FITS]:
        yield f"shoal fit {entry.name}/config.toml"
    if len(alone) > _FITS:
        yield f"# and so on, for {len(alone) - _FITS} runs more"


def _compare(folder: Path, runs: Sequence[Entry]) -> str:
    shared = parse_toml((folder / "grid.toml").read_text(encoding="utf-8"), "grid.toml")
    usual = shared.get("strength", 1.0)
    methods = ",".join(dict.fromkeys(_variant(entry, usual).label for entry in runs))
    sizes = ",".join(map(str, sorted({entry.members for entry in runs})))
    seeds = sorted({int(entry.seed) for entry in runs})
    first = [] if seeds[0] == 0 else [f"seed={seeds[0]}"]
    parts = [" ".join([f"shoal compare {folder.name}/grid.toml", *first]), f"--methods {methods}"]
    count = 1 + seeds[-1] - seeds[0]
    parts.append(f"--sizes {sizes} --seeds {count} -o {folder.name}-again")
    return " \\\n  ".join(parts)


def _variant(entry: Entry, usual: float) -> Variant:
    """The method as it is typed; a strength that all runs share is in the file."""
    strength = entry.config.get("strength")
    told = None if entry.plain or strength in (None, usual) else float(strength)
    return variant_of(entry.config.get("method"), told)

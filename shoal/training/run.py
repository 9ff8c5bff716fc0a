"""A run: what `fit` returns, what a folder holds, and what everything after it starts from."""

import tomllib
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shoal.core.checkpoints import load_checkpoint, save_checkpoint, steps
from shoal.core.errors import ConfigError, StorageError
from shoal.core.files import read_json, write_json, write_text
from shoal.core.notebook import facts_html
from shoal.core.strict_json import to_json
from shoal.core.toml import to_toml
from shoal.inference import likelihoods
from shoal.inference.ensemble import Ensemble
from shoal.inference.initialise import Build
from shoal.inference.likelihoods import Likelihood
from shoal.models.blueprint import Blueprint
from shoal.training.trainer import Trainer

__all__ = ["Run", "RunFolder", "load", "model_config"]


@dataclass(frozen=True, repr=False)
class Run:
    """A trained ensemble and its story.

    Attributes:
        ensemble: the members.
        likelihood: what their outputs mean.
        config: every setting, as plain values.
        history: one line for each epoch.
        notes: sentences worth reading, such as that repulsion was negligible.
        provenance: versions, device, data digest, range of pixels, wall time.
        folder: where it is kept, None when it is not.
        results: what `shoal.evaluate`, `shoal.landscape` and `shoal.evidence` found, by name, for a
            run without a folder; a folder keeps them in its files.
    """

    ensemble: Ensemble
    likelihood: Likelihood
    config: dict[str, Any]
    history: list[dict[str, Any]]
    notes: list[str] = field(default_factory=list)
    provenance: dict[str, Any] = field(default_factory=dict)
    folder: Path | None = None
    results: dict[str, Any] = field(default_factory=dict, compare=False)

    def __repr__(self) -> str:
        facts = self._facts()
        where = "in memory" if self.folder is None else repr(str(self.folder))
        return f"Run({facts['method']}, {facts['training']}, {self.ensemble!r}, {where})"

    def _repr_html_(self) -> str:
        where = "not kept in a folder" if self.folder is None else self.folder
        notes = {"notes": " ".join(self.notes) or None, "folder": where}
        return facts_html("Run", {**self._facts(), "ensemble": self.ensemble, **notes})

    def _facts(self) -> dict[str, object]:
        method, loss = self.config.get("method"), self.history[-1]["loss"] if self.history else None
        epochs = len(self.history)
        last = "" if loss is None else f", last loss {loss:.4g}"
        return {
            "method": method.get("name", "custom") if isinstance(method, dict) else method,
            "training": f"{epochs} epoch{'' if epochs == 1 else 's'}{last}",
        }


@dataclass(frozen=True)
class RunFolder:
    """The files of a run.

    Attributes:
        path: the folder.
    """

    path: Path

    @property
    def checkpoints(self) -> Path:
        """Where the checkpoints are."""
        return self.path / "checkpoints"

    @property
    def holds_run(self) -> bool:
        """A run has begun here."""
        return (self.path / "config.toml").exists()

    def begin(self, config: dict[str, Any], provenance: dict[str, Any]) -> None:
        """Write what is known from the start."""
        write_json(self.path / "provenance.json", provenance)
        write_text(self.path / "config.toml", to_toml(config))

    def leave(self, made: bool) -> None:
        """Remove the folder if it was made for a run that never began."""
        if made:
            with suppress(OSError):
                self.path.rmdir()

    def save(self, trainer: Trainer, provenance: dict[str, Any], notes: list[str]) -> None:
        """Write a checkpoint, the history so far and the wall time."""
        save_checkpoint(self.checkpoints, trainer.step, trainer.parts(), trainer.state())
        lines = [to_json(row) + "\n" for row in trainer.rows]
        write_text(self.path / "history.jsonl", "".join(lines))
        write_json(self.path / "provenance.json", provenance | {"notes": notes})

    def provenance(self) -> dict[str, Any]:
        """What made the run."""
        return read_json(self.path / "provenance.json")

    def config(self) -> dict[str, Any]:
        """Every setting of the run."""
        path = self.path / "config.toml"
        try:
            return tomllib.loads(path.read_text(encoding="utf-8"))
        except (FileNotFoundError, NotADirectoryError):
            raise StorageError(f"{self.path} is not a run: {self._lack()}") from None
        except (OSError, UnicodeDecodeError, RecursionError, tomllib.TOMLDecodeError) as error:
            raise StorageError(f"{path} cannot be read: {error}") from error

    def _lack(self) -> str:
        if not self.path.exists():
            return "there is no such folder"
        return "it is a file" if self.path.is_file() else "it has no config.toml"


def load(folder: str | Path, build: Build | Sequence[tuple[Build, int]] | None = None) -> Run:
    """The run that a folder holds, at its last good checkpoint.

    Args:
        folder: what `fit(out=...)` wrote.
        build: makes the networks; not needed when the run was made from a registered model.
    """
    files = RunFolder(Path(folder))
    config = files.config()
    if not steps(files.checkpoints):
        raise StorageError(f"{files.path} holds no checkpoint yet; its run was stopped too early")
    likelihood = _likelihood(config)
    build = _builds(config, files.path) if build is None else build
    checkpoint = load_checkpoint(files.checkpoints)
    ensemble = Ensemble.from_state(checkpoint.parts.get("ensemble", {}), build)
    provenance = files.provenance()
    return Run(
        ensemble,
        likelihood,
        config,
        checkpoint.state["history"],
        provenance.pop("notes", []),
        provenance,
        files.path,
    )


def model_config(ensemble: Ensemble) -> dict[str, Any]:
    """What a folder remembers of the networks: their blueprints, or the name of the user's own."""
    tables = []
    for build, group in zip(ensemble.builds, ensemble.groups, strict=True):
        if isinstance(build, Blueprint):
            tables.append(build.spec | {"members": group.members})
        else:
            name = getattr(build, "__qualname__", type(build).__qualname__)
            tables.append({"custom": name, "members": group.members})
    return {"members": ensemble.members, "init_seed": ensemble.seed, "model": tables}


def _builds(config: dict[str, Any], folder: Path) -> list[tuple[Build, int]]:
    """What makes the networks again, and how many each makes."""
    pairs = []
    for table in config.get("model", []):
        if "custom" in table:
            raise ConfigError(
                f"the network of {folder} was made by your own '{table['custom']}', which only "
                f"Python has; type: shoal.load({str(folder)!r}, build={_argument(table['custom'])})"
            )
        try:
            settings = dict(table)
            count = settings.pop("members")
            pairs.append((Blueprint.from_spec(settings), count))
        except (KeyError, TypeError) as error:
            raise ConfigError(f"the run's config.toml has a model without {error}") from error
    return pairs


def _argument(name: str) -> str:
    """A function that can be typed by its name, or a word for it."""
    return name if name.isidentifier() else "build"


def _likelihood(config: dict[str, Any]) -> Likelihood:
    spec = config.get("likelihood", "categorical")
    if isinstance(spec, dict) and "custom" in spec:
        raise ConfigError(
            f"this run's likelihood is your own '{spec['custom']}', which a folder cannot remake; "
            f"register it before training, or use the run that fit returned"
        )
    return likelihoods.registry.make(spec)

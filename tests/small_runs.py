"""Small networks and data for whole runs, and what it means that two runs are the same."""

import hashlib
import json
import re
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from torch import Tensor, nn

from shoal.core.errors import ShoalError
from shoal.inference.ensemble import Ensemble
from shoal.training.fit import fit
from shoal.training.folder.run import Run, RunFolder

CLASSES, POINTS, BATCH = 4, 40, 10
STEPS_PER_EPOCH = POINTS // BATCH
ENGINES = [{"engine": "vmap"}, {"engine": "loop"}, {"engine": "chunk:2"}, {"resident": 2}]
"""Ways in which members run; results must be the same."""


def points(n: int = POINTS, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Inputs [n, 3] and labels of four classes that a line can tell apart."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 3, generator=generator)
    return x, (x[:, 0] > 0).long() + 2 * (x[:, 1] > 0).long()


def plain() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, CLASSES))


def normed() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, CLASSES))


def dropped() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, CLASSES))


def both() -> nn.Module:
    """Everything that a resumed run has to remember: running statistics and random masks."""
    return nn.Sequential(
        nn.Linear(3, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, CLASSES)
    )


class Noisy(nn.Module):
    """Draws from torch's own generator when it trains."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x + 0.1 * torch.randn_like(x) if self.training else x)


def shoal_of(build: Callable[[], nn.Module] = plain, members: int = 3, seed: int = 0) -> Ensemble:
    return Ensemble.init(build, members, seed)


def quick(
    ensemble: Ensemble | Callable[[], nn.Module] = plain, data: object = None, **options: object
) -> Run:
    """A run of a few silent steps, with a repulsion, so that a law is one of both forces."""
    ensemble = ensemble if isinstance(ensemble, Ensemble) else shoal_of(ensemble)
    data = points() if data is None else data
    defaults = {"method": "f-kde", "batch_size": BATCH, "progress": False}
    if "epochs" not in options and "steps" not in options:
        defaults["epochs"] = 2
    return fit(ensemble, data, **(defaults | options))


def story(rows: list[dict]) -> list[dict]:
    """History without the time it took, which no two runs share."""
    return [{key: value for key, value in row.items() if key != "seconds"} for row in rows]


def copied(tree: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in tree.items()}


def frozen(ensemble: Ensemble) -> dict[str, Tensor]:
    """A copy of all that an ensemble carries."""
    return copied(ensemble.state)


def assert_equal_trees(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    """Same names, types and bits."""
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert tensor.dtype == other[name].dtype, name
        torch.testing.assert_close(tensor, other[name], rtol=0, atol=0, equal_nan=True, msg=name)


def differ(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return any(not torch.equal(tensor, other[name]) for name, tensor in one.items())


def assert_same_run(one: Run, other: Run) -> None:
    """Same members, bit for bit, and same story."""
    assert_equal_trees(frozen(one.ensemble), frozen(other.ensemble))
    assert story(one.history) == story(other.history)


def assert_trained_alone(run: Run, networks: Iterable[nn.Module]) -> None:
    """Members equal networks that were trained by themselves."""
    for member, network in enumerate(networks):
        mine = run.ensemble[member].state_dict()
        for name, tensor in network.state_dict().items():
            torch.testing.assert_close(mine[name], tensor, rtol=0, atol=1e-10, msg=name)


def assert_same_folder(one: Path, other: Path) -> None:
    """Same members, optimiser, statistics, random state and story in the last checkpoint."""
    mine, theirs = (RunFolder(folder).checkpoint() for folder in (one, other))
    assert mine.step == theirs.step
    assert mine.parts.keys() == theirs.parts.keys() >= {"ensemble", "optimizer"}
    for part, tensors in mine.parts.items():
        assert_equal_trees(tensors, theirs.parts[part])
    assert story(mine.state.pop("history")) == story(theirs.state.pop("history"))
    assert mine.state == theirs.state
    assert (one / "config.toml").read_bytes() == (other / "config.toml").read_bytes()


def make_old(folder: Path) -> None:
    """Rewrite a run as Shoal 0.1 did: the history in the checkpoint, nothing tied to anything."""
    rows = [json.loads(line) for line in (folder / "history.jsonl").read_text().splitlines()]
    for manifest in folder.glob("checkpoints/step-*/manifest.json"):
        state, known = manifest.with_name("state.json"), json.loads(manifest.read_text())
        values = json.loads(state.read_text())
        values["history"] = rows[: values["history"]["rows"]]
        text = json.dumps(values, indent=2).encode()
        state.write_bytes(text)
        entry = {"size": len(text), "sha256": hashlib.sha256(text).hexdigest()}
        files = known["files"] | {"state.json": entry}
        old = {"format": 1, "step": known["step"], "files": files}
        manifest.write_text(json.dumps(old, indent=2))
    path = folder / "provenance.json"
    values = json.loads(path.read_text())
    del values["run_id"], values["sha256"]
    path.write_text(json.dumps(values, indent=2))


def assert_one_sentence(error: BaseException, *words: str) -> None:
    """One of our errors, whose text is a single sentence that has these words in it."""
    text = str(error)
    assert isinstance(error, ShoalError)
    assert text and "\n" not in text and not re.search(r"[.!]\s+[A-Z]", text), text
    for word in words:
        assert word in text, text


class Pairs(torch.utils.data.Dataset):
    """Points one by one, as a user's own dataset gives them."""

    def __init__(self, x, y):
        self.x, self.y = x, y

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return self.x[index], int(self.y[index])


class Fuse:
    """A learning rate that never changes, and stops everything at one step of its first use."""

    class Blown(Exception):
        pass

    def __init__(self, at: int | None = None) -> None:
        self.at = at

    def __call__(self, step: int, steps: int) -> float:
        if step == self.at:
            raise Fuse.Blown
        return 1.0

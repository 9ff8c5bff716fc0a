"""Small runs that nobody trained: enough for a page to tell its whole story."""

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from shoal.data.dataset import Dataset, Split
from shoal.evaluation.evaluate import evaluate_run
from shoal.inference.ensemble import Ensemble
from shoal.inference.likelihoods import Categorical, Gaussian


@dataclass
class StandIn:
    """What a page needs of a run."""

    ensemble: Any
    likelihood: Any
    config: dict
    history: list
    provenance: dict
    notes: list = field(default_factory=list)
    folder: Path | None = None


def _history(members: int, push: float) -> list[dict[str, Any]]:
    return [
        {
            "epoch": i + 1,
            "step": 10 * i,
            "loss": 1 / (i + 1),
            "drive": 1 / (i + 1),
            "push": push,
            "ratio": push * (i + 1),
            "h2": 1.0 + i,
            "effective": 1.5,
            "member_loss": [1 / (i + 1 + 0.1 * m) for m in range(members)],
            "seconds": 0.5,
        }
        for i in range(8)
    ]


def _config(data: str, method: str, members: int, seed: int) -> dict[str, Any]:
    return {
        "data": data,
        "members": members,
        "model": [{"name": "mlp", "hidden": [8], "members": members}],
        "method": method,
        "seed": seed,
        "init_seed": seed,
        "lr": 0.01,
        "clip": None,
    }


PROVENANCE = {
    "versions": {"shoal": "0.1.0", "torch": "2.13"},
    "device": "cpu",
    "data": {"points": 60, "sha256": "ab" * 32},
    "seconds": 3.25,
}


def _network() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(36, 8), nn.ReLU(), nn.Linear(8, 3))


def _pictures() -> Dataset:
    random = torch.Generator().manual_seed(0)
    x, y = torch.rand(60, 1, 6, 6, generator=random), torch.arange(60) % 3
    x[torch.arange(60), 0, 2 * y] += 1
    return Dataset(
        "pictures",
        train=Split(x, y),
        test=Split(x, y),
        shifts={f"turned-{a}": Split(x.roll(a, 3), y) for a in (1, 2)},
        ood={"noise": Split(3 * torch.rand(40, 1, 6, 6, generator=random))},
        classes=("<b>ant</b>", "bee", "cat"),
    )


@pytest.fixture(scope="session")
def picture_runs():
    """Three methods, two sizes, three seeds: pairs of run and assessment, `kde` of 4 first."""
    data, found = _pictures(), []
    for method, push in (("kde", 1e-5), ("ensemble", 0.0), ("f-svgd", 0.1)):
        for members in (4, 2):
            for seed in range(3):
                ensemble = Ensemble.init(_network, members, seed=seed)
                config = _config("pictures", method, members, seed)
                run = StandIn(
                    ensemble, Categorical(), config, _history(members, push), dict(PROVENANCE)
                )
                found.append((run, evaluate_run(run, data, gallery=4)))
    return found


@pytest.fixture(scope="session")
def line_runs():
    """Two runs of regression with one input."""
    x = torch.linspace(-1, 1, 50).unsqueeze(-1)
    data = Dataset(
        "line",
        train=Split(x[::2], x[::2, 0]),
        test=Split(x, x[:, 0]),
        shifts={"noisy": Split(x, x[:, 0] + 1)},
        ood={"far": Split(10 + x)},
    )
    found = []
    for method in ("f-kde", "ensemble"):
        ensemble = Ensemble.init(lambda: nn.Linear(1, 1), 5, seed=0)
        config = _config("line", method, 5, 0)
        run = StandIn(ensemble, Gaussian(0.3), config, _history(5, 1e-2), dict(PROVENANCE))
        found.append((run, evaluate_run(run, data)))
    return found


@pytest.fixture
def undrawn(monkeypatch):
    """Figures are built but not drawn, for tests of the words of a page."""
    monkeypatch.setattr("shoal.page.report.svg", lambda figure, name, title="": "<svg></svg>")


README = Path(__file__).parents[1] / "README.md"
CENTRES = np.array([[0, 0, 0, 0], [3, 0, 0, 0], [0, 3, 0, 0]])


def points(n, seed, classes=3):
    random = np.random.default_rng(seed)
    y = random.integers(0, classes, n)
    x = CENTRES[y] + random.normal(size=(n, 4))
    return x.astype(np.float32), y


@pytest.fixture(scope="session")
def arrays():
    (x, y), (x_test, y_test) = points(300, 0), points(120, 1)
    return {
        "x": x,
        "y": y,
        "x_test": x_test,
        "y_test": y_test,
        "x_ood": x_test[:60] + 20,
        "build": lambda: nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)),
    }


@pytest.fixture(scope="session")
def readme(arrays, tmp_path_factory):
    """The names that the first block of Python in README.md leaves behind."""
    folder = tmp_path_factory.mktemp("newcomer")
    code = re.search(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    assert code is not None
    names = dict(arrays, x_new=arrays["x_test"], y_new=arrays["y_test"])
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        exec(code[1], names)
    return folder, names

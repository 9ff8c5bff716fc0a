"""Data of the study of repelled input gradients: corrupted digits, and tables."""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional as F

import shoal
from shoal.core.optional import require
from shoal.core.seeds import derive, generator

__all__ = ["corrupted_digits", "tables"]

LEVELS = (1, 2, 3, 4, 5)


def corrupted_digits(seed: int) -> shoal.Dataset:
    """The digits with noise, blur, lost contrast and lost pixels, each at five severities."""
    data = shoal.data.load({"name": "digits", "seed": seed})
    assert data.test is not None, "the digits have a test part"
    x, shifts = data.test.x, {}
    for level in LEVELS:
        noise = torch.randn(x.shape, generator=generator(seed, "noise", level))
        lost = torch.rand(x.shape, generator=generator(seed, "lost", level)) < 0.05 * level
        shifts[f"noise-{level}"] = (x + 0.08 * level * noise).clamp(0, 1)
        shifts[f"lost-{level}"] = torch.where(lost, 0.0, x)
        shifts[f"blur-{level}"] = _blurred(x, 0.2 * level)
        shifts[f"contrast-{level}"] = (1 - 0.15 * level) * x + 0.075 * level
    return replace(data, shifts={k: shoal.Split(v, data.test.y) for k, v in shifts.items()}, ood={})


def _blurred(x: Tensor, share: float) -> Tensor:
    """A mixture of the images and their means over 3 x 3 pixels."""
    return (1 - share) * x + share * F.avg_pool2d(x, 3, stride=1, padding=1)


def tables() -> dict[str, Callable[[int], shoal.Dataset]]:
    """Rows of features by name, each a function of the seed; UCI regression where it is known."""
    found: dict[str, Callable[[int], shoal.Dataset]] = {
        "breast-cancer": lambda seed: _table("load_breast_cancer", seed),
        "wine": lambda seed: _table("load_wine", seed),
        "diabetes": lambda seed: _table("load_diabetes", seed),
    }
    if "uci" in shoal.data.registry:
        for problem in ("concrete", "energy"):
            found[f"uci-{problem}"] = lambda seed, problem=problem: _noisy(
                shoal.data.load({"name": "uci", "problem": problem, "split": seed}), seed
            )
    return found


def _table(name: str, seed: int) -> shoal.Dataset:
    bunch = getattr(require("sklearn.datasets", extra="report"), name)()
    x = torch.tensor(bunch.data).float()
    real = name == "load_diabetes"
    y = torch.tensor(bunch.target).float() if real else torch.tensor(bunch.target).long()
    draw = torch.Generator().manual_seed(derive(seed, "split", name) % 2**63)
    order = torch.randperm(len(x), generator=draw)
    train, test = order[len(x) // 4 :], order[: len(x) // 4]
    x = (x - x[train].mean(0)) / x[train].std(0).clamp(min=1e-6)
    if real:
        y = (y - y[train].mean()) / y[train].std()
    data = shoal.Dataset(name, shoal.Split(x[train], y[train]), test=shoal.Split(x[test], y[test]))
    return _noisy(data, seed)


def _noisy(data: shoal.Dataset, seed: int) -> shoal.Dataset:
    """Test rows with noise of a tenth of each column's spread, and up to a half."""
    assert data.test is not None, "a table has a test part"
    x, shifts = data.test.x, {}
    for level in LEVELS:
        noise = torch.randn(x.shape, generator=generator(seed, "noise", level))
        shifts[f"noise-{level}"] = shoal.Split(x + 0.1 * level * noise, data.test.y)
    return replace(data, shifts=shifts)

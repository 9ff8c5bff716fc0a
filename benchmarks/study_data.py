"""Data of the study of repelled input gradients: corrupted digits and tables."""

from collections.abc import Callable
from dataclasses import replace

import torch

import shoal
from shoal.core.optional import require
from shoal.core.random import derive, generator
from shoal.data.corruptions import with_corruptions

__all__ = ["corrupted_digits", "tables"]

LEVELS = (1, 2, 3, 4, 5)


def corrupted_digits(seed: int) -> shoal.Dataset:
    """The digits with every corruption that applies to grey images, at five severities."""
    alone = replace(shoal.data.load({"name": "digits", "seed": seed}), shifts={}, ood={})
    return with_corruptions(alone, seed=seed)


def tables() -> dict[str, Callable[[int], shoal.Dataset]]:
    """Tables by name, each a function of the seed, with class labels or real targets."""
    found: dict[str, Callable[[int], shoal.Dataset]] = {
        "breast-cancer": lambda seed: _table("load_breast_cancer", seed),
        "wine": lambda seed: _table("load_wine", seed),
        "diabetes": lambda seed: _table("load_diabetes", seed),
    }
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
    """Test inputs with noise of 0.1 to 0.5 standard deviations of each column."""
    assert data.test is not None, "a table has a test set"
    x, shifts = data.test.x, {}
    for level in LEVELS:
        noise = torch.randn(x.shape, generator=generator(seed, "noise", level))
        shifts[f"noise-{level}"] = shoal.Split(x + 0.1 * level * noise, data.test.y)
    return replace(data, shifts=shifts)

"""Functions drawn from the learned priors of a small regression, for the figure."""

import csv
from pathlib import Path
from typing import Any

import torch

from shoal.analysis.evidence.curvature import last_layer
from shoal.analysis.evidence.laplace import fit_laplace
from shoal.analysis.evidence.members import log_likelihoods, modules_of
from shoal.core.random import generator
from shoal.data.dataset import Split

__all__ = ["write_draws"]

DRAWS, GRID = 20, 121


def write_draws(run: Any, data: Any, out: Path, seed: int) -> dict[str, float]:
    """Write draws of seed 0 to prior.csv; the widths and evidences of every seed are returned."""
    train = Split(data.train.x.double(), data.train.y.double())
    values = log_likelihoods(run, data.train)
    modules = modules_of(run.ensemble, range(len(values)))
    expansions = [
        last_layer(module, run.likelihood, train, float(value))
        for module, value in zip(modules, values, strict=True)
    ]
    low, high = float(train.x.min()), float(train.x.max())
    x = torch.linspace(low - 1, high + 1, GRID, dtype=torch.float64)[:, None]
    here = torch.zeros(1, len(expansions[0].theta), dtype=torch.float64)
    curves = {"point masses": torch.cat([e.outputs(x, here) for e in expansions])}
    found = {
        "point masses/log evidence": float(values.logsumexp(0) - torch.tensor(len(values)).log())
    }
    random = generator(seed, "prior draws")
    for centre in ("members", "zero"):
        fitted = fit_laplace(expansions, centre)
        name = f"Gaussians at {'the members' if centre == 'members' else 'zero'}"
        width = float(fitted.log_scales.exp())
        total = fitted.log_evidences.logsumexp(0) - torch.tensor(len(values)).log()
        found |= {f"{name}/log evidence": float(total), f"{name}/width": width}
        some = []
        for index in range(DRAWS):
            e = expansions[index % len(expansions)]
            step = width * torch.randn(1, len(e.theta), generator=random, dtype=torch.float64)
            some.append(e.outputs(x, step - (e.theta if centre == "zero" else 0)))
        curves[name] = torch.cat(some)
    if seed == 0:
        _write(out / "prior.csv", x, curves, train)
    return found


def _write(path: Path, x: torch.Tensor, curves: dict[str, torch.Tensor], train: Split) -> None:
    with path.open("w") as lines:
        writer = csv.writer(lines, lineterminator="\n")
        writer.writerow(["prior", "draw", "x", "y"])
        pairs = zip(train.x.flatten().tolist(), train.y.flatten().tolist(), strict=True)
        writer.writerows(["data", 0, f"{a:.4f}", f"{b:.4f}"] for a, b in pairs)
        for name, values in curves.items():
            for draw, curve in enumerate(values[..., 0]):
                pairs = zip(x.flatten().tolist(), curve.tolist(), strict=True)
                writer.writerows([name, draw, f"{a:.4f}", f"{b:.4f}"] for a, b in pairs)

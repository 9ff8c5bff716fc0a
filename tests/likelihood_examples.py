"""Outputs, targets and all possible targets of any likelihood, from what it says of itself.

A newly registered likelihood needs no example of its own: its kinds say what its targets are.
"""

import torch
from torch import Tensor

from shoal.inference.likelihoods import Likelihood, LogNormal, registry

CLASSES = 4
MOST = 4000

DEFAULTS = [registry[name]() for name in registry if name != "with-derivatives"]
"""Likelihoods of single targets; those of pairs have tests of their own."""


def kind(likelihood: Likelihood) -> str:
    """ "classes", "binary", "counts" or "real"."""
    kinds = likelihood.about.kinds
    if "binary" in kinds or "classes" in kinds:
        return "binary" if "binary" in kinds else "classes"
    assert "numbers" in kinds, f"{likelihood} says neither classes nor numbers: tell its kind here"
    return "counts" if likelihood.discrete else "real"


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def width(likelihood: Likelihood, columns: int = 1) -> int:
    return likelihood.width(CLASSES if kind(likelihood) == "classes" else columns)


def targets(likelihood: Likelihood, *shape: int, columns: int = 1, seed: int = 7) -> Tensor:
    """Random targets, [*shape] for classes and [*shape, columns] otherwise."""
    random = torch.Generator().manual_seed(seed)
    which = kind(likelihood)
    if which == "classes":
        return torch.randint(CLASSES, shape, generator=random)
    if which == "real":
        drawn = torch.randn(*shape, columns, generator=random)
        return drawn.exp() if isinstance(likelihood, LogNormal) else drawn
    most = 2 if which == "binary" else 6
    return torch.randint(most, (*shape, columns), generator=random)


def every_target(likelihood: Likelihood, outputs: Tensor) -> tuple[Tensor, Tensor]:
    """All targets [N] of one column with outputs [C], and the measure of each, to sum over.

    Real targets lie on a grid that grows as sinh, so that heavy tails are inside.
    """
    which = kind(likelihood)
    if which != "real":
        count = {"classes": CLASSES, "binary": 2, "counts": MOST}[which]
        return torch.arange(count), torch.ones(count)
    mean, variance = (moment.squeeze() for moment in likelihood.moments(outputs.unsqueeze(0)))
    u = torch.linspace(-25, 25, 20_001)
    y, measure = mean + variance.sqrt() * u.sinh(), variance.sqrt() * u.cosh() * (u[1] - u[0])
    possible = y > 0 if isinstance(likelihood, LogNormal) else y == y
    return y[possible], measure[possible]


def masses(likelihood: Likelihood, outputs: Tensor) -> tuple[Tensor, Tensor]:
    """All targets [N] of one column with outputs [C], and their probabilities."""
    y, measure = every_target(likelihood, outputs)
    density = likelihood.log_prob(outputs.expand(len(y), -1), y).exp()
    return y, density * measure


def simulated(likelihood: Likelihood, outputs: Tensor, seed: int) -> Tensor:
    """One target for each of the outputs [N, C], drawn from the likelihood."""
    random = torch.Generator().manual_seed(seed)
    if likelihood.about.has_classes:
        probs = likelihood.probs(outputs)
        found = torch.multinomial(probs.flatten(0, -2), 1, generator=random)
        return found.view(probs.shape[:-1])
    level = torch.rand(likelihood.mean(outputs).shape, generator=random)
    low, high = torch.full_like(level, -1e6), torch.full_like(level, 1e6)
    for _ in range(80):
        middle = (low + high) / 2
        below = likelihood.cdf(outputs, middle) < level
        low, high = torch.where(below, middle, low), torch.where(below, high, middle)
    return high.floor() if likelihood.discrete else high

"""The compared methods, published and calibrated, and their training.

`shoal.fit` trains all methods in the same way, with all data in one batch; only the repulsion
differs.
"""

import warnings
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from shoal.analysis.fidelity.problems import Problem
from shoal.core.errors import ConfigError, ShoalWarning
from shoal.core.tree import rows
from shoal.inference.ensemble import Ensemble
from shoal.interaction.methods import METHODS, Method, get
from shoal.interaction.spaces import LastLayer, Layerwise, Projected
from shoal.training.fit import fit

__all__ = ["EVERY", "QUICK", "Budget", "contestant", "train"]

_FORMS = ("legacy", "calibrated")
_SPACES = {"layerwise": Layerwise(), "last-layer": LastLayer(), "projected": Projected()}

EVERY = (
    "ensemble",
    *(f"{name}:{form}" for form in _FORMS for name in METHODS if METHODS[name].repulsion),
    *(f"kde:calibrated:{space}" for space in _SPACES),
)
"""Default methods of the comparison: `NAME:FORM`, and calibrated methods in other spaces."""

QUICK = ("ensemble", "svgd:legacy", "kde:legacy", "f-kde:legacy", "kde:calibrated",
         "f-kde:calibrated")  # fmt: skip
"""Methods that `--quick` compares."""


@dataclass(frozen=True)
class Budget:
    """Ensemble size and length of training.

    Attributes:
        members: M.
        steps: number of steps.
        lr: initial learning rate; a cosine schedule lowers it to zero.
    """

    members: int = 20
    steps: int = 400
    lr: float = 0.1


def contestant(label: str) -> Method:
    """The method with label `NAME`, `NAME:legacy`, `NAME:calibrated` or `NAME:calibrated:SPACE`.

    >>> contestant("f-kde:calibrated").repulsion.calibrated
    True
    """
    name, *words = label.split(":")
    form = words[0] if words else ""
    if form not in ("", *_FORMS) or len(words) > 2 or (len(words) == 2 and words[1] not in _SPACES):
        raise ConfigError(
            f"a method must be NAME, NAME:legacy or NAME:calibrated, optionally with a space "
            f"({', '.join(_SPACES)}), not {label!r}"
        )
    method = get(name, form == "legacy", form == "calibrated")
    if len(words) < 2:
        return method
    if method.repulsion is None or method.repulsion.space.base != "weights":
        raise ConfigError(f"only weight-space methods can have another space, not {label!r}")
    return replace(method, repulsion=replace(method.repulsion, space=_SPACES[words[1]]))


def train(problem: Problem, label: str, budget: Budget, seed: int) -> Tensor:
    """Flat weights [M, D] of the members after training."""
    ensemble = Ensemble.init(problem.build, budget.members, seed=seed)
    with warnings.catch_warnings():
        # The table shows negligible pushes, so the warning is not needed.
        warnings.simplefilter("ignore", ShoalWarning)
        fit(
            ensemble,
            (problem.x, problem.y),
            method=contestant(label),
            likelihood=problem.likelihood,
            prior=problem.prior,
            steps=budget.steps,
            batch_size=len(problem.x),
            lr=budget.lr,
            schedule="cosine",
            seed=seed,
            engine="vmap",
            progress=False,
        )
    return torch.cat([rows(tensor.detach()) for tensor in ensemble.weights.values()], 1)

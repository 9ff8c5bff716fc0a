r"""Langevin chains with gradients of mini-batches, with and without momentum.

SGHMC (Chen, Fox & Guestrin 2014, arXiv 1402.4102) in the form of SGD with momentum μ. With the
gradient g of log p at a mini-batch, the learning rate lr per data point and N data points,

$$ v \leftarrow μ v + \frac{lr}{N} g + \sqrt{2 (1 - μ) \, lr / N} \; ξ,
   \qquad x \leftarrow x + v. $$

μ = 0 gives SGLD (Welling & Teh 2011). `training.options.noise` derives the invariant law and the
error of finite steps: for a normal density of precision N a its variance is too large by the factor
1 / (1 - lr a / (2 (1 + μ))).

Schedules of the learning rate, with t from 0 to 1 over the steps after the warm-up:

- constant: lr.
- decaying: lr (1 + 9 t)^(-0.55); the sum of the rates diverges and that of their squares does not.
- cyclical (Zhang et al. 2020, arXiv 1902.03932): lr (1 + cos(π s)) / 2, where s runs from 0 to 1 in
  every cycle. Only the last part of a cycle adds noise and gives draws, the first part moves to
  another mode.
"""

import math
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from shoal.core.errors import ConfigError
from shoal.core.types import Tree
from shoal.inference.samplers.sampler import Clock, Density, registry

__all__ = ["SGHMC", "SGLD"]

_EXPLORES = 0.5
"""Share of a cycle without noise and draws."""


@registry.register("sghmc", cite=("chen2014stochastic", "zhang2020cyclical"))
@dataclass(frozen=True)
class SGHMC:
    """Langevin chains with momentum and gradients of mini-batches.

    Attributes:
        lr: learning rate of a gradient per data point, as that of SGD in `shoal.fit`.
        momentum: μ, from 0 on and below 1.
        schedule: "constant", "decaying" or "cyclical".
        cycles: number of cycles of a cyclical schedule.
        precondition: divide every coordinate's gradient by its root mean square, measured in the
            warm-up and constant afterwards.
    """

    lr: float = 0.01
    momentum: float = 0.9
    schedule: Literal["constant", "decaying", "cyclical"] = "constant"
    cycles: int = 4
    precondition: bool = False

    def __post_init__(self) -> None:
        if not self.lr > 0:
            raise ConfigError(f"lr must be positive, not {self.lr}")
        if not 0 <= self.momentum < 1:
            raise ConfigError(f"momentum must lie in [0, 1), not {self.momentum}")
        if self.cycles < 1:
            raise ConfigError(f"there must be at least one cycle, not {self.cycles}")

    @property
    def whole(self) -> bool:
        """Mini-batches are enough."""
        return False

    def begin(self, density: Density, x: Tensor, seed: int) -> Tree:
        """See `Sampler`."""
        zero = torch.zeros_like(x)
        return {
            "x": x.clone(),
            "v": zero,
            "unit": torch.ones_like(x),
            "gradients": zero.clone(),
            "refused": x.new_zeros(len(x)),
            "steps": x.new_zeros(len(x)),
        }

    def step(self, density: Density, state: Tree, clock: Clock) -> None:
        """See `Sampler`."""
        log_density, gradient = density(state["x"], clock.step)
        rate, spread = clock.pace(self)
        per_point, v, unit = rate / density.points, state["v"], state["unit"]
        noise = (spread / density.points**0.5) * density.used
        pull = gradient * per_point
        if self.precondition:
            pull, noise = pull.mul_(unit.square()), unit * noise
        v = clock.plus_normal(pull.add_(v, alpha=self.momentum), noise, "noise")
        sound = log_density.isfinite() & v.sum(1).isfinite()
        state["v"] = v = v.masked_fill_(~sound.unsqueeze(1), 0.0)
        state["x"] += v
        state["refused"] += ~sound
        state["steps"] += 1
        if self.precondition and clock.step < clock.warmup:
            self._measure(state, gradient, density, clock)

    def phase(self, clock: Clock) -> Hashable | None:
        """See `Sampler`."""
        if not self.precondition or clock.step >= clock.warmup:
            return "moves"
        return "measures" if clock.step + 1 < clock.warmup else "sets units"

    def pace(self, clock: Clock) -> tuple[float, ...]:
        """Learning rate, and spread of the noise times √N."""
        lr, noise = self._rate(clock)
        return lr, math.sqrt(2 * (1 - self.momentum) * lr * noise)

    def _measure(self, state: Tree, gradient: Tensor, density: Density, clock: Clock) -> None:
        """Set the units at the end of the warm-up: (E[g²])^(-1/4), with a geometric mean of 1."""
        state["gradients"] += gradient.square()
        if clock.step + 1 < clock.warmup:
            return
        logs = -0.25 * (state["gradients"] / clock.warmup).clamp(min=1e-12).log()
        logs = torch.where(state["gradients"] > 0, logs, 0.0)
        mean = logs.sum(1, keepdim=True) / density.numbers.unsqueeze(1)
        state["unit"] = (logs - mean).exp() * density.used
        state["v"] = torch.zeros_like(state["v"])

    def _rate(self, clock: Clock) -> tuple[float, float]:
        """Learning rate and noise of a step, in the warm-up those of its end."""
        after = max(clock.steps - clock.warmup, 1)
        t = max(clock.step - clock.warmup, 0) / after
        if self.schedule == "decaying":
            return self.lr * (1 + 9 * t) ** -0.55, 1.0
        if self.schedule == "cyclical" and clock.step >= clock.warmup:
            place = t * self.cycles % 1
            return 0.5 * self.lr * (1 + math.cos(math.pi * place)), float(place >= _EXPLORES)
        return self.lr, 1.0

    def keeps(self, clock: Clock) -> bool:
        """See `Sampler`."""
        return self.schedule != "cyclical" or self._rate(clock)[1] > 0

    @property
    def kept(self) -> float:
        """Share of the steps after the warm-up that give draws."""
        return 1 - _EXPLORES if self.schedule == "cyclical" else 1.0

    def diagnostics(self, state: Tree) -> dict[str, Tensor]:
        """See `Sampler`."""
        return {"refused": state["refused"] / state["steps"].clamp(min=1)}


@registry.register("sgld", cite=("welling2011bayesian", "zhang2020cyclical"))
@dataclass(frozen=True)
class SGLD(SGHMC):
    """Langevin chains without momentum, with gradients of mini-batches.

    Attributes:
        lr: as for `SGHMC`; so are the other settings.
        momentum: always 0.
    """

    momentum: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.momentum:
            raise ConfigError("sgld has no momentum; type sampler='sghmc'")

r"""Hamiltonian Monte Carlo: trajectories that a Metropolis test accepts or refuses.

Duane, Kennedy, Pendleton & Roweth (1987); Neal (2011, arXiv 1206.1901). A chain at x gets a
momentum p ~ N(0, 1), and moves with the energy H(x, p) = |p|² / 2 - log p(x). A leap of size ε is,
in units s of the coordinates,

$$ p \leftarrow p + \tfrac{ε}{2} s g(x), \qquad x \leftarrow x + ε s p,
   \qquad p \leftarrow p + \tfrac{ε}{2} s g(x), $$

with g = ∇ log p. After n leaps the new place is accepted with probability min(1, exp(-ΔH)). So
finite leaps bring no bias. n is uniform from 1 to `leaps`, the same for all chains, and depends on
the step alone: a constant n could follow the period of the density.

Tuning, in the warm-up alone and for every chain by itself (Hoffman & Gelman 2014, arXiv 1111.4246):
dual averaging finds the ε with the wanted mean acceptance. Three windows of growing length measure
the standard deviation of every coordinate, which is its unit.

NUTS chooses n by doubling (`samplers.nuts`). Its trees differ from chain to chain, and a batch of
chains waits for the longest one. So n is a setting here.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from shoal.core.errors import ConfigError
from shoal.core.random import derive
from shoal.core.types import Tree
from shoal.inference.samplers.sampler import Clock, Density, OnAllData, moved_where, registry

__all__ = ["HMC"]

_WINDOWS = 0.1, 0.2, 0.4, 0.8
"""Shares of the warm-up: begin to measure the units, and set them three times."""

_FEWEST = 10
"""Positions that a window needs."""

_PRIOR = 5
"""Positions that the mean unit of all coordinates counts for, beside those of a window."""

_JUMP = 1000.0
"""Error of the energy from which on a trajectory has left the flow."""

_GAMMA, _T0, _KAPPA = 0.3, 10.0, 0.75
"""Constants of dual averaging: doubt, its steps, and forgetting.

Hoffman & Gelman have a doubt of 0.05. Sizes then scatter, and their mean is too small in few
dimensions: acceptance 0.90 where 0.80 was wanted.
"""


@registry.register("hmc", cite=("duane1987hybrid", "neal2011mcmc", "hoffman2014nuts"))
@dataclass(frozen=True)
class HMC(OnAllData):
    """Hamiltonian Monte Carlo with gradients of all data: exact, for few weights.

    Attributes:
        leaps: most gradients of a trajectory; their number is uniform from 1 to it.
        acceptance: wanted mean probability that a trajectory is accepted.
        precondition: measure every coordinate in a unit of its own.
    """

    leaps: int = 30
    acceptance: float = 0.8
    precondition: bool = True

    lengths: ClassVar[tuple[int, int]] = 500, 1
    """Usual trajectories before the first draw, and from draw to draw."""

    def __post_init__(self) -> None:
        if self.leaps < 1:
            raise ConfigError(f"leaps must be 1 or more, not {self.leaps}")
        if not 0 < self.acceptance < 1:
            raise ConfigError(f"acceptance must lie between 0 and 1, not {self.acceptance}")

    def begin(self, density: Density, x: Tensor, seed: int) -> Tree:
        """See `Sampler`."""
        log_density, gradient = density(x, 0)
        zero, each = torch.zeros_like(log_density), torch.zeros_like(x)
        state = {
            "x": x.clone(), "gradient": gradient, "log_density": log_density,
            "unit": torch.ones_like(x), "size": torch.ones_like(log_density),
            "anchor": x.clone(), "count": zero.clone(), "sum": each.clone(),
            "squares": each.clone(), "accepted": zero.clone(), "jumps": zero.clone(),
            "steps": zero.clone(),
        }  # fmt: skip
        state["size"] = _first_size(density, state, Clock(0, 0, 0, seed))
        return state | _averaging(state["size"])

    def step(self, density: Density, state: Tree, clock: Clock) -> None:
        """See `Sampler`."""
        p = clock.normal("momentum", state["x"]) * density.used
        leaps = self._count(clock)
        new, error = _trajectory(density, state, p, leaps, clock.step)
        chance = error.neg().exp().clamp(max=1.0)
        accepted = clock.uniform("accept", chance) < chance
        state.update(moved_where(accepted, new, state))
        if clock.step < clock.warmup:
            self._tune(state, chance, clock)
            self._measure_units(state, density, clock)
        else:
            state["accepted"] += chance
            state["jumps"] += ~(error < _JUMP)
            state["steps"] += 1

    def _count(self, clock: Clock) -> int:
        return 1 + derive(clock.seed, "leaps", clock.step) % self.leaps

    def _tune(self, state: Tree, chance: Tensor, clock: Clock) -> None:
        """Dual averaging of log ε; the mean of its later values is the size after the warm-up."""
        state["tuned"] += 1
        t = state["tuned"]
        state["lack"] += (self.acceptance - chance - state["lack"]) / (t + _T0)
        log_size = state["centre"] - t.sqrt() / _GAMMA * state["lack"]
        state["mean_log_size"] += t**-_KAPPA * (log_size - state["mean_log_size"])
        last = clock.step + 1 == clock.warmup
        state["size"] = (state["mean_log_size"] if last else log_size).exp()

    def _measure_units(self, state: Tree, density: Density, clock: Clock) -> None:
        """Set the unit of every coordinate to the standard deviation in a window of the warm-up."""
        begin, *ends = (int(share * clock.warmup) for share in _WINDOWS)
        if not self.precondition or not begin <= clock.step < ends[-1]:
            return
        away = state["x"] - state["anchor"]
        state["count"] += 1
        state["sum"] += away
        state["squares"] += away.square()
        if clock.step + 1 not in ends or int(state["count"].min()) < _FEWEST:
            return
        count = state["count"].unsqueeze(1)
        variance = state["squares"] / count - (state["sum"] / count).square()
        moved = variance > 0
        logs = torch.where(moved, variance.clamp(min=1e-30).log(), 0.0)
        mean = logs.sum(1, keepdim=True) / moved.sum(1, keepdim=True).clamp(min=1)
        logs = (count * logs + _PRIOR * mean) / (count + _PRIOR)
        unit = torch.where(moved, (0.5 * logs).exp(), state["unit"])
        state.update(unit=unit, anchor=state["x"].clone())
        state["size"] = _first_size(density, state, clock)
        state.update(_averaging(state["size"]))
        for name in ("count", "sum", "squares"):
            state[name] = torch.zeros_like(state[name])

    def diagnostics(self, state: Tree) -> dict[str, Tensor]:
        """See `Sampler`."""
        steps = state["steps"].clamp(min=1)
        return {
            "acceptance": state["accepted"] / steps,
            "refused": state["jumps"] / steps,
            "step size": state["size"],
        }


def _averaging(size: Tensor) -> Tree:
    """Dual averaging that begins at a size."""
    zero = torch.zeros_like(size)
    return {
        "centre": size.log(), "lack": zero.clone(), "tuned": zero.clone(),
        "mean_log_size": size.log(),
    }  # fmt: skip


def _trajectory(
    density: Density, state: Tree, p: Tensor, leaps: int, step: int
) -> tuple[Tree, Tensor]:
    """Where `leaps` leaps lead, and the error of the energy [M], infinite off the domain."""
    x, gradient, log_density = state["x"], state["gradient"], state["log_density"]
    unit, size = state["unit"], state["size"].unsqueeze(1)
    before = 0.5 * p.square().sum(1) - log_density
    sound = torch.ones_like(log_density, dtype=torch.bool)
    for _ in range(leaps):
        p = p + 0.5 * size * unit * gradient
        # A chain that was lost waits where it began; its trajectory will be refused.
        x = torch.where(sound.unsqueeze(1), x + size * unit * p, state["x"])
        log_density, gradient = density(x, step)
        p = p + 0.5 * size * unit * gradient
        sound = sound & log_density.isfinite() & p.sum(1).isfinite()
    error = 0.5 * p.square().sum(1) - log_density - before
    error = torch.where(sound & error.isfinite(), error, torch.inf)
    return {"x": x, "gradient": gradient, "log_density": log_density}, error


def _first_size(density: Density, state: Tree, clock: Clock, most: int = 50) -> Tensor:
    """A size at which one leap is accepted about every second time, by doubling and halving."""
    p = clock.normal("first momentum", state["x"]) * density.used
    size, way = 0.1 * torch.ones_like(state["size"]), None
    for _ in range(most):
        _, error = _trajectory(density, {**state, "size": size}, p, 1, clock.step)
        larger = torch.where(error.neg().exp() > 0.5, 2.0, 0.5)
        way = larger if way is None else way
        going = larger == way
        if not bool(going.any()):
            break
        size = torch.where(going, size * way, size)
    return size

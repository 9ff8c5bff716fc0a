r"""Microcanonical Langevin Monte Carlo: chains with momenta of constant length.

Robnik, De Luca, Silverstein & Seljak (2023, arXiv 2212.08549) and Robnik & Seljak (2024, arXiv
2303.18221). A chain has a position x in R^d and a direction u of unit length. With g = ∇ log p(x),

$$ \dot x = u, \qquad \dot u = (1 - u u^T) g / (d - 1), $$

whose stationary density of x is p. A step turns u by the gradient for a time, then moves x along
u, and so on. The "leapfrog" step of size ε is a turn for ε / 2, a move by ε and the same turn. The
step "minimal-norm" (Omelyan, Mryglod & Folk 2003, doi 10.1016/S0010-4655(02)00754-3) turns for λ ε,
(1 - 2λ) ε and λ ε with λ = 0.1932, and moves by ε / 2 between. It takes two gradients instead of
one. Its energy error is far smaller, so its steps are longer. A turn for a time h has the closed
form, with the unit vector e = g / |g|, δ = h |g| / (d - 1) and the cosine c = e·u,

$$ u' = \frac{u + e (\sinh δ + c (\cosh δ - 1))}{\cosh δ + c \sinh δ},
   \qquad ΔK = (d - 1) \log(\cosh δ + c \sinh δ). $$

Then the direction loses its memory over the length L: u ← (u + ν ξ) / |u + ν ξ| with ξ ~ N(0, 1)
and ν² = (exp(2 ε / L) - 1) / d.

A step changes the energy by ΔE = ΔK - Δ log p, which is 0 for ε → 0. The bias of the samples is
set by E[ΔE²] / d. So the step size of every chain is tuned during the warm-up until that
number is `energy_error`: it grows as ε^6, hence ε ← (mean of ΔE² / (d energy_error ε^6))^(-1/6).

Preconditioning. Coordinates are measured in units of s, x = s z. A normal density has E[g²] = 1 /
var, so s² = sqrt(var(x) / E[g²]) is right for it if the chain has mixed, and stays of use where the
chain has not: gradients are known at once, variances late. s is set twice during the warm-up.

Length. Towards the end of the warm-up every chain, with L = 3 √d, records its log density and z
along four random directions. If n steps have n_eff effective draws of the quantity that has the
fewest,

$$ L = 0.8 \, ε \, n / n_{eff}, \qquad 0.3 \sqrt d ≤ L ≤ 10 \sqrt d. $$

Robnik & Seljak have the factor 0.4 for chains recorded at √d. Chains forget faster at 3 √d, where
0.8 was measured to give nearly the same L, with less scatter. Fewer than ten effective draws cannot
tell L: the chain did not mix, and stays at 3 √d. Every chain has its own L, since its step size is
its own, and so that no chain depends on the others.
"""

import math
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from shoal.core.errors import ConfigError
from shoal.core.types import Tree
from shoal.inference.samplers.convergence import effective_draws
from shoal.inference.samplers.sampler import Clock, Density, OnAllData, moved_where, registry

__all__ = ["MCLMC"]

_MEMORY = 150
"""Steps whose energy errors set the step size."""

_ROUGH = 0.5
"""Energy error at the start of the warm-up, where chains only have to move."""

_NOTICED, _GROWTH = 0.1, 1.3
"""A chain begins with tiny steps that grow by a factor until the energy error is noticed."""

_UNIT_AT = 0.1, 0.3, 0.6
"""Shares of the warm-up: begin to measure the units, set them, and set them again."""

_STEEPEST = 40.0
"""Largest δ of a turn: beyond, the direction is that of the gradient."""

_TUNED = 0.6
"""Share of the warm-up at which the energy error has its last value."""

_LAMBDA = 0.1931833275037836
_TURNS = {"leapfrog": (0.5, 0.5), "minimal-norm": (_LAMBDA, 1 - 2 * _LAMBDA, _LAMBDA)}
"""Shares of the turns of a step; between two turns is a move, with a gradient after it."""

_WARMUP = 2500
"""Usual gradients of a warm-up."""

_RECORDED = 0.7, 0.9
"""Shares of the warm-up between which chains are recorded, to set their length."""

_ROWS, _DIRECTIONS = 1000, 4
"""Most positions of a record, and the directions along which it has them."""

_FACTOR = 0.8
"""L over the way from one effective draw to the next."""

_FEWEST = 10
"""Effective draws of a record that tell L."""

_UNMIXED, _SHORTEST, _LONGEST = 3.0, 0.3, 10.0
"""Lengths in units of √d: while it is not known, and the bounds of "auto"."""


@registry.register(
    "mclmc",
    cite=("robnik2023microcanonical", "robnik2024fluctuation", "omelyan2003symplectic"),
)
@dataclass(frozen=True)
class MCLMC(OnAllData):
    """Microcanonical Langevin chains with gradients of all data, which tune themselves.

    Attributes:
        energy_error: variance of the energy change of a step, per dimension; smaller steps have
            less bias and take longer.
        length: decoherence length in units of √d; "auto" finds it in the warm-up, and stays at 3
            where chains do not mix, as those of networks rarely do.
        integrator: "minimal-norm" with two gradients a step, or "leapfrog" with one.
        precondition: measure every coordinate in a unit of its own.
    """

    energy_error: float = 0.05
    length: float | str = "auto"
    precondition: bool = True
    integrator: Literal["minimal-norm", "leapfrog"] = "minimal-norm"

    def __post_init__(self) -> None:
        if not self.energy_error > 0:
            raise ConfigError(f"energy_error must be positive, not {self.energy_error}")
        if self.length != "auto" and (isinstance(self.length, str) or not self.length > 0):
            raise ConfigError(f"length must be positive or 'auto', not {self.length!r}")

    @property
    def lengths(self) -> tuple[int, int]:
        """Usual steps before the first draw, and from draw to draw."""
        return _WARMUP // (len(_TURNS[self.integrator]) - 1), 1

    def begin(self, density: Density, x: Tensor, seed: int) -> Tree:
        """See `Sampler`."""
        log_density, gradient = density(x, 0)
        d = density.numbers.to(x.dtype)
        u = Clock(0, 0, 0, seed).normal("first direction", x) * density.used
        u = u / torch.linalg.vector_norm(u, dim=1, keepdim=True)
        one, zero = torch.ones_like(log_density), torch.zeros_like(log_density)
        each = torch.zeros_like(x)
        length = _UNMIXED if isinstance(self.length, str) else self.length
        state = {
            "x": x.clone(), "u": u, "gradient": gradient, "log_density": log_density,
            "size": 2e-4 * d.sqrt(), "length": length * d.sqrt(),
            "unit": torch.ones_like(x),
            "seeking": one.clone(), "rough": zero.clone(), "weight": zero.clone(),
            "limit": torch.inf * one,
            "count": zero.clone(), "sum": each.clone(), "squares": each.clone(),
            "gradients": each.clone(), "errors": zero.clone(), "refused": zero.clone(),
            "steps": zero.clone(),
        }  # fmt: skip
        if self.length == "auto":
            purpose, like = "directions of the record", x.new_empty(_DIRECTIONS, x.shape[1])
            state["directions"] = Clock(0, 0, 0, seed).normal(purpose, like).T.contiguous()
            state["record"] = x.new_zeros(_ROWS, len(x), 1 + _DIRECTIONS)
        return state | {"spread": _spread(state["size"], state["length"], d)}

    def step(self, density: Density, state: Tree, clock: Clock) -> None:
        """See `Sampler`."""
        d = density.numbers.to(state["x"].dtype)
        size, unit = state["size"], state["unit"]
        turns = _TURNS[self.integrator]
        rate, move = size / (d - 1), (size / (len(turns) - 1)).unsqueeze(1) * unit
        x, log_density, gradient = state["x"], state["log_density"], state["gradient"]
        u, kinetic = _turned(state["u"], gradient * unit, turns[0] * rate)
        for turn in turns[1:]:
            x = torch.addcmul(x, move, u)
            log_density, gradient = density(x, clock.step)
            u, more = _turned(u, gradient * unit, turn * rate)
            kinetic = kinetic + more
        error = kinetic.mul_(d - 1).sub_(log_density - state["log_density"])
        # A jump of this energy leaves the region where the steps follow the flow. NaN is refused.
        sound = error.abs() < 4 * d.sqrt() + 20
        moved = {"x": x, "gradient": gradient, "log_density": log_density, "u": u}
        if error.device.type == "cuda" or not bool(sound.all()):
            moved = moved_where(sound, moved, state | {"u": -state["u"]})
        state.update(moved)
        share = torch.where(sound, error.square_().div_(d), 0.0)
        if clock.step < clock.warmup:
            self._tune(state, share, sound, clock)
            self._measure_units(state, d, clock)
            self._find_length(state, d, clock)
            state["spread"] = _spread(state["size"], state["length"], d)
        else:
            state["errors"] += share
            state["refused"] += ~sound
            state["steps"] += 1
        u = clock.plus_normal(state["u"], state["spread"].unsqueeze(1) * density.used, "direction")
        state["u"] = u.div_(torch.linalg.vector_norm(u, dim=1, keepdim=True))

    def phase(self, clock: Clock) -> Hashable | None:
        """See `Sampler`."""
        if clock.step >= clock.warmup:
            return "moves"
        window = self._window(clock)
        if clock.step in window:
            return "records" if clock.step < window[-1] else None
        begin, *marks = self._marks(clock)
        if not self.precondition or not begin < clock.step <= marks[-1]:
            return "tunes"
        return "sets units" if clock.step in marks else "measures"

    def pace(self, clock: Clock) -> tuple[float, ...]:
        """The energy error that the warm-up wants; it falls to `energy_error`."""
        eased = _ROUGH + (self.energy_error - _ROUGH) * min(clock.warm / _TUNED, 1.0)
        return (max(self.energy_error, eased),)

    def _marks(self, clock: Clock) -> list[int]:
        return [int(share * clock.warmup) for share in _UNIT_AT]

    def _tune(self, state: Tree, share: Tensor, sound: Tensor, clock: Clock) -> None:
        """The step size whose energy error would be the wanted one."""
        (wanted,), size = clock.pace(self), state["size"]
        ratio, smaller = share / wanted, 0.8 * size
        # Errors of very small steps are rounding, and grow with no power of the step.
        seeking = state["seeking"].mul_(sound & (ratio < _NOTICED))
        trust = ratio.clamp(min=1e-8).log_().square_().mul_(-0.5 / 81).exp_()
        trust = trust.mul_(sound).mul_(1 - seeking)
        forget = (_MEMORY - 1) / (_MEMORY + 1)
        rough = state["rough"].mul_(forget).addcdiv_(trust * ratio, size**6)
        weight = state["weight"].mul_(forget).add_(trust)
        state["limit"] = torch.where(sound, 1.01 * state["limit"], smaller)
        fitting = (rough / weight.clamp(min=1e-30)).pow_(-1 / 6)
        fitting = torch.minimum(torch.minimum(fitting, 1.05 * size), state["limit"])
        fitting = torch.where(weight > 0, fitting, smaller)
        state["size"] = torch.where(seeking > 0, _GROWTH * size, fitting)

    def _measure_units(self, state: Tree, d: Tensor, clock: Clock) -> None:
        """Set the unit of every coordinate from the variance of positions and of gradients."""
        phase = self.phase(clock)
        if phase not in ("measures", "sets units"):
            return
        state["count"] += 1
        state["sum"] += state["x"]
        state["squares"].addcmul_(state["x"], state["x"])
        state["gradients"].addcmul_(state["gradient"], state["gradient"])
        if phase == "measures":
            return
        count = state["count"].unsqueeze(1)
        variance = state["squares"] / count - (state["sum"] / count).square()
        ratio = variance.clamp(min=1e-12) / (state["gradients"] / count).clamp(min=1e-12)
        logs = 0.25 * ratio.log()
        logs = torch.where(state["gradients"] > 0, logs, 0.0)
        mean = logs.sum(1, keepdim=True) / d.unsqueeze(1)
        state["unit"] = (logs - mean).exp()
        state["size"] = 0.1 * state["size"]
        state["seeking"] = torch.ones_like(state["seeking"])
        state["limit"] = torch.full_like(state["limit"], torch.inf)
        for name in ("rough", "weight", "count", "sum", "squares", "gradients"):
            state[name] = torch.zeros_like(state[name])

    def _window(self, clock: Clock) -> range:
        """Steps of the warm-up that are recorded; none if the length is fixed."""
        first, end = (int(share * clock.warmup) for share in _RECORDED)
        if self.length != "auto" or end - first < _FEWEST:
            return range(0)
        return range(first, end, math.ceil((end - first) / _ROWS))

    def _find_length(self, state: Tree, d: Tensor, clock: Clock) -> None:
        """Record the chains; the last step of the window sets the length of each by its record."""
        window = self._window(clock)
        if clock.step not in window:
            return
        along = (state["x"] / state["unit"]) @ state["directions"]
        row = torch.cat([state["log_density"].unsqueeze(1), along], 1)
        step = torch.tensor(clock.step) if clock.now is None else clock.now
        place = (step - window.start) // window.step
        state["record"].index_copy_(0, place.view(1).to(row.device), row.unsqueeze(0))
        if clock.step < window[-1]:
            return
        effective = effective_draws(state["record"][None, : len(window)]).amin(1)
        steps = window.step * len(window) / effective
        length = (_FACTOR * state["size"] * steps / d.sqrt()).clamp(_SHORTEST, _LONGEST)
        state["length"] = torch.where(effective >= _FEWEST, length, _UNMIXED) * d.sqrt()

    def diagnostics(self, state: Tree) -> dict[str, Tensor]:
        """See `Sampler`."""
        steps = state["steps"].clamp(min=1)
        return {
            "energy error": state["errors"] / steps,
            "refused": state["refused"] / steps,
            "step size": state["size"],
            "length": state["length"],
        }


def _spread(size: Tensor, length: Tensor, d: Tensor) -> Tensor:
    """ν, the size of the noise that lets a direction lose its memory over the length."""
    return (torch.expm1(2 * size / length) / d).sqrt()


def _turned(u: Tensor, gradient: Tensor, rate: Tensor) -> tuple[Tensor, Tensor]:
    """The direction after a turn by the gradient, and ΔK / (d - 1) [M]; rate is h / (d - 1)."""
    length = torch.linalg.vector_norm(gradient, dim=1).clamp_(min=1e-30)
    c = (gradient * u).sum(1).div_(length)
    # Exponentials stay finite; an energy that this changes is refused.
    delta = (length * rate).clamp_(max=_STEEPEST)
    sinh, cosh = delta.sinh(), delta.cosh_()
    total = torch.addcmul(cosh, c, sinh).clamp_(min=1e-30)
    along = sinh.addcmul_(c, cosh.sub_(1)).div_(length.mul_(total))
    turned = torch.addcmul(u / total.unsqueeze(1), along.unsqueeze(1), gradient)
    return turned, total.log_()

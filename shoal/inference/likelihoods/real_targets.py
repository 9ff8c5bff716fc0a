"""Base classes of likelihoods for real targets: targets in any unit, and learned numbers."""

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Self

import torch
from torch import Tensor

from shoal.core.errors import CheckpointCorrupt, DataError
from shoal.data.dataset import Scaling, standardise
from shoal.inference.likelihoods.likelihood import Likelihood, Task, as_columns

__all__ = ["LEAST", "Learned", "RealTargets", "Standardising"]

LEAST = 1e-6
"""Smallest learned variance, in units of the variance of the targets."""

_TINY = 1e-5


@dataclass(frozen=True, eq=False)
class Learned:
    """Learned numbers, each [K]: y = location + scale * z, and the noise variance of z."""

    location: Tensor
    scale: Tensor
    variance: Tensor | None = None

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Learned):
            return NotImplemented
        mine, theirs = self.tensors, other.tensors
        same = mine.keys() == theirs.keys()
        return same and all(torch.equal(t.cpu(), theirs[name].cpu()) for name, t in mine.items())

    def __hash__(self) -> int:
        return hash(tuple(self.tensors))

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The known numbers, by name."""
        return {name: tensor for name, tensor in vars(self).items() if tensor is not None}


@dataclass(frozen=True)
class RealTargets(Likelihood):
    r"""Independent real target columns in any unit.

    Outputs describe standardised targets: $y = a + b z$, so that
    $\log p(y) = \log p_z((y - a) / b) - \sum_k \log b_k$. Without learned numbers a = 0 and b = 1.
    A subclass gives moments, log density and distribution function of z.
    """

    about: ClassVar[Task] = Task(
        "regression",
        kinds=("any", "numbers", "intervals"),
        measures=("rmse", "nll", "coverage_90", "sharpness", "effective_functions"),
    )
    learns_noise: ClassVar[bool] = False
    learned: Learned | None = field(default=None, init=False, repr=False)

    def _standard(self, outputs: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and variance of the standardised targets, both [..., K]."""
        raise NotImplementedError

    def _log_density(self, outputs: Tensor, z: Tensor) -> Tensor:
        """Log density of the standardised targets [..., K], summed over the columns."""
        raise NotImplementedError

    def _standard_cdf(self, outputs: Tensor, z: Tensor) -> Tensor:
        """Distribution function of the standardised targets [..., K]."""
        raise NotImplementedError

    def mean(self, outputs: Tensor) -> Tensor:
        """Mean of y under each member [..., K]."""
        mean, known = self._standard(outputs)[0], self.learned
        return mean if known is None else known.location.to(mean) + known.scale.to(mean) * mean

    def variance(self, outputs: Tensor) -> Tensor:
        """Variance of y under each member [..., K]."""
        variance, known = self._standard(outputs)[1], self.learned
        return variance if known is None else known.scale.square().to(variance) * variance

    def log_prob(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Log density of the targets y [B, *S] or [B, *S, K]."""
        value, known = self._log_density(outputs, self._standardised(y, outputs)), self.learned
        if known is None:
            return value
        columns = outputs.shape[-1] // self.width(1)
        return value - known.scale.log().expand(columns).sum().to(value)

    def cdf(self, outputs: Tensor, y: Tensor) -> Tensor:
        """P(Y <= y) of each column [..., K], in double precision."""
        outputs = outputs.double()
        return self._standard_cdf(outputs, self._standardised(y.double(), outputs))

    def _standardised(self, y: Tensor, outputs: Tensor) -> Tensor:
        y = as_columns(y, outputs, outputs.shape[-1] // self.width(1))
        known = self.learned
        if known is not None:
            y = (y - known.location.to(y)) / known.scale.to(y)
        return y.to(outputs.dtype)

    def check(self, y: Tensor, outputs: int, sites: int = 0) -> None:
        """Refuse integer targets, and targets whose columns do not fit the outputs."""
        if not y.is_floating_point():
            raise DataError("regression needs real targets, not integers; convert y to float")
        super().check(y, outputs, sites)

    def in_units(self, scaling: Scaling) -> Self:
        """The likelihood of the original targets, if training used targets scaled by `scaling`."""
        mean, std = torch.tensor([[scaling.mean], [scaling.std]], dtype=torch.float64)
        known = self.learned
        if known is None:
            return self._with(Learned(mean, std))
        location, scale = mean + std * known.location, std * known.scale
        return self._with(Learned(location, scale, known.variance))

    def _with(self, learned: Learned) -> Self:
        other = copy.copy(self)
        object.__setattr__(other, "learned", learned)
        return other

    @property
    def state(self) -> dict[str, Tensor]:
        """Location, scale and variance, if they are learned."""
        return {} if self.learned is None else self.learned.tensors

    def restored(self, state: Mapping[str, Tensor]) -> Self:
        """The likelihood with the numbers of a checkpoint; older checkpoints have none."""
        if not state:
            return self
        names = {"location", "scale", *(["variance"] if self.learns_noise else [])}
        lengths = {tuple(t.shape) for t in state.values()}
        sound = all(bool(t.isfinite().all()) for t in state.values())
        sound &= all(bool((t > 0).all()) for name, t in state.items() if name != "location")
        if state.keys() != names or not sound or len(lengths) > 1 or len(lengths.pop()) != 1:
            raise CheckpointCorrupt(
                f"the checkpoint has no numbers for a {type(self).__name__}; use another"
            )
        return self._with(Learned(**state))


class Standardising(RealTargets):
    """Standardises its training targets, which may have any unit."""

    def initialised_from(self, y: Tensor, sites: int = 0, weight: Tensor | None = None) -> Self:
        """Standardise by these targets; numbers learned before stay."""
        where = y.device, torch.float32 if y.device.type == "mps" else torch.float64
        if self.learned is not None:
            kept = {name: t.to(*where, copy=True) for name, t in self.state.items()}
            return self._with(Learned(**kept))
        columns = y.shape[-1] if y.ndim == 2 + sites else 1
        real = y.detach().reshape(-1, columns).cpu().double()
        if weight is not None:
            weight = weight.double().cpu().flatten()
            weight = weight.repeat_interleave(len(real) // len(weight))
        _, location, scale = standardise(real, real, weight)
        # Standardised targets stay the same, bit for bit.
        if bool((location.abs() < _TINY).all() and ((scale - 1).abs() < _TINY).all()):
            location, scale = torch.zeros_like(location), torch.ones_like(scale)
        found = {"location": location, "scale": scale}
        found |= {"variance": torch.ones_like(scale)} if self.learns_noise else {}
        return self._with(Learned(**{name: t.to(*where) for name, t in found.items()}))

"""Base classes of Gaussian likelihoods: targets in any unit, and learned numbers."""

import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Self

import torch
from torch import Tensor

from shoal.core.errors import CheckpointCorrupt, DataError
from shoal.data.dataset import Scaling, standardise
from shoal.inference.likelihood import Likelihood, Task

__all__ = ["Learned", "Normal", "Standardising"]

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
class Normal(Likelihood):
    r"""Independent Gaussian target columns in any unit.

    Outputs describe standardised targets: $y = a + b z$, so that
    $\log p(y) = \log p_z((y - a) / b) - \sum_k \log b_k$. Without learned numbers a = 0 and b = 1.
    """

    about: ClassVar[Task] = Task(
        "regression",
        kinds=("any", "numbers", "gaussian"),
        measures=("rmse", "nll", "crps", "coverage_90", "sharpness", "effective_functions"),
    )
    learns_noise: ClassVar[bool] = False
    learned: Learned | None = field(default=None, init=False, repr=False)

    def _standard(self, outputs: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and variance of the standardised targets, both [..., B, K]."""
        raise NotImplementedError

    def mean(self, outputs: Tensor) -> Tensor:
        """Mean of y under each member [..., B, K]."""
        mean, known = self._standard(outputs)[0], self.learned
        return mean if known is None else known.location.to(mean) + known.scale.to(mean) * mean

    def variance(self, outputs: Tensor) -> Tensor:
        """Variance of y under each member [..., B, K]."""
        variance, known = self._standard(outputs)[1], self.learned
        return variance if known is None else known.scale.square().to(variance) * variance

    def log_prob(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Log density of the targets y [B] or [B, K]."""
        mean, variance = self._standard(outputs)
        square = (self._standardised(y, mean) - mean).square() / variance
        value = -0.5 * (square + variance.log() + math.log(2 * math.pi)).sum(-1)
        known = self.learned
        if known is None:
            return value
        return value - known.scale.log().expand(mean.shape[-1]).sum().to(value)

    def _standardised(self, y: Tensor, mean: Tensor) -> Tensor:
        y = y.unsqueeze(-1) if y.ndim == 1 else y
        if y.shape[-1] != mean.shape[-1]:
            raise DataError(
                f"targets have {y.shape[-1]} columns but the members predict {mean.shape[-1]}; "
                f"give the network one mean per column"
            )
        known = self.learned
        if known is not None:
            y = (y - known.location.to(y)) / known.scale.to(y)
        return y.to(mean.dtype)

    def check(self, y: Tensor, outputs: int) -> None:
        """Refuse integer targets, and targets whose columns do not fit the outputs."""
        if not y.is_floating_point():
            raise DataError("regression needs real targets, not integers; convert y to float")
        super().check(y, outputs)

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


class Standardising(Normal):
    """Gaussian that standardises its training targets, which may have any unit."""

    def begun(self, y: Tensor) -> Self:
        """Standardise by these targets; numbers learned before stay."""
        where = y.device, torch.float32 if y.device.type == "mps" else torch.float64
        if self.learned is not None:
            kept = {name: t.to(*where, copy=True) for name, t in self.state.items()}
            return self._with(Learned(**kept))
        real = y.detach().reshape(len(y), -1).cpu().double()
        _, location, scale = standardise(real, real)
        # Standardised targets stay the same, bit for bit.
        if bool((location.abs() < _TINY).all() and ((scale - 1).abs() < _TINY).all()):
            location, scale = torch.zeros_like(location), torch.ones_like(scale)
        found = {"location": location, "scale": scale}
        found |= {"variance": torch.ones_like(scale)} if self.learns_noise else {}
        return self._with(Learned(**{name: t.to(*where) for name, t in found.items()}))

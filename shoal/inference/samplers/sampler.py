"""What a sampler is: chains, a density, and a clock."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from shoal.core.errors import ConfigError
from shoal.core.random import derive, generator, hashed, key, normal_stream, uniform
from shoal.core.registry import Registry
from shoal.core.tree import per_member
from shoal.core.types import Tree
from shoal.core.values import describe_value
from shoal.engine.kernels import fused
from shoal.engine.kernels.fused import kernel_supports

__all__ = ["Clock", "Density", "OnAllData", "Sampler", "known_sampler", "moved_where", "registry"]

registry = Registry("sampler")


class Density(Protocol):
    """A log density, up to a constant, and its gradient.

    Attributes:
        numbers: how many of the D columns each chain uses [M]; the others stay 0.
        used: 1 for the columns that a chain uses, 0 for the others [M, D]; 1 [1, 1] if all use all.
        points: number of data points, by which learning rates are measured; 1 without data.
    """

    @property
    def numbers(self) -> Tensor: ...

    @property
    def used(self) -> Tensor: ...

    @property
    def points(self) -> float: ...

    def __call__(self, x: Tensor, step: int) -> tuple[Tensor, Tensor]:
        """Log densities [M] and gradients [M, D] at chains [M, D], perhaps of the batch `step`."""
        ...


@dataclass(frozen=True)
class Clock:
    """Where the chains are.

    Attributes:
        step: number of the step, from 0. In a captured step, that of some step of its phase.
        warmup: number of steps whose positions are discarded.
        steps: number of steps in all.
        seed: fixes all random numbers.
        now: the number of the step as a scalar on the device of the chains; None for `step`.
        given: what `Sampler.pace` has for the step, on the device of the chains; None to ask it.
    """

    step: int
    warmup: int
    steps: int
    seed: int = 0
    now: Tensor | None = None
    given: Tensor | None = None

    @property
    def warm(self) -> float:
        """Share of the warm-up that is done; 1 afterwards."""
        return min(self.step / self.warmup, 1.0) if self.warmup else 1.0

    def pace(self, sampler: "Sampler") -> Sequence[Any]:
        """The numbers of this step."""
        return sampler.pace(self) if self.given is None else self.given.unbind()

    def normal(self, purpose: str, like: Tensor) -> Tensor:
        """Standard normal numbers like chains [M, D]; seed, purpose and step fix them."""
        if like.device.type == "cpu":  # a generator takes a tenth of the time of hashed numbers
            random = generator(self.seed, purpose, self.step)
            return torch.randn(like.shape, generator=random, dtype=torch.float32).to(like.dtype)
        chains, width = like.shape
        numbers = torch.arange(chains, device=like.device)
        keys = hashed(self._key(purpose, like.device) + numbers)
        return normal_stream(keys, 0, (width + 1) // 2)[:, :width].to(like.dtype)

    def plus_normal(self, x: Tensor, scale: Tensor, purpose: str) -> Tensor:
        """x + scale ξ for chains x [M, D], with the numbers ξ of `normal`."""
        if not kernel_supports(x, scale):
            return torch.addcmul(x, scale, self.normal(purpose, x))
        now = torch.tensor(self.step, device=x.device) if self.now is None else self.now
        return fused.noise_kernels.plus_normal(x, scale, now, derive(self.seed, purpose))

    def uniform(self, purpose: str, like: Tensor) -> Tensor:
        """Numbers in [0, 1) of the shape, in double precision; seed, purpose and step fix them."""
        return uniform(self._key(purpose, like.device), like.shape)

    def _key(self, purpose: str, device: torch.device) -> Tensor:
        return key(self.seed, purpose, self.step if self.now is None else self.now, device)


class Sampler(Protocol):
    """Moves chains. All that a later step depends on is in the state, a dict of tensors.

    Attributes:
        whole: whether a step wants the gradient of all data, and not of a mini-batch.
        kept: share of the steps after the warm-up whose positions may be draws.

    A sampler may have `lengths`: its usual steps before the first draw, and from draw to draw.
    """

    @property
    def whole(self) -> bool: ...

    @property
    def kept(self) -> float: ...

    def begin(self, density: Density, x: Tensor, seed: int) -> Tree:
        """The state of chains that begin at x [M, D]; its entry "x" is the position."""
        ...

    def step(self, density: Density, state: Tree, clock: Clock) -> None:
        """Move all chains by one step. It may change tensors of the state, or replace them."""
        ...

    def phase(self, clock: Clock) -> Hashable | None:
        """Steps of one phase make the same calls; None for a step that waits for the device."""
        ...

    def pace(self, clock: Clock) -> tuple[float, ...]:
        """Numbers that differ between steps of a phase; the same count for every step."""
        ...

    def keeps(self, clock: Clock) -> bool:
        """Whether positions after this step, which is not of the warm-up, may be draws."""
        ...

    def diagnostics(self, state: Tree) -> dict[str, Tensor]:
        """What the sampler knows of its own quality, one number per chain [M]."""
        ...


class OnAllData:
    """A sampler of which every step sees all data, and may give a draw.

    Energies compare one density with itself, so its steps have no mini-batches.
    """

    @property
    def whole(self) -> bool:
        """See `Sampler`."""
        return True

    @property
    def kept(self) -> float:
        """See `Sampler`."""
        return 1.0

    def keeps(self, clock: Clock) -> bool:
        """See `Sampler`."""
        return True

    def phase(self, clock: Clock) -> Hashable | None:
        """See `Sampler`. Trajectories differ in their length, and are not captured."""
        return None

    def pace(self, clock: Clock) -> tuple[float, ...]:
        """See `Sampler`."""
        return ()


def moved_where(accepted: Tensor, moved: Tree, before: Tree) -> Tree:
    """The tensors of chains that moved, where that is accepted [M], and of the others before."""
    return {
        name: torch.where(per_member(accepted, tensor), tensor, before[name])
        for name, tensor in moved.items()
    }


def known_sampler(name: str, value: Any) -> Sampler:
    """The check of an argument that is a sampler: its name, a table or an object."""
    made = registry.make(value)
    if hasattr(made, "begin") and hasattr(made, "step"):
        return made
    raise ConfigError(
        f"{name} must be a sampler, such as 'mclmc' or 'sghmc', not {describe_value(value)}"
    )

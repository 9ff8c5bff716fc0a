"""How long chains are, and where they keep draws."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from shoal.core.errors import ConfigError
from shoal.inference.samplers.microcanonical import MCLMC
from shoal.inference.samplers.sampler import Clock, Density, Sampler

__all__ = ["Plan"]

_WARMUP, _THIN = 2500, 1
"""Steps before the first draw, and from draw to draw, of samplers without `lengths`."""


@dataclass(frozen=True)
class Plan:
    """How long chains are, and where they keep draws.

    Attributes:
        draws: number of draws of each chain.
        warmup: number of steps before the first draw.
        thin: steps from draw to draw.
        seed: fixes all random numbers.
    """

    sampler: Sampler
    draws: int
    warmup: int
    thin: int
    seed: int

    @classmethod
    def of(
        cls,
        sampler: Sampler,
        density: Density,
        draws: int,
        warmup: int | None,
        thin: int | None,
        seed: int,
        epoch: int = 1,
    ) -> "Plan":
        """The plan with the usual lengths where none is given; an epoch has so many steps."""
        if isinstance(sampler, MCLMC) and int(density.numbers.min()) < 2:
            raise ConfigError(
                "a direction needs two coordinates or more, and one came; type sampler='hmc'"
            )
        usual: tuple[int, int] = getattr(sampler, "lengths", (_WARMUP, _THIN))
        apart = usual[1] if sampler.whole else max(epoch // 4, 1)
        apart = apart if thin is None else thin
        first = usual[0] if sampler.whole else max(draws * apart // 2, 1)
        return cls(sampler, draws, first if warmup is None else warmup, apart, seed)

    @property
    def steps(self) -> int:
        """Number of steps in all."""
        return self.warmup + math.ceil(self.draws * self.thin / self.sampler.kept)

    def clock(self, step: int) -> Clock:
        """Where the chains are at a step."""
        return Clock(step, self.warmup, self.steps, self.seed)

    def clocks(self) -> Iterator[Clock]:
        """Clocks of all steps up to the last draw."""
        step, kept, draws = 0, 0, 0
        while draws < self.draws:
            yield self.clock(step)
            kept, drawn = self.kept(step, kept)
            step, draws = step + 1, draws + drawn

    def kept(self, step: int, kept: int) -> tuple[int, bool]:
        """What a step gives after `kept` positions that may be draws.

        Returns:
            The new number of such positions, and whether this one is a draw: every `thin`-th is.
        """
        if step < self.warmup or not self.sampler.keeps(self.clock(step)):
            return kept, False
        return kept + 1, (kept + 1) % self.thin == 0

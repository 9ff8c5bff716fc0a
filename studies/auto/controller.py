r"""A controller of the strength: it keeps push / drive at a target while the members train.

The push is proportional to the strength s. After every few steps the controller compares the
measured force ratio r with the target:

$$ \log s ← \log s + \mathrm{clip}(\log(target / r), ±\log c), \quad
   r^2 = \sum_t push_t^2 / \sum_t drive_t^2 $$

The first correction comes after the first step and is not clipped. The training loop is that of
`fit`, by `shoal.Stepper`.
"""

import math
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

import shoal
from shoal.data.batches.sources import ArrayBatches
from shoal.inference import likelihoods
from shoal.training.options.schedules import factor_of, schedules
from shoal.training.step.results import StepInfo

__all__ = ["TARGETS", "Controlled", "Controller", "train"]

TARGETS = ("0.003", "0.01", "0.03", "0.1")
"""Force ratios that were compared."""


@dataclass
class Controller:
    """A strength that follows the measured force ratio.

    Attributes:
        target: the force ratio, push / drive, to keep.
        strength: the strength now.
        every: number of steps between corrections.
        most: largest factor of a correction.
        first: largest factor of the first correction.
    """

    target: float
    strength: float = 1.0
    every: int = 5
    most: float = 2.0
    first: float = 1e9
    _steps: int = field(default=0, init=False)
    _sums: list[float] = field(default_factory=lambda: [0.0, 0.0], init=False)

    def see(self, drive: float, push: float) -> None:
        """Add the forces of a step, and correct the strength if it is time."""
        self._sums = [self._sums[0] + drive**2, self._sums[1] + push**2]
        self._steps += 1
        if self._steps == 1:
            self._correct(self.first)
        elif (self._steps - 1) % self.every == 0:
            self._correct(self.most)

    def _correct(self, most: float) -> None:
        drive, push = self._sums
        self._sums = [0.0, 0.0]
        if not (0 < drive < math.inf and 0 < push < math.inf):
            return
        factor = self.target / math.sqrt(push / drive)
        self.strength *= min(max(factor, 1 / most), most)


@dataclass(frozen=True)
class Controlled:
    """The result of a controlled training; `shoal.predict` takes it as a run.

    Attributes:
        ensemble: the members.
        likelihood: distribution of the targets.
        history: force ratio of the last epoch, and the strength at the end.
    """

    ensemble: shoal.Ensemble
    likelihood: Any
    history: list[dict[str, float]]


def train(
    ensemble: shoal.Ensemble, data: tuple[Tensor, Tensor], method: str, controller: Controller,
    *, steps: int, batch_size: int, lr: float, schedule: str, seed: int,
    likelihood: str = "categorical",
) -> Controlled:  # fmt: skip
    """Train for a number of steps, with the batches, learning rates and likelihood of `fit`."""
    x, y = data
    batches = ArrayBatches(x, y, batch_size, seed=seed)
    rates = schedules.make(schedule)
    own = likelihoods.registry.make(likelihood).initialised_from(y)
    stepper = shoal.Stepper(ensemble, len(x), method=method, likelihood=own, seed=seed, lr=lr)
    forces = []
    while stepper.step < steps:
        for batch in batches.batches(stepper.step // batches.steps_per_epoch):
            rate = lr * factor_of(rates, stepper.step, steps)
            info: StepInfo = stepper(batch, lr=rate, strength=controller.strength)
            forces.append((float(info.drive), float(info.push)))
            controller.see(*forces[-1])
            if stepper.step == steps:
                break
    ensemble.train(False)
    drive, push = (sum(each) for each in zip(*forces[-batches.steps_per_epoch :], strict=True))
    history = [{"ratio": push / drive, "strength": controller.strength}]
    return Controlled(ensemble, stepper.likelihood, history)

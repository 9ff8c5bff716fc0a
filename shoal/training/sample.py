"""`sample` moves particles towards a density, with the code that trains ensembles."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor, nn

from shoal.core.arguments import (
    checked,
    factor_or_none,
    from_user,
    instance_of,
    not_negative,
    positive,
    whole_or_zero,
)
from shoal.core.errors import ConfigError, DataError
from shoal.core.values import describe_value
from shoal.inference.ensemble import Ensemble, Group
from shoal.inference.likelihoods import Likelihood, Task
from shoal.inference.posterior import Posterior
from shoal.inference.priors import Flat
from shoal.interaction.methods import Method, get
from shoal.interaction.repulsion import Repulsion
from shoal.training.forces import forces
from shoal.training.options.annealing import multiplies_push
from shoal.training.options.noise import add_noise, check_noise
from shoal.training.options.optim import make_optimizer, optimizer_table

__all__ = ["sample"]

DENSITY = "a function of one particle [D] that returns its log density"
ANNEALING = "a function of (step, steps) that returns a factor from 0 on"


class _Particle(nn.Module):
    """A particle; its output is the log density at its coordinates."""

    def __init__(self, start: Tensor, log_density: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.x = nn.Parameter(start.clone())
        self.log_density = log_density

    def forward(self, _: Tensor) -> Tensor:
        return self.log_density(self.x).reshape(1, 1)


@dataclass(frozen=True)
class _Itself(Likelihood):
    """The log likelihood of a particle is its output."""

    about: ClassVar[Task] = Task("sampling", kinds=())

    def log_prob(self, outputs: Tensor, y: Tensor) -> Tensor:
        return outputs.squeeze(-1)


@checked(
    log_density=instance_of(Callable, DENSITY),
    steps=whole_or_zero,
    lr=positive,
    annealing=instance_of(Callable, ANNEALING),
    noise=factor_or_none,
)
def sample(
    log_density: Callable[[Tensor], Tensor],
    start: Tensor,
    *,
    method: str | Method | Repulsion = "kde",
    steps: int = 1000,
    lr: float = 0.1,
    optimizer: str | Mapping[str, object] = "sgd",
    annealing: Callable[[int, int], float] | None = None,
    noise: float | None = None,
    seed: int = 0,
) -> Tensor:
    """Move particles [M, D] towards a density: x += lr * velocity, with N = 1 and T = 1.

    Args:
        log_density: log density of one particle [D], up to a constant.
        start: initial particles [M, D].
        method: a name, a `Method` or a `Repulsion` in weight space (the particles' coordinates).
        steps: number of steps.
        lr: step size.
        optimizer: name of a torch optimiser, or a table with its settings.
        annealing: function of (step, steps) that returns a factor of the driving force, or with
                of="push" that of the repulsive force.
        noise: factor of the variance of Langevin noise, as in `fit`; needs the optimizer sgd.
        seed: fixes the noise.

    Returns:
        The particles after the last step [M, D].

    >>> x = sample(lambda x: -x.square().sum() / 2, torch.tensor([[-1.0], [0.5]]), steps=200)
    >>> bool(x[0] < -0.1) and bool(x[1] > 0.1)
    True
    """
    if not isinstance(start, Tensor) or start.ndim != 2 or not start.numel():
        came = describe_value(start)
        raise DataError(f"start must be a tensor [M, D] with M and D of at least 1, not {came}")
    if not start.is_floating_point() or not bool(start.isfinite().all()):
        raise DataError("start must be finite real numbers; type start.float() for integers")
    method = get(method) if isinstance(method, str) else method
    if not isinstance(method, Method | Repulsion):
        raise ConfigError(
            f"method must be a name, a Method or a Repulsion, not {describe_value(method)}"
        )
    repulsion = method.repulsion if isinstance(method, Method) else method
    if repulsion is not None and repulsion.space.base != "weights":
        raise ConfigError(
            "particles have coordinates but no outputs; use a weight-space method such as 'kde'"
        )
    strength = 0.0 if repulsion is None else repulsion.strength
    ensemble = Ensemble([Group.of([_Particle(x, log_density) for x in start])])
    posterior = Posterior(_Itself(), Flat(), n=1)
    table = optimizer_table(optimizer)
    if not isinstance(table, Mapping):
        raise ConfigError(f"optimizer must be a name or a table, not {describe_value(table)}")
    check_noise(noise, table, posterior.temperature)
    stepper = make_optimizer(table, ensemble.weights, lr)
    nothing = torch.zeros(1, 1, device=start.device)
    for step in range(steps):
        factor = 1.0 if annealing is None else _factor(annealing, step, steps)
        pushed, driven = (factor, 1.0) if multiplies_push(annealing) else (1.0, factor)
        here = None if repulsion is None else replace(repulsion, strength=pushed * strength)
        velocity, info = forces(ensemble, posterior, here, (nothing, nothing), annealing=driven)
        ensemble.weights["x"].grad = velocity["x"]
        if noise is not None:
            heat = noise * posterior.heat
            add_noise(ensemble, stepper, heat, seed, step, info.alive)
        stepper.step()
    return ensemble.weights["x"].detach().clone()


def _factor(annealing: Callable[[int, int], float], step: int, steps: int) -> float:
    return not_negative("annealing", from_user("annealing", ANNEALING, annealing, step, steps))

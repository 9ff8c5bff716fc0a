"""`sample` moves particles towards a density, with the code that trains ensembles."""

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from shoal.core.arguments import (
    checked,
    factor_or_none,
    from_user,
    instance_of,
    not_negative,
    positive,
    whole,
    whole_64_bits,
    whole_or_zero,
)
from shoal.core.errors import ConfigError, DataError, ShoalWarning, first_line
from shoal.core.values import describe_value
from shoal.inference.ensemble import Ensemble, Group
from shoal.inference.likelihoods import Likelihood, Task
from shoal.inference.posterior import Posterior
from shoal.inference.priors import Flat
from shoal.inference.samplers import Plan, Sampler, known_sampler
from shoal.interaction.methods import Method, get
from shoal.interaction.repulsion import Repulsion
from shoal.training.draws.moves import drawn
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
    draws=whole,
    warmup=whole_or_zero,
    thin=whole,
    seed=whole_64_bits,
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
    sampler: str | Mapping[str, Any] | Sampler | None = None,
    draws: int | None = None,
    warmup: int | None = None,
    thin: int | None = None,
) -> Tensor:
    """Move particles [M, D] towards a density: x += lr * velocity, with N = 1 and T = 1.

    With a `sampler`, every particle becomes a Markov chain and keeps draws of the density.

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
        sampler: "mclmc", "hmc", "nuts", "sghmc" or "sgld", a table with settings or an object, as
            in `shoal.draw`. It replaces the seven arguments before `seed`.
        draws: number of draws of each chain; with a sampler 1000 by default.
        warmup: number of steps before the first draw, as in `shoal.draw`.
        thin: steps from draw to draw, as in `shoal.draw`; 1 by default for sghmc and sgld.

    Returns:
        The particles after the last step [M, D]; with a sampler the draws [K, M, D].

    >>> x = sample(lambda x: -x.square().sum() / 2, torch.tensor([[-1.0], [0.5]]), steps=200)
    >>> bool(x[0] < -0.1) and bool(x[1] > 0.1)
    True
    """
    if not isinstance(start, Tensor) or start.ndim != 2 or not start.numel():
        came = describe_value(start)
        raise DataError(f"start must be a tensor [M, D] with M and D of at least 1, not {came}")
    if not start.is_floating_point() or not bool(start.isfinite().all()):
        raise DataError("start must be finite real numbers; type start.float() for integers")
    others = [method != "kde", steps != 1000, lr != 0.1, optimizer != "sgd"]
    if sampler is not None:
        if any([*others, annealing is not None, noise is not None]):
            raise ConfigError(
                "a sampler has its own steps; leave out method, steps, lr, optimizer, annealing "
                "and noise, or write sampler={'name': 'sghmc', 'lr': 0.01}"
            )
        chosen = known_sampler("sampler", sampler)
        density = _Density(log_density, start)
        plan = Plan.of(chosen, density, draws or 1000, warmup, thin, seed)
        return drawn(density, start, plan)[0]
    if (draws, warmup, thin) != (None, None, None):
        raise ConfigError("draws, warmup and thin need a sampler; type sampler='mclmc'")
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


class _Density:
    """The caller's density as samplers take it: all chains at once, where vmap can."""

    points = 1.0

    def __init__(self, log_density: Callable[[Tensor], Tensor], start: Tensor) -> None:
        self.log_density, self.batched = log_density, True
        self.numbers = torch.full((len(start),), start.shape[1], device=start.device)
        self.used = torch.ones_like(start[:1, :1])

    def __call__(self, x: Tensor, step: int) -> tuple[Tensor, Tensor]:
        x = x.detach().requires_grad_()
        with torch.enable_grad():
            values = self._values(x)
            if values.shape != (len(x),):
                raise ConfigError(f"log_density must be {DENSITY}, and the result has several")
            (gradient,) = torch.autograd.grad((values + 0 * x.sum(1)).sum(), x)
        return values.detach(), gradient

    def _values(self, x: Tensor) -> Tensor:
        if not self.batched:
            return torch.stack([self.log_density(row) for row in x]).squeeze(-1)
        try:
            return torch.func.vmap(self.log_density)(x).reshape(len(x), -1).squeeze(-1)
        except RuntimeError as error:
            self.batched = False
            values = self._values(x)  # raises what is wrong with the density itself
            warnings.warn(
                f"chains run one after another, since vmap cannot batch this density: "
                f"{first_line(error)}",
                ShoalWarning,
                stacklevel=2,
            )
            return values


def _factor(annealing: Callable[[int, int], float], step: int, steps: int) -> float:
    return not_negative("annealing", from_user("annealing", ANNEALING, annealing, step, steps))

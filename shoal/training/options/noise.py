r"""Langevin noise: members that sample the posterior instead of resting at a maximum.

SGLD (Welling & Teh 2011). The velocity is per data point, v = ∇ log p(θ | D) / N, so a step is

$$ θ \leftarrow θ + lr \, v + \sqrt{2 T \, noise \, lr / N} \; ξ, \qquad ξ \sim N(0, 1). $$

With the time t = lr · step it discretises dθ = ∇ log p(θ | D) / N dt + √(2 T / N) dW at noise 1.
Its Fokker-Planck equation is ∂ρ = -∇·(ρ ∇ log p / N) + (T / N) Δρ. The flux
ρ ∇ log p / N - (T / N) ∇ρ vanishes for ρ ∝ p(θ | D)^(1/T), which is the invariant law.

SGHMC (Chen, Fox & Guestrin 2014, arXiv 1402.4102). SGD with momentum μ computes
buf = μ buf + g, θ += lr buf. Its speed u = lr buf has the update u = u - (1 - μ) u + lr g, which is
their equation 15 with the friction α = 1 - μ and the step η = lr / N. The noise of variance
2 α η T of that equation enters u, hence the gradient g = v + s ξ and the buffer have

$$ s^2 = 2 (1 - μ) \, T \, noise / (N \, lr (1 - dampening)). $$

Without momentum this is SGLD. In Nesterov's form a force moves the member by lr / (1 - μ) in total,
as in the other form, only earlier. The noise does so too, hence s is the same.

Discretisation. For a Gaussian posterior with v = -a θ the steps are a linear recursion. Its
stationary variance is exactly, with r = lr (1 - dampening) and without Nesterov's form,

$$ \mathrm{var} = \frac{T}{N a} \cdot \frac{noise}{1 - r \, a / (2 (1 + μ))}. $$

Mini-batches add the variance of their gradients, lr² var(v) per step, which vanishes as lr does.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from shoal.core.errors import ConfigError
from shoal.core.random import hashed, key, normal_stream
from shoal.core.tree import add_into
from shoal.inference.ensemble import Ensemble

__all__ = ["add_noise", "add_normal", "add_shared_noise", "check_noise", "noise_std"]

AT_ONCE = 1 << 22
"""Largest number of normal numbers drawn at a time, unless one tensor has more."""


def check_noise(noise: float | None, optimizer: Mapping[str, Any], temperature: float) -> None:
    """Refuse noise whose invariant law would not be the posterior's.

    Adaptive optimisers divide every gradient by its typical size. Noise with the same divisor
    (pSGLD, Li et al. 2016) samples the posterior only with the divergence of that divisor, which
    nobody computes, and Adam's averages would take the noise for gradients. So only SGD has noise.
    """
    if noise is None:
        return
    if temperature == 0:
        raise ConfigError(
            "at temperature=0 the posterior is one point and its noise is zero; "
            "leave noise out, or set a positive temperature"
        )
    name = str(optimizer.get("name", "")).lower()
    if name != "sgd":
        raise ConfigError(
            f"noise samples the posterior only with the optimizer 'sgd', not '{name}', which "
            f"rescales the gradients; type optimizer='sgd'"
        )
    for setting in ("momentum", "dampening"):
        value = optimizer.get(setting, 0.0)
        if not 0 <= value < 1:
            raise ConfigError(f"with noise, {setting} must lie in [0, 1), not {value}")


def noise_std(optimizer: torch.optim.Optimizer, heat: float) -> float | Tensor:
    """Standard deviation s of the noise in the gradient of SGD, for one number of one member.

    s² = 2 (1 - momentum) heat / (lr (1 - dampening)), and 0 at a learning rate of 0.

    Args:
        optimizer: SGD; its learning rate may be a scalar on the device.
        heat: noise T / N.
    """
    group = optimizer.param_groups[0]
    momentum = group["momentum"]
    # Without momentum SGD has no buffer, and ignores the dampening.
    share = 1 - group["dampening"] if momentum else 1.0
    variance, rate = 2 * (1 - momentum) * heat / share, group["lr"]
    if isinstance(rate, Tensor):
        return torch.where(rate > 0, variance / rate, 0.0).sqrt()
    return (variance / rate) ** 0.5 if rate > 0 else 0.0


@torch.no_grad()
def add_noise(
    ensemble: Ensemble,
    optimizer: torch.optim.Optimizer,
    heat: float,
    seed: int,
    step: int | Tensor,
    alive: Tensor,
) -> None:
    """Add Langevin noise to the velocity of every member, which its weights hold as `grad`.

    The noise of a member depends on seed, step and the member's number in the whole ensemble.
    Member runner, chunks, resumed runs and other members do not change it.

    Args:
        ensemble: the members that move.
        optimizer: SGD, which moves them.
        heat: noise T / N.
        seed: seed of the run.
        step: number of the training step; a tensor in a captured step.
        alive: which members are finite [M]; the others get no noise.
    """
    device = ensemble.device
    numbers = torch.arange(ensemble.first, ensemble.first + ensemble.members, device=device)
    keys = hashed(key(seed, "noise", step, device) + numbers)
    std = noise_std(optimizer, heat) * alive.float()
    first = 0
    for group in ensemble.groups:
        mine = slice(first, first + group.members)
        add_normal(_gradients(group.weights.values()), keys[mine], std[mine])
        first += group.members


@torch.no_grad()
def add_shared_noise(
    tensors: Sequence[Tensor],
    members: int | Tensor,
    optimizer: torch.optim.Optimizer,
    heat: float,
    seed: int,
    step: int | Tensor,
    shares: Sequence[tuple[int, int]] | None = None,
) -> None:
    """Add noise to the velocity of tensors that M members share and train, held as `grad`.

    The velocity of a shared tensor is the mean over members of the velocities that copies would
    have. Its noise is the mean of their noises, of variance s² / M. Then the joint invariant law of
    shared θ and private φ_i is the product over i of p(θ, φ_i | D)^(1/T).

    Args:
        tensors: shared tensors, without a member axis.
        members: M, the number of members in the mean.
        optimizer: SGD, which moves the tensors.
        heat: noise T / N.
        seed: seed of the run.
        step: number of the training step.
        shares: numbers in each whole tensor, and the first one here, for tensors in shards.
    """
    if not tensors:
        return
    device = tensors[0].device
    keys = hashed(key(seed, "shared noise", step, device)).reshape(1)
    one = torch.ones(1, device=device)
    std = one * noise_std(optimizer, heat) * members**-0.5
    gradients = _gradients(tensors)
    if shares is None:
        add_normal([gradient.unsqueeze(0) for gradient in gradients], keys, std)
        return
    place = 0
    for gradient, (total, first) in zip(gradients, shares, strict=True):
        skipped, odd = divmod(first, 2)
        pairs = (odd + gradient.numel() + 1) // 2
        numbers = normal_stream(keys, place + skipped, pairs)[0, odd : odd + gradient.numel()] * std
        gradient += numbers.reshape(gradient.shape)
        place += (total + 1) // 2


def _gradients(tensors: Iterable[Tensor]) -> list[Tensor]:
    return [tensor.grad for tensor in tensors if tensor.grad is not None]


def add_normal(gradients: Sequence[Tensor], keys: Tensor, std: Tensor) -> None:
    """Add normal numbers to tensors [m, ...]: row i from the stream of keys[i], times std[i]."""
    for first, some in _batches(gradients, len(keys)):
        places = _places(some)
        numbers = normal_stream(keys, first, places[-1]) * std.unsqueeze(-1)
        noise = [
            numbers[:, 2 * start : 2 * start + gradient[0].numel()].reshape(gradient.shape)
            for gradient, start in zip(some, places, strict=False)
        ]
        add_into(some, noise, 1.0)


def _places(gradients: Sequence[Tensor]) -> list[int]:
    """First pair of each gradient in a member's stream, and the end of the last."""
    places = [0]
    for gradient in gradients:
        places.append(places[-1] + (gradient[0].numel() + 1) // 2)
    return places


def _batches(gradients: Sequence[Tensor], members: int) -> Iterator[tuple[int, list[Tensor]]]:
    """Gradients of at most `AT_ONCE` numbers together, with their first pair in the stream."""
    first, some = 0, []
    for gradient in gradients:
        pairs = _places([*some, gradient])[-1]
        if some and 2 * pairs * members > AT_ONCE:
            yield first, some
            first, some = first + _places(some)[-1], []
        some.append(gradient)
    if some:
        yield first, some

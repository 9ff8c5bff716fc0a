"""Sensor noise: Gaussian noise, photon noise and broken pixels."""

import torch
from torch import Tensor

from shoal.data.corruptions.registry import Draws, corruption

__all__ = ["gaussian_noise", "impulse_noise", "poisson", "shot_noise"]


@corruption("gaussian-noise", (0.04, 0.06, 0.08, 0.09, 0.10))
def gaussian_noise(images: Tensor, draws: Draws, stddev: float) -> Tensor:
    """Noise of poor light, x + N(0, c²)."""
    return images + stddev * draws.normal("noise", *images.shape[1:]).to(images)


@corruption("shot-noise", (500.0, 250.0, 100.0, 75.0, 50.0))
def shot_noise(images: Tensor, draws: Draws, photons: float) -> Tensor:
    """Noise of counting photons, Poisson(c x) / c."""
    counts = poisson(photons * images.double(), draws.uniform("photons", *images.shape[1:]))
    return (counts / photons).to(images)


@corruption("impulse-noise", (0.01, 0.02, 0.03, 0.05, 0.07))
def impulse_noise(images: Tensor, draws: Draws, share: float) -> Tensor:
    """Salt and pepper: a share c of the values becomes 0 or 1, half each."""
    draw = draws.uniform("impulse", *images.shape[1:])
    return torch.where(draw < share, (draw < share / 2).to(images), images)


def poisson(rate: Tensor, u: Tensor) -> Tensor:
    """The smallest count k whose distribution function reaches u, P(K <= k) >= u.

    The expansion of Cornish & Fisher (1938) gives a guess within a few counts. A search down and up
    then uses the distribution function Q(k + 1, rate), an incomplete gamma function.

    Args:
        rate: rate of each count, zero or positive, in double precision.
        u: a uniform number for each.
    """
    rate = rate.clamp(min=1e-30)  # the search divides by the rate
    z = torch.special.ndtri(u)
    guess = rate + rate.sqrt() * z + (z.square() - 1) / 6
    count = guess.nan_to_num(0.0, 0.0, 0.0).floor().clamp(min=0)
    reached = torch.special.gammaincc(count + 1, rate)
    mass = (torch.xlogy(count, rate) - rate - torch.lgamma(count + 1)).exp()
    while (down := (count > 0) & (reached - mass >= u)).any():
        reached = torch.where(down, reached - mass, reached)
        mass = torch.where(down, mass * count / rate, mass)
        count = count - down.double()
    while (up := (reached < u) & (mass > 0)).any():
        count = count + up.double()
        mass = torch.where(up, mass * rate / count, mass)
        reached = torch.where(up, reached + mass, reached)
    return count

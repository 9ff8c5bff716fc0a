"""The regularised incomplete beta function and Student's distribution, which torch lacks."""

import math

import numpy as np
import torch
from torch import Tensor

__all__ = ["incomplete_beta", "student_cdf", "student_quadrature"]

_TINY = 1e-300
_PRECISION = 1e-14
_MOST = 20_000


def incomplete_beta(a: Tensor, b: Tensor, x: Tensor) -> Tensor:
    r"""$I_x(a, b) = \int_0^x t^{a-1} (1-t)^{b-1} dt / B(a, b)$, in double precision.

    The distribution function of the negative binomial follows from it. By the continued
    fraction of DLMF 8.17.22, at the side of the mean where it converges fast. The number of terms
    depends on the values, so the function waits for the device.

    >>> incomplete_beta(torch.tensor(2.0), torch.tensor(1.0), torch.tensor(0.5))
    tensor(0.2500, dtype=torch.float64)
    """
    a, b, x = torch.broadcast_tensors(a.double(), b.double(), x.double())
    below = x * (a + b + 2) < a + 1
    first, second = torch.where(below, a, b), torch.where(below, b, a)
    place = torch.where(below, x, 1 - x)
    logs = torch.special.xlogy(first, place) + torch.special.xlog1py(second, -place)
    logs = logs + torch.lgamma(a + b) - torch.lgamma(a) - torch.lgamma(b)
    part = logs.exp() / (first * _fraction(first, second, place))
    return torch.where(below, part, 1 - part).clamp(0, 1)


def _fraction(a: Tensor, b: Tensor, x: Tensor) -> Tensor:
    """The continued fraction 1 + d1 / (1 + d2 / (1 + ...)), by the method of Lentz."""
    value = upper = torch.ones_like(x)
    lower = torch.zeros_like(x)
    for j in range(1, _MOST):
        m = j // 2
        if j % 2:
            step = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        else:
            step = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        lower = _away(1 + step * lower).reciprocal()
        upper = _away(1 + step / upper)
        value = value * upper * lower
        if j % 16 == 0 and bool(((upper * lower - 1).abs() < _PRECISION).all()):
            break
    return value


def _away(value: Tensor) -> Tensor:
    """The value, kept from zero."""
    return torch.where(value.abs() < _TINY, _TINY, value)


_NODES = 32
_MOST_WHOLE = 60


def student_cdf(t: Tensor, df: float) -> Tensor:
    r"""P(T <= t) of Student's t with `df` degrees of freedom, to 1e-13 of double precision.

    For whole degrees of freedom a finite sum of powers of $\cos θ$, $θ = \arctan(t / \sqrt ν)$
    (Abramowitz & Stegun 26.7.3 and 26.7.4); for others `student_quadrature`.

    >>> student_cdf(torch.tensor([0.0, 1.0]).double(), 3.0)
    tensor([0.5000, 0.8045], dtype=torch.float64)
    """
    if df != round(df) or df > _MOST_WHOLE:
        parts = [student_quadrature(part, df) for part in t.flatten().split(1 << 18)]
        return torch.cat(parts).view_as(t)
    odd, square = round(df) % 2, df / (df + t.square())
    term = total = square.sqrt() if odd else torch.ones_like(t)
    for k in range(2 + odd, round(df) - 1, 2):
        term = term * square * ((k - 1) / k)
        total = total + term
    total = total * t / (df + t.square()).sqrt()
    if odd:
        total = (total + (t / math.sqrt(df)).atan()) * (2 / math.pi)
    return 0.5 + total / 2


def student_quadrature(t: Tensor, df: float) -> Tensor:
    r"""The same by operations that exported files have, and whose number is fixed.

    With $s = t / (\sqrt{ν + t^2} + \sqrt ν)$ it is $\frac12 + c \int_0^s
    (1 - u^2)^{ν-1} / (1 + u^2)^ν du$, $c = 2 Γ(\frac{ν+1}{2}) / (\sqrt π\, Γ(\frac ν2))$. The
    integrand is smooth, so the quadrature of Gauss and Legendre needs 32 nodes for any df from 3
    on; below, it is exact to 1e-8.
    """
    places, weights = np.polynomial.legendre.leggauss(_NODES)
    u, w = (torch.from_numpy(each / 2).to(t) for each in (places + 1, weights))
    factor = 2 * math.exp(math.lgamma((df + 1) / 2) - math.lgamma(df / 2)) / math.sqrt(math.pi)
    s = t / ((df + t.square()).sqrt() + math.sqrt(df))
    most = math.sqrt(20 / df)  # beyond it are 1e-17 of the distribution
    s = s.clamp(-most, most)
    square = (s.unsqueeze(-1) * u).square()
    density = ((df - 1) * (-square).log1p() - df * square.log1p()).exp()
    return 0.5 + factor * s * (density @ w)

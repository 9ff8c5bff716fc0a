"""The regularised incomplete beta function, which torch lacks."""

import torch
from torch import Tensor

__all__ = ["incomplete_beta"]

_TINY = 1e-300
_PRECISION = 1e-14
_MOST = 20_000


def incomplete_beta(a: Tensor, b: Tensor, x: Tensor) -> Tensor:
    r"""$I_x(a, b) = \int_0^x t^{a-1} (1-t)^{b-1} dt / B(a, b)$, in double precision.

    The distribution functions of Student's t and of the negative binomial follow from it. By the
    continued fraction of DLMF 8.17.22, at the side of the mean where it converges fast. The number
    of terms depends on the values, so the function waits for the device.

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

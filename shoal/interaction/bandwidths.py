"""Bandwidths: the length scale of the kernel."""

import functools
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from shoal.core.errors import ConfigError
from shoal.core.registry import Registry

__all__ = ["Bandwidth", "Fixed", "Median", "MemberMedian", "registry"]

registry = Registry("bandwidth")


class Bandwidth(Protocol):
    """Squared bandwidth h2 [S, 1, 1] from the squared distances d2 [S, M, M] of finite members.

    A result [S, 1, M] has one bandwidth per column member.
    """

    def __call__(self, d2: Tensor, alive: Tensor) -> Tensor:
        """One squared bandwidth per site; a constant for differentiation."""
        ...


@registry.register("fixed")
@dataclass(frozen=True)
class Fixed:
    """The same squared bandwidth at every step.

    Attributes:
        h2: the squared bandwidth, in squared units of the space.
    """

    h2: float = 1.0

    def __post_init__(self) -> None:
        if not self.h2 > 0:
            raise ConfigError(f"the squared bandwidth h2 must be positive, not {self.h2}")

    def __call__(self, d2: Tensor, alive: Tensor) -> Tensor:
        """h2 for every site."""
        return torch.full_like(d2[:, :1, :1], self.h2)


@registry.register("median", cite=("liu2016stein",))
@dataclass(frozen=True)
class Median:
    """The median heuristic, h² = median(d²) / (2 ln(M + 1)), over pairs of different members.

    With this scale an RBF kernel between typical members is 1 / (M + 1) in every dimension. Papers
    also have ln M, among them that of input gradients: ln 1 = 0 gives a single finite member no
    width, so the sum of M and 1 stays here, and `MemberMedian` is the published form. A wider
    kernel estimates the score of a given sample better: `scale="unit"` omits the logarithm,
    h² = median(d²), as in Shi, Sun & Zhu (2018), arXiv 1806.02925.

    Attributes:
        scale: "log" divides by 2 ln(M + 1), "unit" does not.
        legacy: median over all M² entries, including the M zeros on the diagonal, as in released
            code; for M = 2 this halves the distance.
    """

    scale: str = "log"
    legacy: bool = False

    def __post_init__(self) -> None:
        if self.scale not in ("log", "unit"):
            raise ConfigError(f"the median's scale must be 'log' or 'unit', not '{self.scale}'")

    def __call__(self, d2: Tensor, alive: Tensor) -> Tensor:
        """Median over pairs of finite members at each site; their mean if the median is 0."""
        i, j = _pairs(len(alive), self.legacy, d2.device)
        values, living = d2[:, i, j], alive[i] & alive[j]
        middle = masked_median(values, living)
        if self.scale == "log":
            middle = middle / (2 * (alive.sum() + 1).to(d2.dtype).log())
        return _positive(middle, values, living).detach()[:, None, None]


@registry.register("member-median", cite=("trinh2024input",))
@dataclass(frozen=True)
class MemberMedian:
    """A median per member, 2 h_j² = median_i(d_ij²) / ln M + 1e-12, including its own distance 0.

    The released code of Trinh et al. (2024), arXiv 2306.02775, does the same. The kernel matrix is
    then not symmetric; the force on a member is still the gradient of its row. If half of the
    members coincide, their median is 0. The constant then makes the kernel so narrow that only
    members at the same place count.
    """

    def __call__(self, d2: Tensor, alive: Tensor) -> Tensor:
        """One median per site and member [S, 1, M]."""
        logarithm = alive.sum().clamp(min=2).to(d2.dtype).log()
        h2 = (masked_median(d2.mT, alive) / logarithm + 1e-12) / 2
        return h2.detach().unsqueeze(-2)


def _pairs(members: int, every: bool, device: torch.device) -> tuple[Tensor, Tensor]:
    """Rows and columns of the pairs i < j, or of all M² pairs."""
    # Compiled code stores the pairs as constants; the compiler warns about caches it traces.
    make = _new_pairs if torch.compiler.is_compiling() else _kept_pairs
    return make(members, every, device)


def _new_pairs(members: int, every: bool, device: torch.device) -> tuple[Tensor, Tensor]:
    if every:
        i, j = torch.meshgrid(torch.arange(members), torch.arange(members), indexing="ij")
        return i.flatten().to(device), j.flatten().to(device)
    i, j = torch.triu_indices(members, members, offset=1)
    return i.to(device), j.to(device)


_kept_pairs = functools.lru_cache(maxsize=64)(_new_pairs)


def masked_median(values: Tensor, keep: Tensor) -> Tensor:
    """Median of the kept columns of each row: the mean of the two middle ones for an even count.

    No shape depends on the data, so nothing waits for the device.

    >>> masked_median(torch.tensor([[4.0, 1.0, 9.0, 2.0]]), torch.tensor([True, True, False, True]))
    tensor([2.])
    """
    if not keep.numel():
        return torch.zeros_like(values[..., :0].sum(-1))
    ordered = torch.where(keep, values, torch.inf).sort(-1).values
    count = keep.sum()
    places = ((count + torch.arange(-1, 1, device=keep.device)) // 2).clamp(0, keep.numel() - 1)
    middle = ordered.index_select(-1, places).mean(-1)
    return torch.where(count > 0, middle, 0.0)


def _positive(middle: Tensor, values: Tensor, living: Tensor) -> Tensor:
    # If most members coincide the median is 0; the mean is 0 only if all coincide.
    mean = torch.where(living, values, 0.0).sum(-1) / living.sum().clamp(min=1)
    fallback = torch.where(mean > 0, mean, 1.0)
    return torch.where(middle > 0, middle, fallback)

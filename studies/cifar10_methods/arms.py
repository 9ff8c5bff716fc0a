"""Arms of the study: a word such as `kde+laplace:1000` becomes settings of `fit`.

A word is a method, then changes after `+`, then the strength after `:`.

- `members=11`: ensemble size. Eleven plain members cost as much as five members of `forde`.
- `nodes`: members share the weights of every layer, and differ in factors of its inputs and outputs
  and in its biases. This is like the node-BNN of Trinh et al. (2022), without its noise.
- `own-batches`: every member has an order of batches of its own. In the other arms members share
  their batches, as function-space repulsion needs.
- `laplace`, `linear-kernel`: another kernel than the RBF kernel.
- `calibrated`: the calibrated form of the method.
- `adversarial`: half of each batch's likelihood from FGSM neighbours, at 1 % of the pixel range.
- `linear`, `hyperbolic`, `cyclic`: annealing of the driving force.
- `empcov`: the empirical covariance prior on the filters of the first layer.
- `placebo`: a random push of equal norm takes the place of the repulsion.
- `lr=0.002`, `prior=0.3`: another learning rate, another standard deviation of the prior.
- `swag`: five SWAG samples around every member, from its last ten snapshots.

`lit` is local independence training, which has no entry in the library. `hyper` is a hyper-deep
ensemble, see `hyper.py`. A strength in capitals, as in `kde+laplace:KDE`, is the one that is large
enough to matter for the method of that name.
"""

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

import shoal
from shoal.core.types import Tree
from shoal.inference.priors import Gaussian
from shoal.interaction import methods
from shoal.interaction.bandwidths import Fixed
from shoal.interaction.kernels import Laplace, LinearKernel
from shoal.interaction.repulsion import Repulsion
from shoal.interaction.spaces import InputGradients, Normalised
from shoal.training.options.annealing import registry as annealings
from studies.released import LinearDensity

__all__ = ["SIZES", "Arm", "EmpCov", "Energy", "SquaredCosine", "named", "parsed", "settings"]

SIZES = {n: (f"forde+members={n}:FORDE", f"ensemble+members={n}") for n in (2, 10, 20)}
"""Repelled input gradients and plain members, by ensemble size; the other arms have five."""


class Arm(NamedTuple):
    """A method, its changes, and its strength; None is the method's own."""

    method: str
    changes: dict[str, str]
    strength: float | None


def parsed(word: str) -> Arm:
    """
    >>> parsed("kde+laplace:1000")
    Arm(method='kde', changes={'laplace': ''}, strength=1000.0)
    """
    name, _, strength = word.partition(":")
    method, *changes = name.split("+")
    pairs = (change.partition("=") for change in changes)
    found = {key: value for key, _, value in pairs}
    return Arm(method, found, float(strength) if strength else None)


def named(word: str, strengths: dict[str, float]) -> str:
    """A word with a number instead of the strength in capitals.

    >>> named("kde+laplace:KDE", {"kde": 1000.0})
    'kde+laplace:1000'
    """
    name, _, strength = word.partition(":")
    return f"{name}:{strengths[strength.lower()]:g}" if strength.isupper() else word


def settings(arm: Arm, data: shoal.Dataset, device: str) -> dict[str, Any]:
    """The arguments of `fit` in which an arm differs from the plain ensemble."""
    changes = arm.changes
    found: dict[str, Any] = {"method": _method(arm), "strength": arm.strength}
    if "adversarial" in changes:
        low, high = (float(end) for end in data.train.x.aminmax())
        found["adversarial"] = 0.01 * (high - low)
    if "empcov" in changes:
        found["prior"] = EmpCov.of(data.train.x[:500].to(device))
    if "prior" in changes:
        found["prior"] = Gaussian(float(changes["prior"]))
    if "lr" in changes:
        found["lr"] = float(changes["lr"])
    if "own-batches" in changes:
        found["batches"] = "own"
    schedule = next((name for name in changes if name in annealings), None)
    legacy = {} if schedule in ("constant", "linear") else {"legacy": True}  # as released
    return found | {"annealing": schedule and {"name": schedule, **legacy}}


def _method(arm: Arm) -> Any:
    if arm.method == "lit":
        space = Normalised(InputGradients(), eps=1e-15)
        return Repulsion(space, SquaredCosine(), Fixed(1.0), Energy(), per="batch")
    found = methods.get(arm.method, calibrated="calibrated" in arm.changes)
    if "placebo" in arm.changes:
        found = methods.changed(found, {"placebo": True})
    repulsion = found.repulsion
    if repulsion is not None and "laplace" in arm.changes:
        repulsion = replace(repulsion, kernel=Laplace())
    if repulsion is not None and "linear-kernel" in arm.changes:
        repulsion = replace(repulsion, kernel=LinearKernel(), flow=LinearDensity())
    return replace(found, repulsion=repulsion)


@dataclass(frozen=True)
class SquaredCosine:
    """cos² of two unit vectors, whose squared distance is u = 2 - 2 cos."""

    def value(self, u: Tensor) -> Tensor:
        """(1 - u / 2)²."""
        return (1 - u / 2).square()

    def slope(self, u: Tensor) -> Tensor:
        """-(1 - u / 2)."""
        return u / 2 - 1


@dataclass(frozen=True)
class Energy:
    """Descends the summed kernel itself: mix = 1, B = L.

    With `SquaredCosine` of input gradients this is local independence training. The penalty is
    strength / B for a batch of B images. Ross et al. (2020), arXiv 1911.01291.
    """

    def __call__(self, K: Tensor, L: Tensor, members: Tensor) -> tuple[None, Tensor]:
        """The identity and L."""
        return None, L


@dataclass(frozen=True, eq=False)
class EmpCov:
    """Filters of the first layer ~ N(0, C / mean variance + eps), other weights ~ N(0, 1).

    C is the covariance of the training images' patches, so filters that see what the data never
    show have a small prior variance. Izmailov et al. (2021), arXiv 2106.11905.

    Attributes:
        precision: the inverse covariance of one filter [D, D].
    """

    precision: Tensor

    @classmethod
    def of(cls, images: Tensor, size: int = 3, eps: float = 1e-4) -> "EmpCov":
        """The prior for filters of `size` x `size` pixels."""
        patches = F.unfold(images, size).mT.flatten(0, 1).double()
        C = torch.cov(patches.mT)
        C = C / C.diagonal().mean() + eps * torch.eye(len(C), dtype=C.dtype, device=C.device)
        return cls(torch.linalg.inv(C).float())

    def log_prob(self, weights: Tree) -> Tensor:
        """Log density of each member [M], up to a constant."""
        first, others = self._apart(weights)
        filters = first.flatten(2)
        quadratic = torch.einsum("mof,fg,mog->m", filters, self.precision.to(first), filters)
        return Gaussian(1.0).log_prob(others) - 0.5 * quadratic

    def score(self, weights: Tree) -> Tree:
        """-C^-1 w for the first layer's filters, and -w for other weights."""
        first, others = self._apart(weights)
        change = -(first.flatten(2) @ self.precision.to(first)).reshape(first.shape)
        return {next(iter(weights)): change} | Gaussian(1.0).score(others)

    def draw(self, weights: Tree, count: int, key: Tensor) -> Tree:
        """Always raises: nothing here draws from this prior."""
        raise NotImplementedError("EmpCov has no draws here")

    def _apart(self, weights: Tree) -> tuple[Tensor, Tree]:
        (_, first), *others = weights.items()
        return first, dict(others)

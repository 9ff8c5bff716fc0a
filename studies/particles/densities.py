"""Particles on densities with exact samples: kernels, annealing, convergence with their number.

The matrices of a step come from `shoal.interaction`, the scores of the densities are written out.
`shoal.sample` computes the same step; a test compares the two.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from shoal.analysis.fidelity.distances import mmd, sliced_wasserstein
from shoal.data import targets
from shoal.interaction.bandwidths import Fixed
from shoal.interaction.estimators import SSGE
from shoal.interaction.flows import Wasserstein
from shoal.interaction.kernels import IMQ, RBF, Laplace, LinearKernel, Matern
from shoal.interaction.methods import get
from shoal.interaction.repulsion import Repulsion, interact
from shoal.training.options import annealing

KERNELS = {
    "rbf": RBF(),
    "laplace": Laplace(),
    "imq": IMQ(),
    "matern": Matern(1.5),
    "linear": LinearKernel(),
}
EXACT = "exact draws"
"""The baseline: as many independent draws from the density."""

REFERENCE = 2000
"""Exact draws that particles are compared with."""


class Hills:
    """Mixture of Gaussians in any dimension, sum_k weight_k N(mean_k, covariance_k)."""

    def __init__(self, weights: Tensor, means: Tensor, covariances: Tensor) -> None:
        self.weights, self.means = weights, means
        self.factors = torch.linalg.cholesky(covariances)
        self.precisions = torch.linalg.inv(covariances)
        self.heights = weights.log() - torch.logdet(covariances) / 2

    def score(self, x: Tensor) -> Tensor:
        """The gradient of the log density of particles [M, D]."""
        pulls, shares = self._hills(x)
        return (shares.unsqueeze(-1) * pulls).sum(1)

    def shares(self, x: Tensor) -> Tensor:
        """Probability [M, K] that a particle belongs to each hill."""
        return self._hills(x)[1]

    def _hills(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Score of each hill [M, K, D], and its share [M, K]."""
        offsets = x.unsqueeze(1) - self.means
        pulls = -torch.einsum("mkd,kde->mke", offsets, self.precisions)
        return pulls, (self.heights + (offsets * pulls).sum(-1) / 2).softmax(-1)

    def draw(self, n: int, generator: torch.Generator) -> Tensor:
        """Independent samples [n, D]."""
        hill = torch.multinomial(self.weights, n, replacement=True, generator=generator)
        noise = torch.randn(n, self.means.shape[1], 1, generator=generator)
        return self.means[hill] + (self.factors[hill] @ noise).squeeze(-1)


@dataclass(frozen=True)
class FunnelScore:
    """Neal's funnel of `shoal.data.targets`, with its score written out."""

    target: targets.Funnel

    def score(self, x: Tensor) -> Tensor:
        """The gradient of the log density of particles [M, D]."""
        v, others = x[:, -1:], x[:, :-1]
        precision = (-v).exp()
        along = -v / self.target.std**2 + ((others.square() * precision - 1) / 2).sum(-1, True)
        return torch.cat([-others * precision, along], -1)

    def draw(self, n: int, generator: torch.Generator) -> Tensor:
        """Independent samples [n, D]."""
        return self.target.draw(n, generator)


def density(problem: str) -> Hills | FunnelScore:
    """The density of a problem: gaussian, mixture, funnel, far, gaussian-D or mixture-D."""
    name, _, dimension = problem.partition("-")
    if dimension:
        return _in_dimension(name, int(dimension))
    if name == "far":
        means = torch.tensor([[-4.0, -4.0], [4.0, -4.0], [-4.0, 4.0], [4.0, 4.0]])
        weights = torch.tensor([0.4, 0.3, 0.2, 0.1])
        return Hills(weights, means, torch.eye(2).expand(4, 2, 2))
    target = targets.registry.make(name)
    if isinstance(target, targets.Funnel):
        return FunnelScore(target)
    if isinstance(target, targets.Gaussian2D):
        return Hills(*(torch.tensor([v]) for v in (1.0, target.mean, target.covariance)))
    return Hills(*map(torch.tensor, (target.weights, target.means, target.covariances)))


def _in_dimension(name: str, dimension: int) -> Hills:
    """N(0, 1), or two hills of unit variance at distance 4, each with half of the mass."""
    if name == "gaussian":
        return Hills(torch.ones(1), torch.zeros(1, dimension), torch.eye(dimension)[None])
    centre = torch.full((dimension,), 2 / math.sqrt(dimension))
    covariances = torch.eye(dimension).expand(2, dimension, dimension)
    return Hills(torch.full((2,), 0.5), torch.stack([-centre, centre]), covariances)


def repulsion(label: str) -> Repulsion | None:
    """The repulsion of a label NAME[:FORM][+KERNEL].

    FORM is `published` (RBF kernel with h = 0.5, all eigenpairs, ridge 0.01) or `calibrated`.
    """
    method, _, kernel = label.partition("+")
    name, _, form = method.partition(":")
    found = get(name, calibrated=form == "calibrated").repulsion
    if found is not None and form == "published":
        found = replace(found, bandwidth=Fixed(0.25))
        if name == "ssge":
            found = replace(found, flow=Wasserstein(SSGE(share=1.0, eta=0.01)))
    return replace(found, kernel=KERNELS[kernel]) if found is not None and kernel else found


def flow(
    score: Callable[[Tensor], Tensor],
    start: Tensor,
    repel: Repulsion | None,
    steps: int,
    factor: Callable[[int, int], float] | None = None,
    rates: tuple[float, float] = (0.1, 0.01),
) -> Tensor:
    """Particles [M, D] after `steps` of Adam; the second rate holds for the last third."""
    x, alive = start.clone(), torch.ones(len(start), dtype=torch.bool)
    stepper = torch.optim.Adam([x], lr=rates[0])
    for step in range(steps):
        if step == 2 * steps // 3:
            stepper.param_groups[0]["lr"] = rates[1]
        drive = score(x) * (1.0 if factor is None else factor(step, steps))
        if repel is not None:
            found = interact(repel, [x.unsqueeze(1)], alive)
            drive = drive if found.mix is None else found.mix @ drive
            drive = drive - found.cloud.times(found.B)[0].squeeze(1)
        x.grad = -drive
        stepper.step()
    return x


def measured(problem: str, method: str, members: int, seed: int, steps: int) -> dict[str, float]:
    """Distances to the density of a cell.

    METHOD is a label of `repulsion`, or LABEL@SCHEDULE/START for the part `annealing`.
    """
    target = density(problem)
    label, _, rest = method.partition("@")
    schedule, _, where = rest.partition("/")
    random = torch.Generator().manual_seed(1000 + seed)
    if label == EXACT:
        return distances(target, target.draw(members, random))
    dimension = target.draw(1, torch.Generator()).shape[1]
    start = torch.randn(members, dimension, generator=random)
    if where == "one hill":
        assert isinstance(target, Hills)
        start = target.means[0] + 0.5 * start
    factor = annealing.registry.make(schedule) if schedule else None
    if isinstance(factor, annealing.Hyperbolic | annealing.Cyclic):
        factor = replace(factor, legacy=True)  # the study judges the released form
    return distances(target, flow(target.score, start, repulsion(label), steps, factor))


def distances(target: Hills | FunnelScore, x: Tensor) -> dict[str, float]:
    """MMD and sliced distance to exact draws, variance, and how hills are filled."""
    if not x.isfinite().all():
        return {"diverged": 1.0}
    exact = target.draw(REFERENCE, torch.Generator().manual_seed(7))
    found = {
        "mmd": mmd(x, exact),
        "sliced": sliced_wasserstein(x, exact),
        "variance": float(x.var(0, correction=0).sum() / exact.var(0).sum()),
    }
    if isinstance(target, Hills) and len(target.weights) > 1:
        shares = target.shares(x).mean(0)
        found["wrong_share"] = float((shares - target.weights).abs().sum() / 2)
    return found

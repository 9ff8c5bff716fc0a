r"""Function-space flows that differ only in how a velocity at the outputs moves the weights.

The velocity at the outputs f of member i, for all N data points in one batch, is

$$ v_i = ∇_f \log p(y | f_i) + ∇_f \log π(f_i) - \sum_j B_{ij} f_j. $$

The rules turn v into a step of the weights, with J = ∂f / ∂θ of the same member:

    transpose          J^T v, by Adam: released code, and Shoal
    transpose-flow     the same direction in steps of 1 / (2 λ_max), without Adam
    ntk                J^T (J J^T + λ)^-1 v: outputs move along v, the damped pseudo-inverse of J
    gauss-newton       (J^T Λ J + P)^-1 J^T v, with curvature Λ of the likelihood and precision P
    other-batch        the push of other inputs Z, pulled back by J at the batch: released code
    other-exact        the push of other inputs Z, pulled back by J at Z: Shoal's `points`

All rules on the batch have the same stationary points, J^T v = 0, because the factors in front of
J^T v are invertible. Only their path and speed differ.
"""

import math
import time
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from shoal.analysis.fidelity.problems import Problem, make
from shoal.analysis.fidelity.reference import load
from shoal.analysis.fidelity.study import distances_of
from shoal.core.random import generator
from shoal.core.tree import rows
from shoal.inference.ensemble import Ensemble
from shoal.inference.posterior import Posterior, functional_score
from shoal.inference.priors import FunctionalPrior
from shoal.interaction.methods import get
from shoal.interaction.repulsion import interact
from shoal.training.options.options import Options
from shoal.training.options.settings import Settings

MEMBERS, RATE = 20, 0.1
"""Ensemble size and learning rate of Adam, as in the fidelity study."""
TRUST = 0.5
"""Largest root mean square change of a member's outputs in one step without Adam."""
DAMPING = 1e-3
"""λ as a share of the mean eigenvalue of J^T J."""
RULES = ("transpose", "transpose-flow", "ntk", "gauss-newton", "other-batch", "other-exact")
FORMS = ("legacy", "calibrated")


@dataclass
class Flow:
    """One ensemble on its way to the posterior.

    Attributes:
        problem: data, network, likelihood and prior.
        form: "legacy" or "calibrated", of method `f-kde`.
        rule: one of `RULES`.
        seed: seed of initialisation, prior draws and other inputs.
    """

    problem: Problem
    form: str
    rule: str
    seed: int

    def __post_init__(self) -> None:
        self.method = get("f-kde", self.form == "legacy", self.form == "calibrated")
        ensemble = Ensemble.init(self.problem.build, MEMBERS, seed=self.seed)
        self.ensemble = ensemble.to(torch.float64)
        weights = [rows(t.detach()) for t in self.ensemble.weights.values()]
        self.flat = torch.cat(weights, 1).clone()
        self.x, self.y = self.problem.x.double(), self.problem.y
        self.y = self.y.double() if self.y.is_floating_point() else self.y
        options = Options(
            method="f-kde", legacy=self.form == "legacy", calibrated=self.form == "calibrated",
            prior=cast(Any, self.problem.prior), likelihood=cast(Any, self.problem.likelihood),
        )  # fmt: skip
        prior = Settings.resolve(options).prior
        assert isinstance(prior, FunctionalPrior)
        self.posterior = Posterior(self.problem.likelihood, prior, len(self.x))

    def run(self, steps: int) -> None:
        """Move the members; the step size falls to zero as a cosine."""
        adam = self.rule not in ("transpose-flow", "ntk", "gauss-newton")
        flat = self.flat.requires_grad_(False)
        optimizer = torch.optim.Adam([flat], lr=RATE)
        for step in range(steps):
            size = (1 + math.cos(math.pi * step / steps)) / 2
            if adam:
                optimizer.param_groups[0]["lr"] = RATE * size
                flat.grad = -self.direction(step) / len(self.x)
                optimizer.step()
            else:
                flat += size * self.direction(step)

    def direction(self, step: int) -> Tensor:
        """The direction of the weights [M, D] by the rule."""
        drive, push = self.forces(step)
        if self.rule == "other-exact":
            return self.pulled(drive, self.x) - self.pulled(push, self.others(step))
        velocity = drive - push
        if self.rule in ("transpose", "other-batch"):
            return self.pulled(velocity, self.x)
        J = self.jacobian(self.x)
        gradient = torch.einsum("mfd,mf->md", J.flatten(1, 2), velocity.flatten(1))
        return self._trusted(J, self._preconditioned(J, gradient))

    def forces(self, step: int) -> tuple[Tensor, Tensor]:
        """Drive and push at the outputs [M, N, C], not divided by N."""
        f = self.problem.apply(self.flat, self.x)
        prior = self._prior_score(f, step)
        live = f.clone().requires_grad_()
        value = self.posterior.likelihood.log_prob(live, self.y).sum()
        (drive,) = torch.autograd.grad(value, live)
        compared = f
        if self.rule.startswith("other"):
            compared = self.problem.apply(self.flat, self.others(step))
        assert self.method.repulsion is not None
        alive = torch.ones(MEMBERS, dtype=torch.bool)
        found = interact(self.method.repulsion, [compared.flatten(1).unsqueeze(1)], alive)
        push = found.cloud.times(found.B)[0].reshape(f.shape)
        return drive + prior, push

    def others(self, step: int) -> Tensor:
        """As many other inputs as data points: normal, 1.5 times as wide as the data, new ones."""
        random = generator(self.seed, "jacobian", str(step))
        noise = torch.randn(self.x.shape, generator=random, dtype=torch.float64)
        return self.x.mean(0) + 1.5 * self.x.std(0) * noise

    def pulled(self, cotangent: Tensor, x: Tensor) -> Tensor:
        """J(x)^T times the cotangent [M, D], by one backward pass."""
        live = self.flat.clone().requires_grad_()
        return torch.autograd.grad(self.problem.apply(live, x), live, cotangent)[0]

    def jacobian(self, x: Tensor) -> Tensor:
        """J of every member [M, N, C, D], of a perceptron with at most one hidden layer of tanh."""
        *first, weight, _ = self._tensors()
        C = weight.shape[1]
        h = x.expand(MEMBERS, *x.shape)
        blocks: list[Tensor] = []
        if first:
            h = torch.baddbmm(first[1].unsqueeze(1), h, first[0].mT).tanh()
            back = weight.unsqueeze(1) * (1 - h.square()).unsqueeze(2)  # [M, N, C, H]
            blocks = [torch.einsum("mnch,nd->mnchd", back, x).flatten(3), back]
        each = torch.eye(C, dtype=x.dtype)
        last = torch.einsum("ck,mnh->mnckh", each, h).flatten(3)
        return torch.cat([*blocks, last, each.expand(*h.shape[:2], C, C)], -1)

    def _tensors(self) -> list[Tensor]:
        shapes = self.problem.shapes
        parts = self.flat.split([math.prod(shape) for shape in shapes], 1)
        return [t.reshape(MEMBERS, *shape) for t, shape in zip(parts, shapes, strict=True)]

    def balance(self, step: int) -> dict[str, float]:
        """Rest of the velocity, |drive - push| / (|drive| + |push|), at weights and at outputs.

        0 means that the forces balance, 1 that they do not oppose each other at all.
        """
        drive, push = self.forces(step)
        where = self.others(step) if self.rule == "other-exact" else self.x
        at_weights = [self.pulled(drive, self.x), self.pulled(push, where)]
        rest = (at_weights[0] - at_weights[1]).norm() / sum(t.norm() for t in at_weights)
        found = {"rest_weights": float(rest), "rest_outputs": math.nan}
        if not self.rule.startswith("other"):
            found["rest_outputs"] = float((drive - push).norm() / (drive.norm() + push.norm()))
        return found

    def _prior_score(self, f: Tensor, step: int) -> Tensor:
        score = functional_score(self.ensemble, self.posterior, f, self.x, self.seed, step)
        assert score is not None
        return len(self.x) * score

    def _preconditioned(self, J: Tensor, gradient: Tensor) -> Tensor:
        """The step without Adam, from J^T v."""
        if self.rule == "transpose-flow":
            return gradient / (2 * torch.linalg.eigvalsh(self._curvature(J))[:, -1:])
        if self.rule == "gauss-newton":
            return 0.5 * torch.linalg.solve(self._curvature(J), gradient)
        tangent = _products(J, J)
        mean = tangent.diagonal(dim1=1, dim2=2).mean(-1)[:, None, None]
        tangent = tangent + DAMPING * mean * torch.eye(J.shape[-1], dtype=J.dtype)
        return 0.5 / self._stiffness() * torch.linalg.solve(tangent, gradient)

    def _curvature(self, J: Tensor) -> Tensor:
        """J^T Λ J + P [M, D, D], the Gauss-Newton matrix of the posterior in the weights."""
        if self.problem.classes:
            p = self.problem.apply(self.flat, self.x).softmax(-1).unsqueeze(-1)
            LJ = p * (J - (p * J).sum(2, keepdim=True))
        else:
            LJ = self._stiffness() * J
        return _products(J, LJ) + torch.diag(self._precisions())

    def _stiffness(self) -> float:
        """Largest curvature of the likelihood in one output."""
        return (
            0.25 if self.problem.classes else 1 / cast(Any, self.problem.likelihood).noise_std ** 2
        )

    def _precisions(self) -> Tensor:
        prior, shapes = cast(Any, self.problem.prior), self.problem.shapes
        tensors = [torch.empty(1, *shape, device="meta") for shape in shapes]
        each = [torch.full((t[0].numel(),), 1 / prior.width(t) ** 2) for t in tensors]
        return torch.cat(each).double()

    def _trusted(self, J: Tensor, step: Tensor) -> Tensor:
        """The step, shortened where the outputs would change by more than `TRUST`."""
        change = torch.einsum("mfd,md->mf", J.flatten(1, 2), step).square().mean(1).sqrt()
        return step * (TRUST / change.clamp(min=TRUST)).unsqueeze(-1)


def _products(a: Tensor, b: Tensor) -> Tensor:
    """a^T b over data points and outputs [M, D, D]; single precision: it only sets the pace."""
    a, b = a.flatten(1, 2).float(), b.flatten(1, 2).float()
    return (a.mT @ b).double()


def cell(name: str, form: str, rule: str, steps: int, seed: int) -> dict[str, float | str]:
    """Train one ensemble, and measure its distance to the posterior."""
    torch.set_num_threads(1)
    problem = make(name)
    reference = load(problem)
    begun = time.perf_counter()
    found: dict[str, float | str] = {}
    if rule == "draws":
        order = torch.randperm(len(reference.draws), generator=torch.Generator().manual_seed(seed))
        flat = reference.draws[order[:MEMBERS]]
    else:
        flow = Flow(problem, form, rule, seed)
        flow.run(steps)
        flat = flow.flat.float()
        found |= flow.balance(steps)
    found["seconds"] = time.perf_counter() - begun
    return found | distances_of(problem, reference, flat)

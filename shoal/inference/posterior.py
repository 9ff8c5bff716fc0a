r"""The posterior: the only place that sets the scaling by N.

All forces on a member are measured per data point:

$$ \frac1N \log p(θ | D) = \frac1B \sum_{b} \log p(y_b | x_b, θ) + \frac1N \log p(θ) + const, $$

and the repulsive force has the factor T / N. At T = 1 members sample the posterior. At T = 0 the
repulsion vanishes, and the members are maximum a posteriori estimates. `docs/factors.md` compares
this scaling with published code.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from shoal.core.arguments import check_fields, not_negative, positive
from shoal.core.differentiate import with_pullback
from shoal.core.errors import DataError
from shoal.core.random import hashed, key, uniform
from shoal.core.structure import Inputs, parted
from shoal.core.tree import add_into, add_scaled, mul_each
from shoal.core.types import Tree
from shoal.data.batches.batch import Targets
from shoal.engine.members.member_runner import MemberInputs, MemberRunner
from shoal.engine.members.stack import evaluation_mode
from shoal.engine.resources.plan import default_runner
from shoal.inference.ensemble import Ensemble
from shoal.inference.likelihoods import Likelihood, known_likelihood
from shoal.inference.priors import (
    FanIn,
    Flat,
    FunctionalPrior,
    Gaussian,
    GaussianProcess,
    WeightPrior,
    known_prior,
)

__all__ = [
    "Posterior",
    "as_points",
    "drawn_outputs",
    "functional_score",
    "initialised_from",
    "point_weights",
    "site_axes",
    "target_weights",
    "total_weight",
]


@dataclass(frozen=True)
class Posterior:
    """Likelihood and prior for N data points.

    Attributes:
        likelihood: distribution of the targets, given the outputs.
        prior: prior on the weights, or on the outputs (`priors.FunctionalPrior`).
        n: number of training targets: data points times tokens or places, or their total weight.
        temperature: T; the members sample p(theta | D)^(1/T).
    """

    likelihood: Likelihood
    prior: WeightPrior | FunctionalPrior
    n: float
    temperature: float = 1.0

    def __post_init__(self) -> None:
        check_fields(self, likelihood=known_likelihood, prior=known_prior, n=positive)
        check_fields(self, temperature=not_negative)

    def push_scale(self, points: float | Tensor | None = None) -> float | Tensor:
        """T / N, the factor of the push beside log p(theta | D) / N; or T / `points`."""
        return self.heat if points is None else self.temperature / points

    @property
    def heat(self) -> float:
        """T / N, half the variance that Langevin noise adds in a unit of time, lr times steps."""
        return self.temperature / self.n

    def log_likelihood(self, outputs: Tensor, y: Targets) -> Tensor:
        """Mean over the batch [M], which estimates the mean over all N targets.

        With weights it is sum w log p / sum w over the batch.
        """
        targets, _ = parted(y)
        each = self.likelihood.objective(outputs, targets)
        weight = target_weights(self.likelihood, y, each.shape[1:])
        weight = None if weight is None else weight.to(each.dtype)
        if weight is None:
            return each.mean(-1) if each.ndim == 2 else each.flatten(1).mean(-1)
        per_member = weight.ndim == each.ndim  # every member has its own weights
        total = weight.flatten(1).sum(-1) if per_member else weight.sum()
        total = total.clamp(min=torch.finfo(weight.dtype).tiny)
        return (each * weight).flatten(1).sum(-1) / total

    def with_gradient(self, outputs: Tensor, y: Targets) -> tuple[Tensor, Tensor]:
        """`log_likelihood` [M], and its gradient at the outputs [M, B, ..., C]."""
        targets, _ = parted(y)
        own = "with_gradient" in vars(type(self.likelihood))
        known = self.likelihood.with_gradient(outputs, targets) if own else None
        if known is None or target_weights(self.likelihood, y, known[0].shape[1:]) is not None:
            tree = {"outputs": outputs}
            (value,), pull = with_pullback(lambda t: [self.log_likelihood(t["outputs"], y)], tree)
            return value, pull([torch.ones_like(value)])["outputs"]
        each, gradient = known
        return each.flatten(1).mean(-1), gradient / each[0].numel()

    @property
    def has_weight_prior(self) -> bool:
        """Whether the prior has a gradient at the weights."""
        return not isinstance(self.prior, (Flat, FunctionalPrior))

    def add_prior(
        self,
        drive: Tree,
        weights: Tree,
        factor: Tensor | float,
        spans: Sequence[slice] | None = None,
    ) -> Tree:
        """drive + factor * gradient of log p(theta) / N; functional and flat priors add nothing.

        The result may reuse the memory of `drive`.
        """
        prior = self.prior
        if isinstance(prior, (Flat, FunctionalPrior)):
            return drive
        scales = self.prior_multiples(drive, factor)
        if scales is not None:
            return _add_multiples(drive, weights, scales)
        return add_scaled(drive, prior.score(weights), factor / self.n, spans)

    def prior_multiples(self, weights: Tree, factor: Tensor | float) -> list[float] | None:
        """For each tensor, the multiple of it that is factor * gradient of log p(theta) / N.

        None if the prior is not normal, or if the factor is on the device.
        """
        prior = self.prior
        if not isinstance(prior, (Gaussian, FanIn)) or isinstance(factor, Tensor):
            return None
        return [-factor / (self.n * prior.width(t) ** 2) for t in weights.values()]


def target_weights(likelihood: Likelihood, y: Targets, shape: torch.Size) -> Tensor | None:
    """Weight of every target [B, ...]: of its data point times that of the likelihood; None for 1.

    Args:
        likelihood: may give weights to classes, and none to ignored labels.
        y: targets, perhaps `Weighted`: by data point [B], by target [B, ...], or by member and
            data point [M, B], which gives [M, B, ...].
        shape: of the log-likelihoods of one member [B, ...].
    """
    targets, weights = parted(y)
    weight = likelihood.weight(targets) if callable(likelihood.weight) else None
    if weights is None:
        return weight
    per_member = getattr(y, "per_member", False)
    if weights.ndim == 1 or per_member:
        missing = len(shape) + per_member - weights.ndim
        weights = weights.reshape(*weights.shape, *(1,) * missing)
        weights = weights.expand(*weights.shape[: weights.ndim - len(shape)], *shape)
    elif weights.shape != shape:
        raise DataError(
            f"weights have shape {tuple(weights.shape)}; wanted one per data point, "
            f"({shape[0]},), or one per target, {tuple(shape)}"
        )
    return weights if weight is None else weights * weight


def point_weights(y: Targets) -> Tensor | None:
    """Weight of every data point [B]; a data point counts if any of its targets does."""
    weight = parted(y)[1]
    if weight is None or weight.ndim == 1:
        return weight
    return (
        weight.mean(0)
        if getattr(y, "per_member", False)
        else (weight != 0).flatten(1).any(1).to(weight)
    )


def initialised_from(likelihood: Likelihood, y: Targets, sites: torch.Size) -> Likelihood:
    """The likelihood at the start of a run on these targets, perhaps `Weighted`."""
    targets, weight = parted(y)
    if weight is None:
        return (
            likelihood.initialised_from(targets, len(sites))
            if sites
            else likelihood.initialised_from(targets)
        )
    return likelihood.initialised_from(targets, len(sites), weight)


def site_axes(sites: torch.Size) -> tuple[int, ...]:
    """Number of axes of sites as an argument; none without sites, which older classes expect."""
    return (len(sites),) if sites else ()


def as_points(likelihood: Likelihood, outputs: Tensor, y: Targets) -> tuple[Tensor, Tensor]:
    """Outputs [M, P, C] and targets [P, ...]: every site is a point, without ignored targets."""
    targets, _ = parted(y)
    sites, counted = outputs.ndim - 3, likelihood.counted(targets)
    if not sites and counted is None:
        return outputs, targets
    outputs, targets = outputs.flatten(1, -2), targets.flatten(0, sites)
    if counted is None:
        return outputs, targets
    kept = counted.flatten().nonzero().squeeze(-1)
    return outputs.index_select(1, kept.to(outputs.device)), targets[kept]


def total_weight(likelihood: Likelihood, y: Targets, sites: torch.Size) -> float:
    """Number of targets, or their total weight, for data points with these tokens or places."""
    shape = torch.Size([len(y), *sites])
    weight = target_weights(likelihood, y, shape)
    return shape.numel() if weight is None else float(weight.double().sum())


def _add_multiples(drive: Tree, weights: Tree, scales: list[float]) -> Tree:
    drives, thetas = list(drive.values()), [weights[name] for name in drive]
    if len(set(scales)) > 1:
        thetas, scales = list(mul_each(thetas, scales)), [1.0]
    return dict(zip(drive, add_into(drives, thetas, scales[0]), strict=True))


def functional_score(
    ensemble: Ensemble,
    posterior: Posterior,
    outputs: Tensor,
    x: Inputs,
    seed: int,
    step: int | Tensor,
    probabilities: bool = False,
) -> Tensor | None:
    """Gradient of log p(f) / N at the outputs [M, B, C]; None for a prior on the weights.

    With `probabilities`, of the density of softmax(f), at these.
    """
    prior = posterior.prior
    if not isinstance(prior, FunctionalPrior):
        return None
    start = key(seed, "prior", step, ensemble.device)
    seen = _places(ensemble, prior, outputs, start)
    draws = drawn_outputs(ensemble, prior.weights, prior.draws, x[seen], start)
    here = outputs[:, seen]
    if probabilities:
        here, draws = here.softmax(-1), draws.softmax(-1)
    flat = here.flatten(2), draws.flatten(2)  # all tokens or places of a data point
    score = prior.score_outputs(*flat, ensemble.alive).view_as(here) / posterior.n
    if isinstance(seen, slice):
        return score
    return torch.zeros_like(outputs).index_copy(1, seen, score)


def _places(
    ensemble: Ensemble, prior: FunctionalPrior, outputs: Tensor, start: Tensor
) -> Tensor | slice:
    """Data points of the batch that the Gaussian process uses: at most D / C.

    A network of D weights with C outputs can fit at most D / C data points freely. With more data
    points a process of full rank would count the same weights several times. With D / C data points
    and a linear network, the process equals the weight prior.
    """
    B, C = outputs.shape[1], outputs[0, 0].numel()
    weights = [sum(t[0].numel() for t in group.weights.values()) for group in ensemble.groups]
    points = max(min(weights) // C, 1)
    if not isinstance(prior, GaussianProcess) or points >= B:
        return slice(None)
    return uniform(hashed(start - 1), (B,)).argsort()[:points]


@torch.no_grad()
def drawn_outputs(
    ensemble: Ensemble,
    prior: WeightPrior,
    draws: int | None,
    x: Inputs,
    start: Tensor,
) -> Tensor:
    """Outputs of networks with weights drawn from a prior, `draws` of each architecture.

    With `draws` of None, as many as there are members. `start` seeds the draws.
    """
    outputs = []
    for index, group in enumerate(ensemble.groups):
        count = group.members if draws is None else draws
        # One member shows the shapes; members that live on the host are not on the device.
        like = {name: tensor[:1].detach().to(x.device) for name, tensor in group.weights.items()}
        weights = prior.draw(like, count, hashed(start + index))
        # A drawn network is untrained: its running statistics are the initial ones.
        buffers = {
            name: group.initial.get(name, tensor[0]).to(x.device).expand(count, *tensor.shape[1:])
            for name, tensor in group.buffers.items()
        }
        keys = torch.zeros(count, dtype=torch.int64, device=x.device)
        state = weights | buffers | dict.fromkeys(group.keys, keys)
        usual = default_runner([group], x.device)
        mapping = MemberRunner("loop") if group.must_loop else usual
        with evaluation_mode(group.skeleton) as skeleton, group.passing(group.shared) as shared:
            if group.derivatives is None:
                outputs.append(mapping(skeleton, state, x, False, shared))
                continue
            network = replace(group, weights=weights, buffers=buffers)
            shown = [MemberInputs(x, False)]
            outputs.append(network.run(shown, mapping, keys if group.keys else None)[0])
    return torch.cat(outputs)

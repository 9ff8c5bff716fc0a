"""Prior comparison: log evidence and NLL of learned priors, from point masses to Gaussians at zero.

Point masses at the maximum of the likelihood have the largest evidence of all priors, since
log ∫ L dπ ≤ max log L. Members are only near this maximum, so other priors can have more evidence
than point masses at the members. The comparison therefore has point masses at the members, and at
members whose last layers are moved to the maximum: no prior on the last layer has more evidence
than these. The other priors are Gaussians at the members, whose best width shows whether point
masses are too narrow; a flow on the last layer; and Gaussians at zero, the usual prior. The
evidence chooses one scale per layer. Laplace's method extrapolates a quadratic: far from the
maximum it is no bound, and a number above the maximum is not evidence.
"""

import math
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor, nn

from shoal.analysis.evidence.curvature import (
    Expansion,
    counted_sites,
    diagonal,
    features_of,
    last_layer,
    last_linear,
)
from shoal.analysis.evidence.flow import LastLayerLikelihood, fit_flow
from shoal.analysis.evidence.laplace import Centre, fit_laplace
from shoal.analysis.evidence.pointmass import log_evidence
from shoal.core.errors import ConfigError
from shoal.core.opaque import Opaque
from shoal.core.random import generator
from shoal.core.structure import Inputs
from shoal.data.dataset import Split
from shoal.engine.members.network_call import member_call
from shoal.inference.likelihoods import Likelihood
from shoal.inference.posterior import as_points
from shoal.prediction.predictive import Predictive

__all__ = [
    "FEW_POINTS",
    "MAXIMUM",
    "PriorComparison",
    "PriorResult",
    "at_maximum",
    "compare_priors",
]

MAXIMUM = "point masses at the maximum, last layer"

FEW_POINTS = 500
"""Data points for the curvature of all layers."""


@dataclass(frozen=True)
class PriorResult:
    """One learned prior.

    Attributes:
        name: name of the prior.
        log_evidence: log p(D) under the prior, or a lower bound.
        nll: NLL of the evaluation data with equal member weights; NaN without data.
        nll_posterior: NLL with members weighted by their evidence.
        scales: standard deviation of the prior in each layer, for Gaussians.
        centre: centre of Gaussians, "members" or "zero"; empty for other priors.
    """

    name: str
    log_evidence: float
    nll: float
    nll_posterior: float
    scales: dict[str, float] = field(default_factory=dict)
    centre: str = ""


@dataclass(frozen=True)
class PriorComparison:
    """The members and the data that priors are compared on.

    Attributes:
        modules: finite members as ordinary modules, in double precision.
        likelihood: likelihood of the outputs.
        train: data of the evidence.
        test: data of the NLL; None without any.
        log_likelihoods: log-likelihoods of the members [M].
        points: number of training data points for the curvature, scaled to all data; None for
            `FEW_POINTS`, and for at least 10 per weight in the last layer.
        draws: draws per component for predictions.
        flow_steps: training steps of the flow.
        seed: fixes all randomness.
    """

    modules: Sequence[nn.Module]
    likelihood: Likelihood
    train: Split
    test: Split | None
    log_likelihoods: Tensor
    points: int | None = None
    draws: int = 20
    flow_steps: int = 200
    seed: int = 0

    def point_masses(self) -> list[PriorResult]:
        """Point masses at the members."""
        x = None if self.test is None else self.test.x
        outputs = None if x is None else _stacked(self.modules, x)
        return [self._result("point masses", self.log_likelihoods, outputs)]

    def maximum(self) -> list[PriorResult]:
        """Point masses at members whose last layers maximise the likelihood."""
        self._check_points()
        pairs = [at_maximum(module, self.likelihood, self.train) for module in self.modules]
        outputs = None if self.test is None else _stacked([m for m, _ in pairs], self.test.x)
        return [self._result(MAXIMUM, torch.tensor([value for _, value in pairs]), outputs)]

    def last_layer(self) -> list[PriorResult]:
        """Gaussians on the last layer with full covariance, at the members and at zero."""
        return self._gaussians("last layer", self._last)

    def diagonal(self) -> list[PriorResult]:
        """Gaussians on all layers with independent weights, at the members and at zero."""
        return self._gaussians("all layers, diagonal", self._expanded(diagonal))

    def flow(self) -> list[PriorResult]:
        """A learned flow as prior on the last layer."""
        expansions = self._last
        zero = fit_laplace(expansions, "zero")
        target = LastLayerLikelihood.of(expansions, self.likelihood, self.train, self.seed)
        loc, scale = (tensor.float() for tensor in zero.posteriors())
        begin = float(zero.log_scales.exp())
        fit = fit_flow(target, loc, scale, begin, steps=self.flow_steps, seed=self.seed)
        outputs = None if self.test is None else self._flow_outputs(expansions, fit.draw)
        return [self._result("flow, last layer", fit.elbo, outputs)]

    @cached_property
    def _last(self) -> list[Expansion]:
        return self._expanded(last_layer)

    def _flow_outputs(self, expansions: Sequence[Expansion], draw: Callable) -> Tensor:
        assert self.test is not None
        c = draw(self.draws).double()
        outputs = [e.outputs(self.test.x, c[:, m] - e.theta) for m, e in enumerate(expansions)]
        return torch.cat(outputs)

    def _rows(self, build: Callable[..., Expansion]) -> Tensor | None:
        """Data points for the curvature; None for all.

        By default the curvature of the last layer, n d² products for n points and d weights, costs
        at most as much as its eigenvectors, about 10 d³.
        """
        size = self.points or FEW_POINTS
        if self.points is None and build is last_layer:
            _, layer = last_linear(self.modules[0], self.train.x[:1])
            size = max(size, 10 * sum(p.numel() for p in layer.parameters()))
        if size >= len(self.train):
            return None
        return torch.randperm(len(self.train), generator=generator(self.seed, "curvature"))[:size]

    def _check_points(self) -> None:
        if isinstance(self.train.x, Opaque):
            raise ConfigError(
                "learned priors need single data points, but these inputs are batch objects; "
                "compare priors on inputs in tensors"
            )

    def _expanded(self, build: Callable[..., Expansion]) -> list[Expansion]:
        self._check_points()
        rows = self._rows(build)
        expansions = [
            build(module, self.likelihood, self.train, float(value), rows)
            for module, value in zip(self.modules, self.log_likelihoods, strict=True)
        ]
        if len({len(expansion.theta) for expansion in expansions}) > 1:
            raise ConfigError(
                "learned priors need members with equally many weights; "
                "train one ensemble per architecture"
            )
        return expansions

    def _gaussians(self, where: str, expansions: list[Expansion]) -> list[PriorResult]:
        learned_priors = []
        places: dict[Centre, str] = {"members": "at the members", "zero": "at zero"}
        for centre, words in places.items():
            fitted = fit_laplace(expansions, centre)
            outputs = None
            if self.test is not None:
                source = generator(self.seed, "draws", where, centre)
                outputs = fitted.draws(self.test.x, self.draws, source)
            name = f"Gaussians {words}, {where}"
            result = self._result(name, fitted.log_evidences, outputs, fitted.scales)
            learned_priors.append(replace(result, centre=centre))
        return learned_priors

    def _result(
        self,
        name: str,
        each: Tensor,
        outputs: Tensor | None,
        scales: dict[str, float] | None = None,
    ) -> PriorResult:
        """Result from the log evidence of each component [M] and its draws [M * S, B, C]."""
        losses = (math.nan, math.nan)
        if outputs is not None and self.test is not None:
            share = len(outputs) // len(each)
            weights = each.softmax(0).repeat_interleave(share) / share
            losses = tuple(self._loss(outputs, w) for w in (None, weights))
        return PriorResult(name, log_evidence(each), losses[0], losses[1], scales or {})

    def _loss(self, outputs: Tensor, weights: Tensor | None) -> float:
        assert self.test is not None and self.test.y is not None
        outputs, y = as_points(self.likelihood, outputs, self.test.y)
        return -float(Predictive(outputs, self.likelihood, weights).log_prob(y).mean())


def at_maximum(
    module: nn.Module, likelihood: Likelihood, data: Split, steps: int = 500
) -> tuple[nn.Module, float]:
    r"""The member with the last layer that maximises the likelihood given its trunk, and log L.

    No prior π on the last layer has more evidence: $\log \int L \, dπ \le \max \log L$. L-BFGS
    finds the maximum from the member, until a step gains less than 1e-4 nats. It is global where
    -log L is convex in the outputs, as for classes and for normal noise of known width. Classes
    that the features separate have their largest likelihood, 1, at infinity.
    """
    module = deepcopy(module)
    _, layer = last_linear(module, data.x[:1])
    assert data.y is not None, "there is no likelihood of data without targets"
    phi, f = features_of(module, data.x)
    if layer.bias is not None:
        phi = torch.cat([phi, torch.ones_like(phi[..., :1])], -1)
    (inner,), (outputs,), y = counted_sites(likelihood, phi, f, data.y)
    # Orthonormal features make the problem well conditioned: f + Q c for the change Q c.
    Q, scales, axes = torch.linalg.svd(inner, full_matrices=False)
    kept = scales > 1e-9 * scales.max()
    root = math.sqrt(len(inner))
    Q, back = root * Q[:, kept], root * axes[kept] / scales[kept, None]
    c = Q.new_zeros(Q.shape[1], outputs.shape[1], requires_grad=True)
    optimizer = torch.optim.LBFGS(
        [c], max_iter=steps, max_eval=2 * steps, tolerance_grad=1e-9, tolerance_change=1e-4,
        history_size=20, line_search_fn="strong_wolfe",
    )  # fmt: skip

    def loss() -> Tensor:
        optimizer.zero_grad()
        value = -likelihood.log_prob((outputs + Q @ c)[None], y).sum()
        value.backward()
        return value

    optimizer.step(loss)
    with torch.no_grad():
        change = (back.mT @ c).mT
        layer.weight += change[:, : layer.in_features]
        if layer.bias is not None:
            layer.bias += change[:, -1]
    return module, -float(loss().detach())


def compare_priors(
    comparison: PriorComparison, tell: Callable[[str], None]
) -> tuple[list[PriorResult], dict[str, str]]:
    """Results of all available priors, largest evidence first, and reasons for missing priors."""
    learned_priors, missing = [], {}
    steps: dict[str, Callable[[], list[PriorResult]]] = {
        "point masses": comparison.point_masses,
        "point masses at the maximum": comparison.maximum,
        "Gaussians on the last layer": comparison.last_layer,
        "Gaussians on all layers": comparison.diagonal,
        "a flow on the last layer": comparison.flow,
    }
    for name, build in steps.items():
        try:
            learned_priors += build()
            tell(name)
        except ConfigError as error:
            missing[name] = str(error)
            tell(f"{name}: left out")
    return sorted(learned_priors, key=lambda result: -result.log_evidence), missing


def _stacked(modules: Sequence[nn.Module], x: Inputs) -> Tensor:
    with torch.no_grad():
        calls = [[member_call(module, part) for part in x.split(len(x))] for module in modules]
        return torch.stack([torch.cat(parts) for parts in calls])

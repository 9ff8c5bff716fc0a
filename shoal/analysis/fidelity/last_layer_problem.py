"""The last layer of a trained run as a problem with a posterior that can be sampled.

Given the trunk, the network is linear in the weights of its last layer: inputs are the features,
and the posterior of the weights is log-concave for classes and for known noise. Members with
adapters or trunks of their own have no common features. The trunk of member 0 then gives them, and
only predictions of the run can be compared with the posterior, not its weights.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from shoal.analysis.evidence.curvature import features_of, last_linear
from shoal.analysis.evidence.members import prior_of
from shoal.analysis.fidelity.problems import Problem
from shoal.core.errors import ConfigError
from shoal.core.opaque import Opaque
from shoal.core.random import generator
from shoal.core.structure import Inputs, parted
from shoal.data.dataset import Dataset, Split
from shoal.inference.likelihoods import (
    Categorical,
    Gaussian,
    HeteroscedasticGaussian,
    HomoscedasticGaussian,
    Likelihood,
)
from shoal.inference.priors import FanIn, FunctionalPrior
from shoal.inference.priors import Gaussian as GaussianPrior
from shoal.models.mlp import MLP
from shoal.prediction.predict import member_outputs

__all__ = ["Restricted", "last_layer_problem", "setting_of"]


@dataclass(frozen=True)
class Restricted:
    """The problem of some weights given the others, and what the run says about it.

    Attributes:
        problem: inputs and targets, with prior and likelihood of the run.
        outputs: outputs of the run's finite members at the inputs on and off the data [M, B, C].
        flat: the weights of the members in this problem [M, D]; None if other weights differ.
        name: name of the last layer, or what the directions of a subspace are.
        points: number of training points; fewer than `all_points` if a subset was asked for.
        all_points: number of training points of the run.
        off: name of the OOD set; empty without any.
        all_weights: trained weights of a member on a subspace; 0 for the last layer.
    """

    problem: Problem
    outputs: dict[str, Tensor]
    flat: Tensor | None
    name: str
    points: int
    all_points: int
    off: str
    all_weights: int = 0

    @property
    def weights(self) -> int:
        """D, number of weights of the problem."""
        return sum(math.prod(shape) for shape in self.problem.shapes)


@dataclass(frozen=True)
class Setting:
    """What every problem of a run has: data in the unit of the outputs, prior and predictions.

    Attributes:
        train: training inputs and targets.
        y: training targets in the unit of the outputs.
        truth: test targets in this unit.
        likelihood: the likelihood in this unit.
        prior: the weight prior of the run.
        places: test inputs, "on", and OOD inputs, "off".
        off: name of the OOD set; empty without any.
        finite: numbers of the finite members.
        module: the first of them.
        outputs: outputs of the finite members at the places [M, B, C].
    """

    train: Split
    y: Tensor
    truth: Tensor
    likelihood: Likelihood
    prior: FanIn | GaussianPrior
    places: dict[str, Any]
    off: str
    finite: list[int]
    module: nn.Module
    outputs: dict[str, Tensor]


def setting_of(run: Any, data: Dataset, points: int | None, inputs: int, seed: int) -> Setting:
    """What the problems of a run have in common; the arguments of `last_layer_problem`."""
    train, test = _subset(data.train, points, seed), data.test
    if test is None or test.y is None:
        raise ConfigError("fidelity compares predictions on test data; pass test=(x_test, y_test)")
    if isinstance(train.x, Opaque) or train.y is None:
        raise ConfigError("fidelity needs inputs and targets as arrays; pass data=(x, y)")
    finite = run.ensemble.alive.cpu().nonzero().flatten().tolist()
    if not finite:
        raise ConfigError("all members of the run diverged; train again")
    places = {"on": test.x[:inputs]}
    off = next(iter(data.ood), "")
    if off:
        places["off"] = data.ood[off].x[:inputs]
    likelihood, y, truth = _standard(run.likelihood, train.y, test.y[:inputs])
    outputs = {place: member_outputs(run.ensemble, x)[finite] for place, x in places.items()}
    module = run.ensemble.member(finite[0]).cpu().eval()
    return Setting(train, y, truth, likelihood, _prior(run), places, off, finite, module, outputs)


def last_layer_problem(
    run: Any, data: Dataset, points: int | None = None, inputs: int = 200, seed: int = 0
) -> Restricted:
    """The last layer of a run on its training data.

    Args:
        run: a run.
        data: training data, a test set, and optionally OOD sets, of which the first is used.
        points: number of training points; all by default.
        inputs: number of test and of OOD inputs at which predictions are compared.
        seed: fixes the chosen points.
    """
    setting = setting_of(run, data, points, inputs, seed)
    module, places = setting.module, setting.places
    name, layer = last_linear(module, setting.train.x[:1])
    if layer.bias is None:
        raise ConfigError(f"fidelity needs a last layer with a bias, and '{name}' has none")
    phi = {place: _features(module, x) for place, x in places.items()}
    x = _features(module, setting.train.x)
    empty = x[:0] if "off" not in phi else phi["off"]
    problem = Problem(
        "last layer", x, setting.y, phi["on"], empty, MLP(()), setting.likelihood, setting.prior,
        layer.out_features, setting.truth,
    )  # fmt: skip
    flat = _common_weights(run, setting.finite, places["on"][:8])
    return Restricted(problem, setting.outputs, flat, name, len(x), len(data.train), setting.off)


def _subset(train: Split, points: int | None, seed: int) -> Split:
    if points is None or points >= len(train) or train.y is None:
        return train
    chosen = torch.randperm(len(train), generator=generator(seed, "fidelity"))[:points]
    return Split(train.x[chosen], train.y[chosen])


def _features(module: nn.Module, x: Inputs) -> Tensor:
    if isinstance(x, Tensor) and x.is_floating_point():
        x = x.to(next(module.parameters()).dtype)
    phi, _ = features_of(module, x)
    if phi.ndim != 2:
        raise ConfigError("fidelity needs one target per data point, not tokens or places")
    return phi.float()


def _standard(likelihood: Likelihood, y: Any, truth: Any) -> tuple[Likelihood, Tensor, Tensor]:
    """Likelihood and targets in the unit of the outputs, with the noise that the run learned."""
    y, weight = parted(y)
    truth, _ = parted(truth)
    real = isinstance(likelihood, Gaussian | HomoscedasticGaussian | HeteroscedasticGaussian)
    assert y is not None and truth is not None, "both splits have targets"
    columns = 1 if y.ndim == 1 else y.shape[-1]
    if weight is not None or columns > 1 or not (real or type(likelihood) is Categorical):
        raise ConfigError(
            f"fidelity needs classes, or one column of real targets with normal noise, all of "
            f"weight 1, not {type(likelihood).__name__} with {columns} columns"
        )
    if not real:
        return likelihood, y, truth
    y, truth = y.flatten().double(), truth.flatten().double()
    if isinstance(likelihood, Gaussian):
        return likelihood, y.float(), truth.float()
    known = likelihood.learned
    if known is None:
        raise ConfigError("the run has not learned its noise yet; train it first")
    location, scale = known.location.cpu(), known.scale.cpu()
    y, truth = ((t - location) / scale for t in (y, truth))
    if isinstance(likelihood, HomoscedasticGaussian):
        assert known.variance is not None
        return Gaussian(float(known.variance.sqrt())), y.float(), truth.float()
    unit = {"location": torch.zeros(1).double(), "scale": torch.ones(1).double()}
    return HeteroscedasticGaussian().restored(unit), y.float(), truth.float()


def _prior(run: Any) -> FanIn | GaussianPrior:
    prior = prior_of(run.config)
    prior = prior.weights if isinstance(prior, FunctionalPrior) else prior
    if not isinstance(prior, FanIn | GaussianPrior):
        raise ConfigError(
            "fidelity needs a posterior, and the weight prior of this run is not known to be "
            "normal; train with prior='gaussian' or 'fan-in'"
        )
    return prior


def _common_weights(run: Any, finite: list[int], x: Inputs) -> Tensor | None:
    """Weights of all last layers [M, D] if all members compute the same features."""
    flat, first = [], None
    for index in finite:
        module = run.ensemble.member(index).cpu().eval()
        phi = _features(module, x)
        first = phi if first is None else first
        if phi.shape != first.shape or not torch.allclose(phi, first, rtol=1e-4, atol=1e-5):
            return None
        _, layer = last_linear(module, x[:1])
        flat.append(torch.cat([layer.weight.detach().flatten(), layer.bias.detach()]))
    return torch.stack(flat).float()

"""An ensemble as a model of BoTorch, for Bayesian optimisation.

from shoal.integrations.botorch import EnsembleSurrogate

model = EnsembleSurrogate(run)
acquisition = qLogExpectedImprovement(model, best_f=y.max())
candidate, _ = optimize_acqf(acquisition, bounds, q=1, num_restarts=4, raw_samples=64)
"""

import copy
import warnings
from typing import Any

import torch
from torch import Tensor

from shoal.core.errors import ConfigError
from shoal.core.optional import require
from shoal.inference.ensemble import Ensemble
from shoal.inference.likelihoods import Likelihood
from shoal.training.folder.run import Run
from shoal.training.stepper import Stepper

__all__ = ["EnsembleSurrogate"]

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # from BoTorch's imports
    _Base: Any = require("botorch.models.ensemble", extra="botorch").EnsembleModel


class EnsembleSurrogate(_Base):
    """A BoTorch `EnsembleModel` whose draws are the functions of the members.

    Each member gives its mean of the targets, in their units, without observation noise. The
    posterior is an `EnsemblePosterior`: its mean is that of the members, its variance is their
    epistemic variance. Gradients reach the inputs. The model keeps a copy of the members in
    double precision, which BoTorch's optimisers need.
    Balandat et al. (2020), arXiv 1910.06403.

    Args:
        source: a run, a stepper after its first step, or an ensemble with `likelihood`.
        likelihood: likelihood of an ensemble's outputs; a run has its own.
        weights: weights of the members [M]; None for equal weights.
        outputs: number of target columns.
    """

    def __init__(
        self,
        source: Run | Stepper | Ensemble,
        *,
        likelihood: Likelihood | None = None,
        weights: Tensor | None = None,
        outputs: int = 1,
    ) -> None:
        super().__init__(weights=weights)
        ensemble = source if isinstance(source, Ensemble) else source.ensemble
        likelihood = likelihood or getattr(source, "likelihood", None)
        if likelihood is None:
            raise ConfigError(
                "an ensemble does not say what its outputs mean; "
                "type EnsembleSurrogate(ensemble, likelihood=...)"
            )
        if "numbers" not in likelihood.about.kinds:
            raise ConfigError(f"BoTorch optimises numbers, but this is {likelihood.task}")
        # BoTorch's line search needs double precision; the caller's members stay as they are.
        copied = copy.deepcopy(ensemble).to(dtype=torch.float64).eval()
        # A list, since a Module would register the ensemble as its part.
        self._held = [copied, likelihood]
        self._num_outputs = outputs

    @property
    def batch_shape(self) -> torch.Size:
        """One model, not a batch of models."""
        return torch.Size()

    def forward(self, X: Tensor) -> Tensor:
        """Means of the members [..., M, n, K] at the inputs [..., n, d]."""
        ensemble, likelihood = self._held
        outputs = ensemble(X.flatten(0, -2).to(ensemble.device, torch.float64))
        means = likelihood.mean(outputs).to(X)
        return means.unflatten(1, X.shape[:-1]).movedim(0, -3)

"""The likelihood of the last layers of all members at once, as the flow wants it."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shoal.analysis.evidence.curvature import Expansion
from shoal.analysis.evidence.last_layer import features_of
from shoal.core.seeds import generator
from shoal.data.dataset import Split
from shoal.inference.likelihoods import Likelihood

__all__ = ["LastLayerLikelihood"]


@dataclass(frozen=True)
class LastLayerLikelihood:
    """log L of weights of the last layer, given in the eigenbasis of each member.

    Attributes:
        features: inputs of the last layer [M, N, F].
        y: targets.
        bases: eigenvectors [M, d, d].
        likelihood: what the outputs mean.
        outputs: C.
        batch: points in a step of training, scaled up to all.
        seed: of the batches.
    """

    features: Tensor
    y: Tensor
    bases: Tensor
    likelihood: Likelihood
    outputs: int
    batch: int
    seed: int

    @classmethod
    def of(
        cls, expansions: Sequence[Expansion], likelihood: Likelihood, data: Split, seed: int
    ) -> "LastLayerLikelihood":
        """In single precision, with the features of every member computed once."""
        found = [features_of(e.module, data.x) for e in expansions]
        bases = torch.stack([e.basis for e in expansions if e.basis is not None])
        features = torch.stack([phi for phi, _ in found]).float()
        y, C = data.y, found[0][1].shape[1]
        assert y is not None, "there is no likelihood of data without targets"
        y = y.float() if y.is_floating_point() else y
        return cls(features, y, bases.float(), likelihood, C, 256, seed)

    def __call__(self, c: Tensor, step: int | None) -> Tensor:
        N = len(self.y)
        index = torch.arange(N) if step is None or N <= self.batch else self._some(step)
        weights = torch.einsum("mde,sme->smd", self.bases, c)
        F = self.features.shape[-1]
        W = weights[..., : self.outputs * F].unflatten(-1, (self.outputs, F))
        f = torch.einsum("mbf,smcf->smbc", self.features[:, index], W)
        bias = weights[..., None, self.outputs * F :]
        f = f + bias if bias.shape[-1] else f
        return self.likelihood.log_prob(f, self.y[index]).sum(-1) * (N / len(index))

    def _some(self, step: int) -> Tensor:
        source = generator(self.seed, "flow batches", step)
        return torch.randint(len(self.y), (self.batch,), generator=source)

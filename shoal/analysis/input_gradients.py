"""How alike the members' input gradients are: do they use the same features of an input?"""

import torch
from torch import Tensor

from shoal.inference.ensemble import Ensemble
from shoal.inference.likelihoods import Likelihood
from shoal.inference.mapping import Mapping
from shoal.inference.watched import PassContext
from shoal.interaction.spaces import InputGradients, Normalised
from shoal.training.look import looked_at

__all__ = ["gradient_similarity"]

_CHUNK = 32


def gradient_similarity(
    ensemble: Ensemble, x: Tensor, y: Tensor, likelihood: Likelihood, target: str = "logit"
) -> Tensor:
    """Mean cosine between the input gradients of each pair of members [M, M].

    1 for members that use the same features everywhere, 0 for gradients at right angles.

    Args:
        ensemble: the members, looked at in evaluation mode.
        x: inputs [B, ...].
        y: their targets, which say whose output is differentiated.
        likelihood: what the outputs mean.
        target: see `InputGradients`.
    """
    space = Normalised(InputGradients(target), eps=1e-15)
    real = ensemble.dtype if x.is_floating_point() else None
    x, y = x.to(ensemble.device, real), y.to(ensemble.device)
    training = ensemble.training
    ensemble.train(False)
    total: Tensor | float = 0.0
    context = PassContext(mapping=Mapping("loop"))
    for batch in zip(x.split(_CHUNK), y.split(_CHUNK), strict=True):
        look = looked_at(ensemble, batch, likelihood, space, context, live=False)
        assert look.gradients is not None, "they were asked for"
        (unit,) = space({"gradients": look.gradients.detach()})
        total = total + torch.einsum("ibd,jbd->ij", unit.double(), unit.double())
    ensemble.train(training)
    return torch.as_tensor(total) / len(x)

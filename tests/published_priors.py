"""The functional prior of released code, and the draws that a step takes from it."""

import torch

import shoal
from shoal.core.random import hashed, key
from shoal.interaction.bandwidths import Median


def published_prior(std):
    return shoal.priors.FunctionSpace(
        weights=shoal.priors.Gaussian(std),
        estimator=shoal.estimators.SSGE(share=1.0, eta=0.01),
        bandwidth=Median(legacy=True),
        legacy=True,
    )


def drawn_outputs(module, x, count, std, seed, step):
    """Outputs of networks whose weights are drawn from the prior with the key of the step."""
    like = {name: p.detach().unsqueeze(0) for name, p in module.named_parameters()}
    start = hashed(key(seed, "prior", step))  # of the first and only group
    draws = shoal.priors.Gaussian(std).draw(like, count, start)
    rows = []
    for i in range(count):
        with torch.no_grad():
            for name, parameter in module.named_parameters():
                parameter.copy_(draws[name][i])
            rows.append(module(x))
    return torch.stack(rows)

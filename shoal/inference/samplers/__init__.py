"""Samplers: chains that draw from a density, all chains in one batch.

A sampler moves M chains [M, D] with the gradients of a log density. It keeps its state in tensors,
and takes its randomness from a seed and the step. So a resumed chain goes on bit for
bit. `shoal.draw` samples the posterior of networks, `shoal.sample` any density.
"""

from shoal.inference.samplers.hmc import HMC
from shoal.inference.samplers.langevin import SGHMC, SGLD
from shoal.inference.samplers.microcanonical import MCLMC
from shoal.inference.samplers.nuts import NUTS
from shoal.inference.samplers.plan import Plan
from shoal.inference.samplers.sampler import Clock, Density, Sampler, known_sampler, registry

__all__ = [
    "HMC", "MCLMC", "NUTS", "SGHMC", "SGLD", "Clock", "Density", "Plan", "Sampler",
    "known_sampler", "registry",
]  # fmt: skip

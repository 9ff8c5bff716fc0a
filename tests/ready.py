"""Repulsions with what they take from the training data filled in."""

import dataclasses

from shoal.interaction.axes import Inputs, fitted


def ready(repulsion, x):
    """The repulsion for members trained on x; one that takes nothing from it is left as it is."""
    if repulsion is None or repulsion.space.base != "gradients":
        return repulsion
    inputs = Inputs(lambda: iter(x.split(16)))
    return dataclasses.replace(repulsion, space=fitted(repulsion.space, inputs))

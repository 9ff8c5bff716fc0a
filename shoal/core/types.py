"""Symbols and shapes, used with the same letters in every docstring and variable name.

Sizes
    M  members of the ensemble           B  data points in a batch
    C  outputs of one member             N  data points in the whole training set
    S  sites of a space                  D  coordinates of one member at one site

Tensors
    theta  weights of the members, a dict of leaves [M, ...]
    z      coordinates of the members in a space, leaves [M, S, D]
    d2     squared distances [S, M, M]       h2  squared bandwidth [S, 1, 1]
    K      kernel matrix [M, M]              L   kernel Laplacian [S, M, M]
    mix    weights of the drives for each member [M, M], None for the identity
    push   B z, the repulsive force

The equation
    velocity_i = sum_j mix_ij grad log p(theta_j | D) / N - (T / N) strength J_i^T sum_j B_ij z_j
    velocity   = drive - push
"""

from collections.abc import Sequence

from torch import Tensor

__all__ = ["Leaves", "Tree"]

Tree = dict[str, Tensor]
"""Tensors stacked over members, [M, ...], named like the module's parameters."""

Leaves = Sequence[Tensor]
"""Coordinates of all members in a space: tensors [M, S, D], one per component of the space."""

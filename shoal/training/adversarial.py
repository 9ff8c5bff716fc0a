"""Adversarial training by the fast gradient sign method.

x' = x + ε sign(∇_x loss(x, y)); half of the likelihood comes from x and half from x', so that it
still counts N data points. The input gradient is taken from the backward pass that the clean batch
needs anyway. Goodfellow et al. (2015), arXiv 1412.6572; for ensembles Lakshminarayanan et al.
(2017), arXiv 1612.01474.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shoal.core.differentiate import pull_back
from shoal.core.errors import ConfigError, DataError
from shoal.core.tree import per_member
from shoal.core.types import Tree

__all__ = ["Adversarial"]


@dataclass(frozen=True)
class Adversarial:
    """Worst-case neighbours of the training inputs.

    Attributes:
        epsilon: size of the change of every coordinate, in units of x; published: 1 % of its range.
        shared: one neighbour for all members, from the sum of their losses, as in released code for
            repulsive ensembles; otherwise every member has its own.
    """

    epsilon: float = 0.01
    shared: bool = False

    def __post_init__(self) -> None:
        if not self.epsilon > 0:
            raise ConfigError(f"adversarial epsilon must be positive, not {self.epsilon}")

    def watch(self, x: Tensor, members: int) -> Tensor:
        """A copy of the inputs for each member [M, B, ...] whose gradient is recorded."""
        if not x.is_floating_point():
            raise DataError("adversarial training needs real inputs, not integers")
        return x.expand(members, *x.shape).detach().requires_grad_()

    def pull_back(
        self,
        values: Sequence[Tensor],
        cotangents: Sequence[Tensor],
        data: Tensor | None,
        weights: Tree,
        x: Tensor,
    ) -> tuple[Tree, Tensor]:
        """J^T cotangents at the weights, and the gradient of the log likelihood at the inputs.

        The outputs are the first of the values. `data` is the likelihood's part of their cotangent
        where there is more in it (repulsion, a functional prior): then the inputs need a reverse
        pass of their own.
        """
        if data is None:
            velocity = pull_back(values, cotangents, weights | {"": x})
            return velocity, velocity.pop("")
        at_inputs = pull_back(values[0], data, {"": x}, keep_graph=True)[""]
        return pull_back(values, cotangents, weights), at_inputs

    def neighbours(self, x: Tensor, at_inputs: Tensor, alive: Tensor) -> Tensor:
        """x' [M, B, ...], or [B, ...] when shared."""
        told = per_member(alive, at_inputs) & at_inputs.isfinite()
        at_inputs = torch.where(told, at_inputs, 0.0)
        if self.shared:
            return x[0].detach() - self.epsilon * at_inputs.sum(0).sign()
        return x.detach() - self.epsilon * at_inputs.sign()

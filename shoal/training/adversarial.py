"""Adversarial training by the fast gradient sign method.

x' = x + ε sign(∇_x loss(x, y)). Half of the likelihood comes from x and half from x', so the
likelihood still counts N data points. The input gradient comes from the backward pass of the clean
batch. Goodfellow et al. (2015), arXiv 1412.6572; for ensembles Lakshminarayanan et al. (2017),
arXiv 1612.01474.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shoal.core.differentiate import pull_back
from shoal.core.errors import ConfigError, DataError
from shoal.core.structure import Inputs
from shoal.core.tree import per_member
from shoal.core.types import Tree
from shoal.engine.mesh import Mesh

__all__ = ["Adversarial"]


@dataclass(frozen=True)
class Adversarial:
    """Adversarial neighbours of the training inputs.

    Attributes:
        epsilon: change of every coordinate, in units of x; the paper uses 1 % of the range of x.
        shared: one neighbour for all members, from the sum of their losses, as in released code for
            repulsive ensembles. Otherwise every member has its own neighbour.
    """

    epsilon: float = 0.01
    shared: bool = False

    def __post_init__(self) -> None:
        if not self.epsilon > 0:
            raise ConfigError(f"adversarial epsilon must be positive, not {self.epsilon}")

    def watch(self, x: Inputs, members: int) -> Tensor:
        """One copy of the inputs per member [M, B, ...]; autograd records its gradient."""
        if not isinstance(x, Tensor) or not x.is_floating_point():
            raise DataError(
                "adversarial training needs real inputs, not integers or a structure; "
                "leave adversarial out"
            )
        return x.expand(members, *x.shape).detach().requires_grad_()

    def pull_back(
        self,
        values: Sequence[Tensor],
        cotangents: Sequence[Tensor],
        data: Tensor | None,
        weights: Tree,
        x: Tensor,
    ) -> tuple[Tree, Tensor]:
        """J^T cotangents at the weights, and the gradient of the log-likelihood at the inputs.

        The first of the values are the outputs. `data` is the likelihood's share of their
        cotangent, if repulsion or a functional prior adds to it. The inputs then need a backward
        pass of their own.
        """
        if data is None:
            velocity = pull_back(values, cotangents, weights | {"": x})
            return velocity, velocity.pop("")
        at_inputs = pull_back(values[0], data, {"": x}, keep_graph=True)[""]
        return pull_back(values, cotangents, weights), at_inputs

    def neighbours(
        self, x: Tensor, at_inputs: Tensor, alive: Tensor, mesh: Mesh | None = None
    ) -> Tensor:
        """x' [M, B, ...], or [B, ...] when shared by the members of all processes."""
        told = per_member(alive, at_inputs) & at_inputs.isfinite()
        at_inputs = torch.where(told, at_inputs, 0.0)
        if self.shared:
            total = at_inputs.sum(0)
            total = total if mesh is None else mesh.add([total], "adversarial")[0]
            return x[0].detach() - self.epsilon * total.sign()
        return x.detach() - self.epsilon * at_inputs.sign()

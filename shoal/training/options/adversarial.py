"""Adversarial training by the fast gradient sign method.

x' = x + ε sign(∇_x loss(x, y)). Half of the likelihood comes from x and half from x', so the
likelihood still counts N data points. The input gradient comes from the backward pass of the clean
batch. Goodfellow et al. (2015), arXiv 1412.6572; for ensembles Lakshminarayanan et al. (2017),
arXiv 1612.01474.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from shoal.core.arguments import check_fields, flag, positive
from shoal.core.differentiate import pull_back
from shoal.core.errors import ConfigError, DataError
from shoal.core.registry import later_field, unstored_field
from shoal.core.structure import Inputs
from shoal.core.tree import per_member
from shoal.core.types import Tree

__all__ = ["Adversarial"]


@dataclass(frozen=True)
class Adversarial:
    """Adversarial neighbours of the training inputs.

    Attributes:
        epsilon: change of every coordinate, in units of x.
        shared: one neighbour for all members, from the sum of their losses, as in released code for
            repulsive ensembles. Otherwise every member has its own neighbour.
        joined: the neighbours join the batch, as in released code: members are compared there too,
            and a functional prior acts there. The recorded loss is that of all 2 B points.
        relative: epsilon is a share of the range of each coordinate in the training data; 0.01 in
            Lakshminarayanan et al. (2017). A constant coordinate does not change.
        ranges: range of each coordinate; `fitted` finds it.
    """

    epsilon: float = 0.01
    shared: bool = False
    joined: bool = later_field(False)
    relative: bool = later_field(False)
    ranges: Tensor | None = unstored_field()

    def __post_init__(self) -> None:
        if self.joined and not self.shared:
            raise ConfigError(
                "members share the adversarial neighbours that join a batch; set shared=true"
            )
        check_fields(self, epsilon=positive, shared=flag, joined=flag, relative=flag)

    def fitted(self, x: Any) -> "Adversarial":
        """With the ranges of the training inputs x [N, ...]; unchanged unless `relative`.

        >>> Adversarial(relative=True).fitted(torch.tensor([[0.0, 5.0], [2.0, 5.0]])).ranges
        tensor([2., 0.])
        """
        if not self.relative:
            return self
        _check_real(x)
        low, high = x.aminmax(dim=0)
        return replace(self, ranges=high - low)

    @property
    def _size(self) -> float | Tensor:
        if not self.relative:
            return self.epsilon
        if self.ranges is None:
            raise ConfigError(
                "a relative adversarial epsilon needs the range of the training inputs; "
                "type: Adversarial(relative=True).fitted(x)"
            )
        return self.epsilon * self.ranges

    def watch(self, x: Inputs, members: int) -> Tensor:
        """One copy of the inputs per member [M, B, ...]; autograd records its gradient."""
        _check_real(x)
        assert isinstance(x, Tensor)
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
        self,
        x: Tensor,
        at_inputs: Tensor,
        alive: Tensor,
        total: Callable[[list[Tensor], str], list[Tensor]] = lambda sums, _: sums,
    ) -> Tensor:
        """x' [M, B, ...], or [B, ...] when shared by all members; `total` sums over all of them."""
        known = per_member(alive, at_inputs) & at_inputs.isfinite()
        at_inputs = torch.where(known, at_inputs, 0.0)
        if self.shared:
            (direction,) = total([at_inputs.sum(0)], "adversarial")
            return x[0].detach() - self._size * direction.sign()
        return x.detach() - self._size * at_inputs.sign()


def _check_real(x: Any) -> None:
    if not isinstance(x, Tensor) or not x.is_floating_point():
        raise DataError(
            "adversarial training needs real inputs, not integers or a structure; "
            "leave adversarial out"
        )

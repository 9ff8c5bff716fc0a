"""The cost of axes of wide inputs, which the prices of a search leave out.

The prices of `auto_plan` hold for networks that cost more than the axes of their inputs. The axes
of wide inputs cost more than a small network, such as a linear layer on features.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from shoal.engine.members.member_runner import MemberRunner
from shoal.inference.ensemble import Ensemble
from shoal.interaction.axes import EXACT, RANK, needs_data
from shoal.interaction.methods import METHODS
from shoal.training.loop.validation import Data
from shoal.training.search.plan import Arm

__all__ = ["MOST", "axes_price", "too_costly"]

MOST = 20.0
"""Arms whose axes cost more, in steps of the plain ensemble, are left out of a search."""


def axes_price(ensemble: Ensemble, x: Tensor) -> float:
    """Time that axes of input gradients add to a step, in steps of the plain ensemble.

    A plain step takes three times the F operations of a forward pass. A gradient of D coordinates
    is turned to R axes and back, which takes 4 D R.

    Args:
        ensemble: the members.
        x: inputs [B, ...].
    """
    one = ensemble.slice_members(0, 1).without_side_effects()
    random = torch.random.fork_rng(devices=[x.device] if x.is_cuda else [])
    with torch.no_grad(), random, FlopCounterMode(display=False) as counter:
        one(x, MemberRunner("loop"))
    return _price(x, counter.get_total_flops() / len(x))


def too_costly(arms: Sequence[Arm], ensemble: Ensemble, batches: Data) -> dict[str, str]:
    """Why arms are left out, by their labels."""
    turned = [arm for arm in arms if arm.method and _has_axes(arm.method)]
    x = batches.first()[0] if turned else None
    # The first count in a process takes seconds: torch imports its compiler. A bound mostly does.
    if not isinstance(x, Tensor) or _price(x, _least(ensemble)) <= MOST:
        return {}
    if (price := axes_price(ensemble, x)) <= MOST:
        return {}
    why = f"left out: on inputs this wide a step takes about as long as {price:.0f} plain steps"
    return {arm.label: why for arm in turned}


def _price(x: Tensor, forward: float) -> float:
    D = x[0].numel()
    return 4 * D * (D if D <= EXACT else RANK) / (3 * max(forward, 1.0))


def _least(ensemble: Ensemble) -> int:
    """Operations of a forward pass per data point, at least: it applies every matrix once."""
    one = ensemble.slice_members(0, 1).weights.values()
    return 2 * sum(tensor.numel() for tensor in one if tensor.ndim > 2)


def _has_axes(method: str) -> bool:
    repulsion = METHODS[method].repulsion
    return repulsion is not None and needs_data(repulsion.space)

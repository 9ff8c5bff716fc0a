"""What the arms of a search cost that the table of prices does not know.

The prices of `auto_plan` are those of networks that cost more than the axes of their inputs. On
wide inputs and a small network, such as a linear layer on features, the axes cost more.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from shoal.core.structure import Inputs
from shoal.engine.member_runner import MemberRunner
from shoal.inference.ensemble import Ensemble
from shoal.inference.offloaded import copied_to_device
from shoal.interaction.axes import EXACT, RANK, needs_data
from shoal.interaction.methods import METHODS
from shoal.training.auto_plan import Arm

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
    part = ensemble.slice_members(0, 1)
    one = (part if part.offload is None else copied_to_device(part)).aside()
    random = torch.random.fork_rng(devices=[x.device] if x.is_cuda else [])
    with torch.no_grad(), random, FlopCounterMode(display=False) as counter:
        one(x, MemberRunner("loop"))
    forward = max(counter.get_total_flops() / len(x), 1.0)
    D = x[0].numel()
    return 4 * D * (D if D <= EXACT else RANK) / (3 * forward)


def too_costly(arms: Sequence[Arm], ensemble: Ensemble, x: Inputs) -> dict[str, str]:
    """Why arms are left out, by their labels."""
    turned = [a for a in arms if a.method and _has_axes(a.method)]
    if not turned or not isinstance(x, Tensor):
        return {}
    price = axes_price(ensemble, x)
    if price <= MOST:
        return {}
    why = f"left out: on inputs this wide a step takes about as long as {price:.0f} plain steps"
    return {arm.label: why for arm in turned}


def _has_axes(method: str) -> bool:
    repulsion = METHODS[method].repulsion
    return repulsion is not None and needs_data(repulsion.space)

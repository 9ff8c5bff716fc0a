"""Notices what a step asks the host, on a machine without a GPU."""

import traceback

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from shoal.inference import network_pass as watched
from shoal.interaction import cloud

ASKS = ("_local_scalar_dense", "nonzero", "masked_select", "lift_fresh", "linalg_eigh", "unique")
"""Operations that wait for a device, make sizes of data, or copy numbers from the host."""


class Questions(TorchDispatchMode):
    """Remembers where the host was asked."""

    def __init__(self):
        super().__init__()
        self.asked = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = str(func)
        chosen = args[1] if name.startswith("aten.index.") else ()
        by_mask = any(t is not None and t.dtype == torch.bool for t in chosen)
        if by_mask or any(word in name for word in ASKS):
            self.asked.append((name, traceback.format_stack()[-4:-1]))
        return func(*args, **(kwargs or {}))


def as_on_a_gpu(monkeypatch):
    """Fast second derivatives, and none of the looks that cost nothing on a CPU."""
    choose = watched.twice_differentiable
    monkeypatch.setattr(watched, "twice_differentiable", lambda mapping, _: choose(mapping, True))

    def of_living(leaf, alive, centred):
        leaf = torch.where(alive[:, None, None], leaf, 0.0)
        return leaf - leaf.sum(0, keepdim=True) / alive.sum().clamp(min=1) if centred else leaf

    monkeypatch.setattr(cloud, "of_finite", of_living)

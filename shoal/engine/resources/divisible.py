"""Whether replicas can divide a batch: which networks treat each row by itself.

Batch normalisation and dropout are no obstacle (`shoal.engine.derivatives.replicas`). Other buffers
that a pass may write are one, and so is a network that mixes rows, or whose dropout does not begin
with the rows. Two small passes of one member show the latter.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import TorchFunctionMode

from shoal.engine.members.group import Group
from shoal.engine.members.layers import KeyedDropout
from shoal.engine.members.network_call import call_network, selected_output
from shoal.engine.members.stack import evaluation_mode

__all__ = ["treats_rows_alone"]

FEW = 2
"""Rows of the first small pass; the second pass has one more row."""


def treats_rows_alone(groups: Sequence[Group], x: Tensor) -> bool:
    """Whether members can run some rows [b, ...] of a batch [B, ...] without the others."""
    return len(x) > FEW and all(_known(group, x) for group in groups)


def _known(group: Group, x: Tensor) -> bool:
    """The answer for one architecture, found once per kind of input."""
    answers = group.skeleton.__dict__.setdefault("_shoal_divisible", {})
    case = group.skeleton.training, x.shape[1:], x.dtype
    if case not in answers:
        answers[case] = _keeps_known_buffers(group) and _same_by_rows(group, x)
    return answers[case]


def _keeps_known_buffers(group: Group) -> bool:
    """Whether a pass writes to no private buffers but those of plain batch normalisation."""
    layers = dict(group.skeleton.named_modules())
    if any(isinstance(layer, _BatchNorm) and not _is_plain(layer) for layer in layers.values()):
        return False
    weights = dict(group.prototype.named_parameters())
    return all(
        name in weights or _is_plain(layers[name.rpartition(".")[0]]) for name in group.buffers
    )


def _is_plain(layer: nn.Module) -> bool:
    return isinstance(layer, _BatchNorm) and type(layer).forward is _BatchNorm.forward


def _same_by_rows(group: Group, x: Tensor) -> bool:
    """Whether one more row leaves the outputs of the others, and lengthens every dropout mask."""
    try:
        less, shorter = _small_pass(group, x[:FEW])
        more, longer = _small_pass(group, x[: FEW + 1])
    except Exception:  # the step itself reports the error with its reason
        return False
    if len(less) != FEW or len(more) != FEW + 1 or len(shorter) != len(longer):
        return False
    if not all(_lengthened(a, b) for a, b in zip(shorter, longer, strict=True)):
        return False
    scale = 1e-3 * float(less.nan_to_num(0, 0, 0).abs().max())
    return torch.allclose(more[:FEW], less, rtol=1e-3, atol=scale, equal_nan=True)


def _lengthened(short: torch.Size, long: torch.Size) -> bool:
    """Whether the first axis has a number of entries per row, and no other axis has."""
    return short[1:] == long[1:] and short[0] * (FEW + 1) == long[0] * FEW


class _NotNormalised(TorchFunctionMode):
    """Without batch normalisation, which may mix rows in evaluation mode too."""

    def __torch_function__(
        self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        """Return the input of batch normalisation, and call all other functions."""
        if func is F.batch_norm:
            return args[0] if args else (kwargs or {})["input"]
        return func(*args, **(kwargs or {}))


def _small_pass(group: Group, x: Tensor) -> tuple[Tensor, list[torch.Size]]:
    """Outputs of the first member in evaluation mode, and the shapes that its dropout met."""
    module, met = group.skeleton, []

    def note(_: nn.Module, inputs: tuple[Any, ...]) -> None:
        met.append(inputs[0].shape)

    layers = [layer for layer in module.modules() if isinstance(layer, KeyedDropout)]
    hooks = [layer.register_forward_pre_hook(note) for layer in layers]
    generators = [x.device] if x.is_cuda else []
    tensors, buffers = group.first_member(), dict(group.prototype.named_buffers())
    tensors |= {name: tensors[name].clone() for name in buffers if name in tensors}
    try:
        fork = torch.random.fork_rng(devices=generators)
        with fork, torch.no_grad(), evaluation_mode(module), _NotNormalised():
            outputs = call_network(module, tensors, group.taken(x))
            return selected_output(module, outputs), met
    finally:
        for hook in hooks:
            hook.remove()

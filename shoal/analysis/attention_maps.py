r"""Where the members look: class-activation maps at every size of the image inside the network.

With A the last activations of a size, of which each channel c is weighed by the mean gradient of
the class's output,

$$ map = \max(0, \sum_c w_c A_c), \qquad w_c = \mathrm{mean}_{space} \; ∂ output_y / ∂ A_c. $$

Members that look at different places have maps of little overlap; one minus the mean cosine of the
maps of two members is a number for it. Selvaraju et al. (2017), arXiv 1610.02391.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from shoal.core.errors import DataError
from shoal.inference.ensemble import Ensemble

__all__ = ["AttentionMaps", "attention_maps", "overlap"]

Size = tuple[int, int]


@dataclass(frozen=True, eq=False)
class AttentionMaps:
    """Maps of all members at several depths.

    Attributes:
        maps: by size of the map in the order of depth, [M, B, height, width], each at most 1.
    """

    maps: dict[Size, Tensor]

    @property
    def diversity(self) -> dict[Size, float]:
        """One minus the mean cosine between the maps of two members, at each depth."""
        return {size: 1 - _others(overlap(maps)) for size, maps in self.maps.items()}


def attention_maps(ensemble: Ensemble, x: Tensor, y: Tensor) -> AttentionMaps:
    """Maps of every member for images x [B, C, H, W] and the classes y [B] they are asked about.

    A depth is the last layer at one size of the image; where members are of several architectures,
    those sizes count that all of them have.
    """
    if x.ndim != 4:
        raise DataError(f"class-activation maps need images [B, C, H, W], not {tuple(x.shape)}")
    x = x.to(ensemble.device, ensemble.dtype)
    y = y.to(ensemble.device)
    found = [_maps(ensemble.member(i).eval(), x, y) for i in range(ensemble.members)]
    common = [size for size in found[0] if all(size in maps for maps in found)]
    if not common:
        raise DataError("the networks have no layer whose outputs are still images")
    return AttentionMaps({size: torch.stack([maps[size] for maps in found]) for size in common})


def overlap(maps: Tensor) -> Tensor:
    """Mean over images of the cosine between the maps of each pair of members [M, M].

    An empty map points nowhere: images for which one of the two is empty do not count.
    """
    flat = maps.flatten(2).double()
    norms = flat.norm(dim=-1)
    products = torch.einsum("ibd,jbd->ijb", flat, flat)
    lengths = torch.einsum("ib,jb->ijb", norms, norms)
    known = lengths > 0
    cosines = torch.where(known, products / torch.where(known, lengths, 1.0), 0.0)
    return cosines.sum(-1) / known.sum(-1).clamp(min=1)


def _others(matrix: Tensor) -> float:
    M = len(matrix)
    return float((matrix.sum() - matrix.diagonal().sum()) / max(M * (M - 1), 1))


def _maps(module: nn.Module, x: Tensor, y: Tensor) -> dict[Size, Tensor]:
    last: dict[Size, Tensor] = {}

    def note(_: nn.Module, inputs: tuple, output: object) -> None:
        if isinstance(output, Tensor) and output.ndim == 4 and output.shape[2:].numel() > 1:
            last[output.shape[2], output.shape[3]] = output

    hooks = [layer.register_forward_hook(note) for layer in module.modules()]
    with torch.enable_grad():
        outputs = module(x)
    for hook in hooks:
        hook.remove()
    if not last:
        return {}
    score = outputs.gather(-1, y[:, None]).sum()
    gradients = torch.autograd.grad(score, list(last.values()), allow_unused=True)
    pairs = zip(last.items(), gradients, strict=True)
    return {size: _map(A, g) for (size, A), g in pairs if g is not None}


def _map(activations: Tensor, gradient: Tensor) -> Tensor:
    weights = gradient.mean((2, 3), keepdim=True)
    raw = (weights * activations).sum(1).clamp(min=0).detach()
    top = raw.amax((1, 2), keepdim=True)
    return raw / torch.where(top > 0, top, 1.0)

r"""Repulsion between the weights of members that are not all on the device, column by column.

The Gram matrix of the centred weights is a sum over columns, $G = \sum_c z_c z_c^T$, and so the
columns of all members visit the device strip by strip. Another pass over the strips adds the push,
$v_c = \sum_j mix_{ij} drive_{jc} - scale \sum_j B_{ij} z_{jc}$. Both are exact.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shoal.core.tree import finite, rows
from shoal.core.types import Tree
from shoal.engine.resources.offload import Offload
from shoal.interaction.cloud import Cloud, of_finite
from shoal.interaction.repulsion import Interaction, Repulsion, interact_in, is_centred

__all__ = ["WeightColumns", "all_finite"]

_NARROWEST = 256
"""Fewest columns of a strip: shorter pieces of memory are slow to copy."""

Piece = tuple[str, int, int]
"""Name of a tensor, first column and last."""


@dataclass(frozen=True, eq=False)
class WeightColumns:
    """The weights of all members on the host, in strips of columns.

    Attributes:
        offload: brings the strips to the device.
        repulsion: the repulsion, in the space of all weights.
        ensembles: the weights of the members, those of frozen members first.
    """

    offload: Offload
    repulsion: Repulsion
    ensembles: Sequence[Tree]

    def interaction(self, alive: Tensor) -> Interaction:
        """The matrices of the repulsion between finite members."""
        centred, gram = is_centred(self.repulsion), None
        strips = self._strips()
        visits = self.offload.visit([_views(strip, self.ensembles) for strip in strips])
        for strip, copies in zip(strips, visits, strict=True):
            leaves = [leaf.unsqueeze(1) for leaf in _together(copies, len(strip))]
            here = Cloud.of(leaves, alive, centred).gram
            gram = here if gram is None else gram + here
        assert gram is not None, "members have weights"
        return interact_in(self.repulsion, Cloud([], gram, alive))

    def add_push(
        self,
        interaction: Interaction,
        drives: Sequence[Tree],
        living: Tensor,
        scale: float,
    ) -> tuple[Tensor, Tensor]:
        """Mix the drives of the last ensemble and add the push, in place on the host.

        Args:
            interaction: the matrices.
            drives: the drives of each ensemble; only the last, if drives are not mixed.
            living: which members have finite drives [M].
            scale: factor of the push.

        Returns:
            Norms of drive and push of each member of the last ensemble.
        """
        moved, count = drives[-1], len(next(iter(self.ensembles[-1].values())))
        trained, centred = slice(-count, None), is_centred(self.repulsion)
        B = interaction.B[0, trained]
        mix = None if interaction.mix is None else interaction.mix[trained]
        strips, squares = self._strips(), torch.zeros(count, device=B.device, dtype=B.dtype)
        trees = [*self.ensembles, *drives]
        visits = self.offload.visit([_views(strip, trees) for strip in strips])
        for strip, copies in zip(strips, visits, strict=True):
            split = len(self.ensembles) * len(strip)
            coordinates = _together(copies[:split], len(strip))
            forces = _together(copies[split:], len(strip))
            for (name, a, b), z, force in zip(strip, coordinates, forces, strict=True):
                if mix is not None:
                    force = mix.to(force) @ torch.where(living[:, None], force, 0.0)
                squares += force.square().sum(1)
                z = of_finite(z.unsqueeze(1), interaction.cloud.alive, centred)[:, 0]
                velocity = torch.addmm(force, B.to(force), z, alpha=scale)
                self.offload.store(rows(moved[name])[:, a:b], velocity)
        lengths = interaction.lengths
        if lengths is None:
            lengths = (B @ interaction.cloud.gram[0] * B).sum(1).clamp(min=0).sqrt()
        else:
            lengths = lengths[trained]
        return squares.sqrt(), abs(scale) * lengths

    def _strips(self) -> list[list[Piece]]:
        """Columns that take as much memory as one block of members."""
        first = self.ensembles[0]
        widths = {name: tensor[0].numel() for name, tensor in first.items()}
        members = sum(len(next(iter(tree.values()))) for tree in self.ensembles)
        most = max(self.offload.block * sum(widths.values()) // members, _NARROWEST)
        return list(_packed(widths, most))


def all_finite(weights: Tree) -> Tensor:
    """Which members have finite weights [M], by the sums of their tensors."""
    return finite(torch.stack([rows(tensor.detach()).sum(1) for tensor in weights.values()])).all(0)


def _packed(widths: dict[str, int], most: int) -> Iterator[list[Piece]]:
    strip, room = [], most
    for name, width in widths.items():
        start = 0
        while start < width:
            stop = min(start + room, width)
            strip.append((name, start, stop))
            room -= stop - start
            start = stop
            if not room:
                yield strip
                strip, room = [], most
    if strip:
        yield strip


def _views(strip: Sequence[Piece], trees: Sequence[Tree]) -> list[Tensor]:
    return [rows(tree[name].detach())[:, a:b] for tree in trees for name, a, b in strip]


def _together(copies: Sequence[Tensor], pieces: int) -> list[Tensor]:
    """Each piece with the rows of all trees, from the pieces of one tree after another."""
    each = [list(copies[piece::pieces]) for piece in range(pieces)]
    return [some[0] if len(some) == 1 else torch.cat(some) for some in each]

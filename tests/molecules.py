"""Small molecules: a batch object, a network of their distances, and its derivatives by a loop."""

import torch
from torch import Tensor, nn

from shoal.inference.ensemble import Ensemble


class Molecules:
    """Atoms of several molecules in one batch, in the form that graph libraries use."""

    def __init__(self, pos: Tensor, batch: Tensor, y: object = None) -> None:
        self.pos, self.batch, self.y = pos, batch, y

    def to(self, device: object) -> "Molecules":
        moved = [t.to(device) if isinstance(t, Tensor) else t for t in (self.pos, self.batch)]
        return Molecules(*moved, self.y)


class Potential(nn.Module):
    """The energy of a molecule: the sum over its pairs of a function of their distance."""

    def __init__(self) -> None:
        super().__init__()
        self.pair = nn.Sequential(nn.Linear(1, 6), nn.Tanh(), nn.Linear(6, 1))

    def forward(self, data: Molecules) -> Tensor:
        same = data.batch[:, None] == data.batch
        one, two = same.triu(1).nonzero().T
        distance = (data.pos[one] - data.pos[two]).square().sum(-1, keepdim=True).sqrt()
        energy = torch.zeros(int(data.batch.max()) + 1, 1, dtype=data.pos.dtype)
        return energy.index_add(0, data.batch[one], self.pair(distance))


def molecules(sizes: list[int], seed: int = 0) -> Molecules:
    random = torch.Generator().manual_seed(seed)
    pos = torch.randn(sum(sizes), 3, generator=random, dtype=torch.float64)
    return Molecules(pos, torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes)))


def labelled(data: Molecules) -> tuple[Tensor, Tensor]:
    """Energies of springs between all pairs of atoms [B], and the forces [A, 3]."""
    pos = data.pos.detach().clone().requires_grad_()
    pairs = (data.batch[:, None] == data.batch).triu(1).nonzero().T
    spring = 0.5 * ((pos[pairs[0]] - pos[pairs[1]]).norm(dim=-1) - 1).square()
    energy = torch.zeros(int(data.batch.max()) + 1, dtype=pos.dtype)
    energy = energy.index_add(0, data.batch[pairs[0]], spring)
    (gradient,) = torch.autograd.grad(energy.sum(), pos)
    return energy.detach(), -gradient


def gradients(network: nn.Module, x: Tensor, live: bool = False) -> tuple[Tensor, Tensor]:
    """Outputs [B, C] of one network and their derivatives [B, *x, C], one output at a time."""
    x = x.detach().clone().requires_grad_()
    outputs = network(x)
    each = [
        torch.autograd.grad(column.sum(), x, create_graph=live, retain_graph=True)[0]
        for column in outputs.unbind(-1)
    ]
    return outputs, torch.stack(each, -1)


def potentials(members: int = 2) -> Ensemble:
    return Ensemble.init(Potential, members).to(torch.float64)

"""Energies and forces of a committee beside a loop over modules: python benchmarks/derivatives.py

Eight SchNets of torch_geometric (hidden 128, 6 interactions) on 32 frames of 20 atoms. In turns: a
step of Adam on energies and forces, and the forces of one batch; by Shoal and by a loop over
ordinary modules. Prints milliseconds, the median of the rounds, their ratio, and the largest
difference of forces.
"""

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from common import finish, options, parser, title
from torch import Tensor, nn
from torch_geometric.nn import SchNet

import shoal
from shoal.integrations.ase import AtomsBatch
from shoal.prediction.predict import predict

CUTOFF, GAUSSIANS = 5.0, 50


class Network(nn.Module):
    """SchNet of torch_geometric with the neighbours that the data have.

    Schütt et al. (2017), arXiv 1706.08566.
    """

    def __init__(self, hidden: int, interactions: int) -> None:
        super().__init__()
        sizes = hidden, hidden, interactions, GAUSSIANS, CUTOFF
        self.schnet = SchNet(*sizes, interaction_graph=self._neighbours)

    def _neighbours(self, pos: Tensor, batch: Tensor) -> tuple[Tensor, Tensor]:
        i, j = self._edges
        return self._edges, (pos[j] - pos[i]).norm(dim=-1)

    def forward(self, data: Any) -> Tensor:
        """Energies [B, 1]."""
        self._edges = data.edge_index
        return self.schnet(data.z, data.pos, data.batch)


def frames(count: int, atoms: int, device: torch.device) -> tuple[AtomsBatch, tuple[Tensor, ...]]:
    """Random structures with their neighbours, energies and forces."""
    random = torch.Generator().manual_seed(0)
    pos = 6 * torch.rand(count, atoms, 3, generator=random)
    near = (torch.cdist(pos, pos) < CUTOFF) & ~torch.eye(atoms, dtype=torch.bool)
    frame, i, j = near.nonzero().T
    batch = AtomsBatch(
        z=torch.randint(1, 9, (count * atoms,), generator=random),
        pos=pos.flatten(0, 1),
        batch=torch.arange(count).repeat_interleave(atoms),
        cell=torch.zeros(count, 3, 3),
        edge_index=torch.stack([frame * atoms + i, frame * atoms + j]),
    )
    labels = torch.randn(count, generator=random), torch.randn(count * atoms, 3, generator=random)
    return batch.to(device), tuple(t.to(device) for t in labels)


def forces(module: nn.Module, batch: AtomsBatch, live: bool = False) -> tuple[Tensor, Tensor]:
    """Energies and forces of one module."""
    assert isinstance(batch.pos, Tensor)
    batch.pos = batch.pos.detach().requires_grad_()
    energy = module(batch)
    (slope,) = torch.autograd.grad(energy.sum(), batch.pos, create_graph=live)
    batch.pos = batch.pos.detach()
    return energy, -slope


def milliseconds(calls: dict[str, Callable[[], Any]], rounds: int, device: torch.device) -> dict:
    """The median of every call, in turns, after two rounds to warm up."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(rounds + 2):
        for name, call in calls.items():
            begun = time.perf_counter()
            call()
            if device.type == "cuda":
                torch.cuda.synchronize()
            if turn > 1:
                times[name].append(1e3 * (time.perf_counter() - begun))
    return {name: statistics.median(each) for name, each in times.items()}


def main() -> None:
    """Time both and compare their forces."""
    made = parser("Energies and forces of a committee beside a loop over modules.")
    made.add_argument("--members", type=int, default=8)
    made.add_argument("--frames", type=int, default=32)
    made.add_argument("--rounds", type=int, default=20)
    found = options(made)
    hidden, blocks = (16, 2) if found.quick else (128, 6)
    # Gaussians of distances are denormal numbers here and there, which processors multiply slowly.
    torch.set_flush_denormal(True)
    device, rounds = found.device, 3 if found.quick else found.rounds
    batch, (energy, target) = frames(found.frames, 20, device)
    members = shoal.Ensemble.init(lambda: Network(hidden, blocks), found.members).to(device)
    known = shoal.likelihoods.Gaussian()
    likelihood = shoal.likelihoods.WithDerivatives(known, of="pos", sign=-1)
    modules = [module.to(device) for module in members]
    pred = predict(members, [batch], likelihood=known, derivatives_of="pos")
    exact = torch.stack([forces(m, batch)[1] for m in modules]).cpu()
    difference = float((pred.derivatives.flatten(1, 2) + exact).abs().max())
    stepper = shoal.Stepper(members, n=found.frames, likelihood=likelihood, prior="flat")
    optimizers = [torch.optim.Adam(module.parameters(), lr=1e-3) for module in modules]

    def loop() -> None:
        for module, optimizer in zip(modules, optimizers, strict=True):
            value, slope = forces(module, batch, live=True)
            loss = (value[:, 0] - energy).square().sum() + (slope - target).square().sum()
            optimizer.zero_grad()
            (0.5 * loss / found.frames).backward()
            optimizer.step()

    steps = {"shoal": lambda: stepper((batch, (energy, target))), "loop": loop}
    rows = {"step": milliseconds(steps, rounds, device)}
    calls = {
        "shoal": lambda: predict(members, [batch], likelihood=known, derivatives_of="pos"),
        "loop": lambda: [forces(module, batch) for module in modules],
    }
    rows["prediction"] = milliseconds(calls, rounds, device)
    lines = [
        f"{name}: {row['shoal']:.1f} ms beside {row['loop']:.1f} ms of the loop, "
        f"{row['loop'] / row['shoal']:.2f} times as fast"
        for name, row in rows.items()
    ]
    sizes = {"members": found.members, "frames": found.frames, "atoms": 20, "hidden": hidden}
    value = {**title(device), **sizes, "milliseconds": rows, "largest_difference": difference}
    finish(value, "\n".join([*lines, f"largest difference of forces {difference:.2g}"]), found.out)


if __name__ == "__main__":
    main()

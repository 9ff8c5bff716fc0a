"""Distillation of an ensemble into one trunk with a head for each member.

Each head learns the prediction of its member, and its distance from the mean of the members. The
mutual information of the heads then stands for that of the members, and is smaller. Hydra: Tran et
al. (2020), arXiv 2001.04694. A Dirichlet student has fewer outputs but needs a likelihood of its
own: Malinin et al. (2020), arXiv 1905.00076.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shoal.analysis.evidence.members import log_probs
from shoal.core.errors import ConfigError
from shoal.data.dataset import Split
from shoal.engine.members.network_call import member_call
from shoal.engine.members.stack import copied
from shoal.inference.likelihoods import Likelihood
from shoal.inference.unrolled import UnrolledEnsemble
from shoal.prediction.predict import member_outputs

__all__ = ["distilled"]

_BATCH = 128


def distilled(
    run: Any, members: list[int], x: Any, held_out: Split, epochs: int, lr: float, seed: int
) -> list[nn.Module]:
    """One network per member; all share one frozen trunk, and differ in their last layer.

    Args:
        run: the run.
        members: the finite members.
        x: training inputs.
        held_out: data that choose the member whose trunk the students begin with.
        epochs: passes over the inputs.
        lr: learning rate.
        seed: seed of the order of the inputs.
    """
    ensemble = run.ensemble
    if len(ensemble.groups) > 1 or not isinstance(x, Tensor) or len(x) == 0:
        raise ConfigError(
            "distil needs members of one architecture and training inputs in one tensor; "
            "type by='greedy'"
        )
    teacher = member_outputs(ensemble, x)[members]
    best = members[int(log_probs(run, held_out)[members].mean(1).argmax())]
    networks = _students(ensemble.groups[0], best, len(members))
    _train(networks, x, teacher, run.likelihood, epochs, lr, seed)
    for network in networks:
        head = set(ensemble.groups[0].head)
        for name, parameter in network.named_parameters():
            parameter.requires_grad_(name in head)
    return networks


def _students(group: Any, best: int, count: int) -> list[nn.Module]:
    """Copies of the best member that hold the very same trunk."""
    found = list(UnrolledEnsemble([group], [best]).members)
    first, head = found[0], set(group.head)
    trunk = {id(p): p for name, p in first.named_parameters() if name not in head}
    trunk |= {id(b): b for b in first.buffers()}
    found += [copied(first, dict(trunk)) for _ in range(count - 1)]
    return found


def _train(
    networks: list[nn.Module],
    x: Tensor,
    teacher: Tensor,
    likelihood: Likelihood,
    epochs: int,
    lr: float,
    seed: int,
) -> None:
    """Minimise the mean difference of each student from its member, in evaluation mode."""
    parameters = {id(p): p.requires_grad_() for net in networks for p in net.parameters()}
    optimizer = torch.optim.Adam(parameters.values(), lr=lr)
    steps = epochs * -(-len(x) // _BATCH)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, max(steps, 1))
    scale = teacher.flatten(0, -2).std(0).clamp_min(1e-6)
    apart = _apart(teacher)
    spread = apart.square().mean().clamp_min(1e-12)
    random = torch.Generator().manual_seed(seed)
    for _ in range(epochs):
        for rows in torch.randperm(len(x), generator=random).split(_BATCH):
            students = torch.stack([member_call(network, x[rows]) for network in networks])
            loss = _difference(students, teacher[:, rows], likelihood, scale)
            loss = loss + (_apart(students) - apart[:, rows]).square().mean() / spread
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()


def _apart(outputs: Tensor) -> Tensor:
    """How far each member is from the mean of the members, the source of mutual information.

    The difference of whole predictions alone hardly sees it, where members nearly agree.
    """
    return outputs - outputs.mean(0)


def _difference(student: Tensor, teacher: Tensor, likelihood: Likelihood, scale: Tensor) -> Tensor:
    """KL(member | student) for classes; squared difference of standardised outputs otherwise."""
    kinds = likelihood.about.kinds
    if "binary" in kinds:
        return F.binary_cross_entropy_with_logits(student, teacher.sigmoid())
    if "classes" in kinds:
        wanted, found = likelihood.probs(teacher), likelihood.probs(student)
        return -(wanted * found.clamp_min(1e-12).log()).sum(-1).mean()
    return ((student - teacher) / scale).square().mean()

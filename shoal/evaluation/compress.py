"""`shoal.compress`: fewer members, or one trunk for all of them, and what it costs in NLL.

One half of the held-out data chooses, the other half judges: data that choose do not judge.

Distillation trains one trunk with a head for each member. Each head learns the prediction of its
member, and its distance from the mean of the members. The mutual information of the heads then
stands for that of the members, and is smaller. Hydra: Tran et al. (2020), arXiv 2001.04694. A
Dirichlet student has fewer outputs but needs another likelihood: Malinin et al. (2020), arXiv
1905.00076.
"""

import os
import warnings
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shoal.analysis.evidence.members import EvidenceSplits, log_probs, parts_of, stacking_weights
from shoal.core.arguments import checked, one_of, positive, share, whole
from shoal.core.display.text import counted
from shoal.core.errors import ConfigError, DataError, ShoalWarning
from shoal.data.batches.sources import gathered
from shoal.data.dataset import Dataset, Split
from shoal.engine.members.network_call import member_call
from shoal.engine.members.stack import copied
from shoal.evaluation.data_arguments import training_data
from shoal.inference.likelihoods import Likelihood
from shoal.inference.unrolled import UnrolledEnsemble
from shoal.prediction import Predictive, predict
from shoal.prediction.predict import member_outputs
from shoal.prediction.statistics import Difference
from shoal.training.adopt import adopt
from shoal.training.folder.own_data import data_name
from shoal.training.folder.run import Run, RunFolder, opened

__all__ = ["Compressed", "bootstrap_difference", "compress", "distilled", "greedy_choice"]


WAYS = ("greedy", "stacking", "distil")
_RESAMPLES = 2000


@dataclass(frozen=True)
class Compressed:
    """A smaller run, and its quality on data that did not choose it.

    Attributes:
        run: the smaller run; every function of Shoal takes it.
        by: "greedy", "stacking" or "distil".
        chosen: numbers of the kept members; all finite members for "distil".
        weights: weights of the kept members, for `predict` and `export`; None for equal weights.
        nll: NLL of the smaller run per target, on the judging data.
        before: NLL of the whole run with equal weights, on the same data.
        cost: `nll - before`, with a bootstrap interval over the judging data.
        mutual_information: mean mutual information of the whole run and of the smaller run.
        numbers: count of stored numbers of the whole run and of the smaller run.
        points: count of targets that judge.
        held_out: whether the data that choose and judge were held out from training.
    """

    run: Run
    by: str
    chosen: tuple[int, ...]
    weights: tuple[float, ...] | None
    nll: float
    before: float
    cost: Difference
    mutual_information: tuple[float, float]
    numbers: tuple[int, int]
    points: int
    held_out: bool = True

    def __str__(self) -> str:
        kept = ", ".join(map(str, self.chosen))
        what = f"members {kept}" if self.by != "distil" else "one trunk with a head per member"
        share = self.numbers[1] / self.numbers[0]
        return (
            f"{self.by} keeps {what}: {share:.0%} of the numbers. NLL is {self.nll:.4f} instead of "
            f"{self.before:.4f} on {counted(self.points, 'target')}"
            f"{'' if self.held_out else ' of the training data'}: a change of "
            f"{self.cost.difference:+.4f}, interval {self.cost.low:+.4f} to {self.cost.high:+.4f}."
        )


@checked(to=whole, by=one_of(*WAYS), level=share, epochs=whole, lr=positive)
def compress(
    run: Run | str | os.PathLike[str],
    to: int,
    *,
    by: str = "greedy",
    data: Any = None,
    test: Any = None,
    level: float = 0.95,
    epochs: int = 50,
    lr: float = 1e-3,
    seed: int = 0,
    out: str | Path | None = None,
) -> Compressed:
    """A run with fewer members at nearly the same quality.

    "greedy" adds the member that helps the equal-weight mixture most, then exchanges members while
    this helps (Caruana et al. 2004, doi 10.1145/1015330.1015432). "stacking" keeps the members of
    largest stacking weight and fits the weights again (Yao et al. 2018, arXiv 1704.02030).
    "distil" trains one trunk with a head for each member, which keeps part of the mutual
    information (Hydra: Tran et al. 2020, arXiv 2001.04694; compare Malinin et al. 2020, arXiv
    1905.00076).

    Args:
        run: a run or its folder.
        to: number of members to keep; 1 for "distil", which keeps one trunk.
        by: "greedy", "stacking" or "distil".
        data: the data of the run, if it cannot load its own: a `Dataset`, or a pair (x, y). The
            validation data choose and the test data judge. With one of them alone, every second
            point chooses, and the other points judge. A run in memory without held-out data is
            compressed on its training data, with a warning.
        test: held-out pair (x, y), in place of the test set of the data. A run whose data are not
            known needs nothing else, except for "distil".
        level: level of the bootstrap interval.
        epochs: passes over the training inputs, for "distil".
        lr: learning rate, for "distil".
        seed: seed of bootstrap and distillation.
        out: folder that stores the smaller run.
    """
    run = opened(run)
    finite = run.ensemble.alive.nonzero().flatten().tolist()
    _check(to, by, len(finite))
    known, parts = _splits(run, by, data, test)
    assert parts.held_out is not None and parts.test is not None
    weights = None
    if by == "distil":
        chosen = finite
        networks = distilled(run, chosen, parts.train.x, parts.held_out, epochs, lr, seed)
    else:
        table = log_probs(run, parts.held_out)
        chosen, weights = _chosen(table, to, by)
        networks = list(UnrolledEnsemble(run.ensemble.groups, chosen).members)
    small = _adopted(run, networks, known, out)
    done = _judged(run, small, by, chosen, weights, parts.test, level, seed)
    done = replace(done, held_out=parts.held_out_words != _TRAINING)
    return replace(done, run=_noted(done.run, str(done)))


_TRAINING = "every second training point"


def _splits(run: Run, by: str, data: Any, test: Any) -> tuple[Dataset | None, EvidenceSplits]:
    """The data set of the run, if it is known, and the splits that choose and judge."""
    dtype, known = run.ensemble.dtype, None
    with suppress(ConfigError) if data is None else nullcontext():
        known = training_data(run, data, test, dtype=dtype)
    if known is None and (test is None or by == "distil"):
        missing = [] if by != "distil" else ["data=(x, y)"]
        missing += [] if test is not None else ["test=(x_test, y_test)"]
        raise ConfigError(
            f"the data of this run are not known, and compress needs "
            f"{'the training inputs and ' if by == 'distil' else ''}held-out data; "
            f"type: shoal.compress(run, to, by={by!r}, {', '.join(missing)})"
        )
    if known is None:
        split = gathered(test, dtype)
        return None, _halves(Dataset(data_name(run.config), split, test=split))
    parts = parts_of(known)
    if parts.held_out is not None and parts.test is not None:
        return known, parts
    if known.validation is not None and known.test is None:
        return known, _halves(replace(known, test=known.validation, validation=None))
    if data is None and known.test is None and run.given is not None:
        warnings.warn(
            "this run has no held-out data, so training data choose and judge the members, and "
            "the NLL is too good; pass test=(x_test, y_test)",
            ShoalWarning,
            stacklevel=3,
        )
        halves = _halves(replace(known, test=known.train))
        return known, replace(halves, held_out_words=_TRAINING)
    raise DataError("compress needs held-out data to choose and to judge; pass test=(x, y)")


def _halves(data: Dataset) -> EvidenceSplits:
    """Every second test point chooses, and the others judge."""
    parts = parts_of(data)
    if parts.held_out is None or parts.test is None:
        raise DataError("compress needs two held-out points or more; pass test=(x, y)")
    return parts


def _check(to: int, by: str, members: int) -> None:
    if by == "distil" and to != 1:
        raise ConfigError(f"distil makes one trunk for all members; type to=1, not to={to}")
    if to > members:
        raise ConfigError(f"to must be a number of members from 1 to {members}, not {to!r}")


def _chosen(table: Tensor, to: int, by: str) -> tuple[list[int], tuple[float, ...] | None]:
    """Numbers of the kept members in order, and their weights."""
    if by == "greedy":
        return greedy_choice(table, to), None
    order = stacking_weights(table).argsort(descending=True, stable=True)
    chosen = sorted(order[:to].tolist())
    return chosen, tuple(stacking_weights(table[chosen]).tolist())


def greedy_choice(log_probs: Tensor, to: int) -> list[int]:
    r"""Members S that maximise $\sum_b \log \frac{1}{|S|} \sum_{m \in S} p_m(y_b)$, in order.

    Members are added one by one, then exchanged one by one while the sum grows.

    >>> greedy_choice(Tensor([[0.5, 0.5], [0.9, 0.1], [0.1, 0.9]]).log(), 1)
    [0]

    Args:
        log_probs: log density of each held-out target under each member [M, B].
        to: number of members to choose.
    """
    table = log_probs.double().cpu()

    def scores(beside: Sequence[int]) -> Tensor:
        """The sum for each member m beside some others; those others cannot come twice."""
        total = table[list(beside)].logsumexp(0) if beside else torch.tensor(-torch.inf).double()
        each = torch.logaddexp(total, table).sum(1)
        each[list(beside)] = -torch.inf
        return each

    chosen: list[int] = []
    while len(chosen) < to:
        chosen.append(int(scores(chosen).argmax()))
    best, better = float(table[chosen].logsumexp(0).sum()), True
    while better:
        swaps = torch.stack([scores(chosen[:i] + chosen[i + 1 :]) for i in range(to)])
        found, place = swaps.flatten().max(0)
        better = float(found) > best + 1e-12 * abs(best)
        if better:
            chosen[int(place) // len(table)], best = int(place) % len(table), float(found)
    return sorted(chosen)


def bootstrap_difference(
    a: np.ndarray, b: np.ndarray, level: float = 0.95, seed: int = 0
) -> Difference:
    """Mean of a - b over data points, with the percentile interval of a paired bootstrap.

    Efron & Tibshirani (1993), An Introduction to the Bootstrap, chapter 13.

    >>> bootstrap_difference(np.array([1.0, 2.0]), np.array([0.0, 1.0]))
    Difference(difference=1.0, low=1.0, high=1.0)
    """
    if not 0 < level < 1:
        raise ConfigError(f"the level of an interval must be between 0 and 1, not {level}")
    each, random = np.asarray(a) - np.asarray(b), np.random.default_rng(seed % 2**64)
    means = [each[random.integers(len(each), size=len(each))].mean() for _ in range(_RESAMPLES)]
    low, high = np.quantile(means, [(1 - level) / 2, (1 + level) / 2])
    return Difference(float(each.mean()), float(low), float(high))


def _adopted(run: Run, networks: list[nn.Module], known: Dataset | None, out: Any) -> Run:
    """A run of the networks, with the likelihood and the data of the whole run."""
    builds = [build for build in run.ensemble.builds if build is not None]
    small = adopt(
        networks,
        build=builds if len(builds) == len(run.ensemble.groups) else None,
        likelihood=run.likelihood,
        data=known if known is not None and len(known.train) else None,
        outputs=run.config.get("outputs"),
        out=out,
    )
    lasting = {key: run.provenance[key] for key in _LASTING if key in run.provenance}
    return replace(small, provenance=small.provenance | lasting, given=run.given)


_LASTING = ("input_range", "inputs", "target_shape", "pixel_range")
"""What a smaller run knows of its data from the whole run."""


def _judged(
    run: Run,
    small: Run,
    by: str,
    chosen: list[int],
    weights: tuple[float, ...] | None,
    judge: Split,
    level: float,
    seed: int,
) -> Compressed:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ShoalWarning)  # about diverged members
        whole, less = predict(run, judge), predict(small, judge, weights=weights)
    old, new = (_nll(pred, judge.y) for pred in (whole, less))
    information = [float(pred.mutual_information().mean()) for pred in (whole, less)]
    return Compressed(
        small,
        by,
        tuple(chosen),
        weights,
        float(new.mean()),
        float(old.mean()),
        bootstrap_difference(new, old, level, seed),
        (information[0], information[1]),
        (_numbers(run), _numbers(small)),
        len(new),
    )


def _nll(pred: Predictive, y: Any) -> np.ndarray:
    """Minus log density of each target; every token or place is a target."""
    points, targets = pred.points(y)
    return -points.log_prob(targets).double().numpy()


def _noted(run: Run, sentence: str) -> Run:
    """The run with one more note, also in its folder."""
    run.notes.append(sentence)
    if run.folder is not None:
        RunFolder(run.folder).begin(run.config, {**run.provenance, "notes": run.notes})
    return run


def _numbers(run: Run) -> int:
    return sum(t.numel() for name, t in run.ensemble.state.items() if name != "alive")


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
    students = list(UnrolledEnsemble([group], [best]).members)
    first, head = students[0], set(group.head)
    trunk = {id(p): p for name, p in first.named_parameters() if name not in head}
    trunk |= {id(b): b for b in first.buffers()}
    students += [copied(first, dict(trunk)) for _ in range(count - 1)]
    return students


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
        wanted, predicted = likelihood.probs(teacher), likelihood.probs(student)
        return -(wanted * predicted.clamp_min(1e-12).log()).sum(-1).mean()
    return ((student - teacher) / scale).square().mean()

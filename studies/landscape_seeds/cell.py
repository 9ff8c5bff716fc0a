"""One cell of the study: five members on one data set with one seed, and every analysis of them."""

import math
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

import shoal
from shoal.analysis.landscape import curves
from shoal.analysis.landscape.analyses.along import trajectories
from shoal.analysis.landscape.analyses.around import diversity
from shoal.analysis.landscape.analyses.between import lines
from shoal.analysis.landscape.averaging import averaged, mc_dropout, multiswag
from shoal.analysis.landscape.curves import align, connect
from shoal.analysis.landscape.planes import levelled, line, with_midpoints
from shoal.analysis.landscape.scene import Effort, Scene
from shoal.analysis.landscape.subspace import Mode, sample_mode
from shoal.analysis.landscape.survey import evaluated, outputs, survey
from shoal.data.dataset import Dataset, Split
from shoal.engine.members.precision import full_precision
from shoal.models import Blueprint
from studies.common import test_of
from studies.landscape_seeds.mean_field import KL_WEIGHTS, MeanField, fitted

__all__ = ["Case", "Row", "analysed", "brier_parts", "scores"]

SAMPLES = 5
"""Samples per mode of SWAG and dropout."""


class Row(NamedTuple):
    """One number."""

    analysis: str
    split: str
    treatment: str
    metric: str
    value: float


class Case(NamedTuple):
    """Data, network and training.

    Attributes:
        data: training data, test set and shifts.
        validation: images that neither train nor judge.
        network: the architecture.
        lr: first learning rate.
        epochs: passes over the training data.
        steps: training steps of the tunnel.
    """

    data: Dataset
    validation: Split
    network: Any
    lr: float
    epochs: int
    steps: int


@full_precision()
def analysed(case: Case, seed: int, device: str) -> tuple[list[Row], list[tuple]]:
    """All numbers of a cell, and the points of the figures: (figure, series, x, y)."""
    blueprint = Blueprint(case.network, case.data.input_shape, case.data.outputs)
    with tempfile.TemporaryDirectory() as folder:
        run = _trained(case, blueprint, seed, device, Path(folder))
        run.ensemble.train(False)
        inputs = len(test_of(case.data))
        scene = Scene(run, case.data, Effort(inputs=inputs, steps=case.steps, shifts=99), seed)
        _ = scene.modes, [mode.path for mode in scene.modes]
        start = shoal.Ensemble.init(blueprint, len(KL_WEIGHTS), seed=seed + 1000)
        fields = fitted(
            start.to(device).train(False), case.data.train, epochs=case.epochs, seed=seed
        )
        chosen, rows = _best_field(fields, case.validation)
        points: list[tuple] = []
        for part in (_diversity, _tunnel):
            more, seen = part(scene, chosen)
            rows, points = rows + more, points + seen
        rows += [*_averaging(scene, chosen), *_lines(scene), *_trajectories(scene)]
    return rows, points


def _trained(case: Case, blueprint: Any, seed: int, device: str, folder: Path) -> shoal.Run:
    """Five independent members whose learning rate never falls below a quarter."""
    return shoal.fit(
        shoal.Ensemble.init(blueprint, members=5, seed=seed),
        case.data,
        method="ensemble",
        temperature=0.0,
        lr=case.lr,
        schedule=lambda step, steps: 0.5 ** min(int(4 * step / steps), 2),
        epochs=case.epochs,
        batch_size=128,
        seed=seed,
        device=device,
        precision="tf32" if device == "cuda" else "float32",
        keep_every=1,
        out=folder / "run",
        progress=False,
    )


def scores(found: Tensor, y: Tensor) -> dict[str, float]:
    """Accuracy and NLL of the mean prediction of networks with outputs [S, B, C]."""
    mean = found.double().log_softmax(-1).logsumexp(0) - math.log(len(found))
    y = y.to(mean.device)
    right = (mean.argmax(-1) == y).double().mean()
    return {"accuracy": float(right), "nll": float(-mean.gather(-1, y[:, None]).mean())}


def brier_parts(found: Tensor, y: Tensor) -> dict[str, float]:
    r"""One network's Brier score is the score of the mean prediction plus the variance.

    $\frac1S \sum_s |p_s - y|^2 = |\bar p - y|^2 + \frac1S \sum_s |p_s - \bar p|^2$, on average over
    the data. The first term falls with bias, the second is what averaging removes. Krogh &
    Vedelsby (1995).
    """
    probs = found.double().softmax(-1)
    truth = torch.nn.functional.one_hot(y.to(probs.device), probs.shape[-1])
    mean = probs.mean(0)
    return {
        "one": float((probs - truth).square().sum(-1).mean()),
        "averaged": float((mean - truth).square().sum(-1).mean()),
        "variance": float((probs - mean).square().sum(-1).mean()),
    }


def _best_field(
    fields: list[tuple[Mode, MeanField]], held: Split
) -> tuple[tuple[Mode, MeanField], list[Row]]:
    """The mean-field posterior with the lowest validation NLL, and all of these NLL."""
    rows = []
    for weight, (mode, field) in zip(KL_WEIGHTS, fields, strict=True):
        found = scores(sample_mode(field, mode, torch.ones(10), held.x).members, held.y)
        rows += [Row("mean-field", "validation", f"{weight:g}", k, v) for k, v in found.items()]
    losses = [row.value for row in rows if row.metric == "nll"]
    best = min(range(len(losses)), key=losses.__getitem__)
    rows.append(Row("mean-field", "validation", "chosen", "kl_weight", KL_WEIGHTS[best]))
    return fields[best], rows


def _splits(scene: Scene) -> dict[str, Split]:
    shifts = ((name, scene.data.shifts[name]) for name in scene.data.shifts)
    return {"test": scene.test} | {name: Split(s.x.cpu(), s.y.cpu()) for name, s in shifts}


def _averaging(scene: Scene, field: tuple[Mode, MeanField]) -> Iterator[Row]:
    """One and five modes, with and without averages and samples, on clean and corrupted images."""
    splits = _splits(scene)
    x = torch.cat([split.x.cpu() for split in splits.values()])
    modes = len(scene.modes)
    paths = [mode.path for mode in scene.modes if mode.path is not None]
    ends = outputs(scene.ensemble, x).cpu()
    means = outputs(averaged(paths), x).cpu()
    snapshots = torch.stack(
        [outputs(p.slice_members(p.members - 5, p.members), x).cpu() for p in paths]
    )
    swag = multiswag(scene.modes, x, SAMPLES, seed=scene.seed).members.unflatten(0, (modes, -1))
    dropped = mc_dropout(scene.ensemble, x, SAMPLES).members.unflatten(0, (modes, -1))
    mean_field = sample_mode(field[1], field[0], torch.ones(10), x).members
    single = {"member": ends[:, None], "average": means[:, None], "SWAG": swag, "dropout": dropped}
    start, pooled = 0, []
    for name, split in splits.items():
        at = slice(start, start := start + len(split))
        for kind, found in single.items():
            here = found[:, :, at]
            each = [scores(mode, split.y) for mode in here]
            whole = scores(here.flatten(0, 1), split.y)
            for metric in whole:
                value = sum(one[metric] for one in each) / modes
                yield Row("averaging", name, f"1 {kind}", metric, value)
                yield Row("averaging", name, f"5 {kind}", metric, whole[metric])
        for metric, value in scores(mean_field[:, at], split.y).items():
            yield Row("averaging", name, "mean-field", metric, value)
        if name != "test":
            pooled.append((at, split.y))
    five = {"members": ends[None], "snapshots of one member": snapshots, "SWAG": swag,
            "dropout": dropped, "mean-field": mean_field[None, :5]}  # fmt: skip
    shifted = torch.cat([torch.arange(at.start, at.stop) for at, _ in pooled])
    parts = {"test": (torch.arange(len(scene.test)), scene.test.y),
             "corrupted": (shifted, torch.cat([y.cpu() for _, y in pooled]))}  # fmt: skip
    for name, (index, y) in parts.items():
        for kind, found in five.items():
            each = [brier_parts(mode[:, index], y) for mode in found]
            for metric in each[0]:
                value = sum(one[metric] for one in each) / len(each)
                yield Row("bias-variance", name, kind, metric, value)


def _diversity(scene: Scene, field: tuple[Mode, MeanField]) -> tuple[list[Row], list[tuple]]:
    """Diversity against accuracy: other members, samplers, and the mean-field posterior."""
    result = diversity(scene)
    near = result.scores["at_equal_accuracy"]
    rows = [Row("diversity", "test", n, "equal", v) for n, v in near.items() if v is not None]
    series = {n.removesuffix("/accuracy"): t for n, t in result.tensors.items() if "accuracy" in n}
    found = {n: (accuracy, result.tensors[f"{n}/apart"]) for n, accuracy in series.items()}
    mode, sampler = field
    reach = torch.cat([torch.linspace(0, 1, 20), torch.ones(10)])
    drawn = sample_mode(sampler, mode, reach, scene.test.x).members
    seen = evaluated(drawn[1:], scene.test, scene.run.likelihood, drawn[:1])
    found["mean-field"] = (seen.accuracy, seen.apart[0])
    last = slice(-10, None)
    right = seen.accuracy[last]
    share = seen.apart[0, last] / (1 - right)
    rows += [Row("diversity", "test", "mean-field", "full", float(share.mean())),
             Row("diversity", "test", "mean-field", "accuracy", float(right.mean()))]  # fmt: skip
    right, apart = found["members"]
    rows += [Row("diversity", "test", "members", "full", float((apart / (1 - right)).mean())),
             Row("diversity", "test", "members", "accuracy", float(right.mean()))]  # fmt: skip
    points = [
        ("diversity", name, float(a), float(d) / max(1 - float(a), 1e-9))
        for name, (accuracy, far) in found.items()
        for a, d in zip(accuracy, far, strict=True)
    ]
    return rows, points


def _lines(scene: Scene) -> list[Row]:
    paths = lines(scene).scores["paths"]
    return [
        Row("line", "train", n, k, p[k])
        for n, p in paths.items()
        for k in ("barrier", "most_apart")
    ]


def _trajectories(scene: Scene) -> list[Row]:
    """Disagreement of two members' ends, and of snapshots of one member after half of training."""
    result = trajectories(scene)
    count = len(result.scores["epochs"])
    far, owner = result.tensors["apart"], result.tensors["owner"]
    late = torch.arange(len(owner)) % count >= count // 2
    same = (
        (owner[:, None] == owner) & late & late[:, None] & ~torch.eye(len(owner), dtype=torch.bool)
    )
    values = {
        "two members": result.scores["between_ends"],
        "last two snapshots": result.scores["last_snapshots"],
        "snapshots of the second half": float(far[same].mean()),
    }
    return [Row("trajectories", "test", name, "apart", value) for name, value in values.items()]


def _tunnel(scene: Scene, _: Any) -> tuple[list[Row], list[tuple]]:
    """The low-loss tunnel between two members: what is enforced, and what is found.

    Bisection puts the loss of 41 points on 2,000 training images to the level of the ends. Nothing
    fixes the loss at the 40 midpoints, on other training images, or any prediction.
    """
    pair, meaning = align(scene.first(2)), scene.run.likelihood
    train = scene.data.train
    half = min(2000, len(train) // 2)
    used, other = (Split(train.x[s], train.y[s]) for s in (slice(0, half), slice(half, 2 * half)))
    curve = curves.registry.make("tunnel")
    pivots = connect(
        pair, curve, train, likelihood=meaning, steps=scene.effort.steps, seed=scene.seed
    )
    path = curve.coefficients(torch.linspace(0, 1, 41, dtype=torch.float64))
    path = with_midpoints(levelled(pivots, path, used, meaning))
    seen = {
        name: survey(pivots, path, split, meaning)
        for name, split in (("used", used), ("other", other))
    }
    test = survey(pivots, path, scene.test, meaning, scene.outputs[:2])
    along = line(len(path))
    uneven = {
        name: (s.loss - along @ s.loss[[0, -1]]) / (along @ s.loss[[0, -1]])
        for name, s in seen.items()
    }
    far = test.apart[0]
    values = {
        "enforced: loss at 41 points": float(uneven["used"][::2].abs().max()),
        "found: loss at 40 midpoints": float(uneven["used"][1::2].abs().max()),
        "found: loss on other images": float(uneven["other"].abs().max()),
        "found: lowest test accuracy": float(test.accuracy.min()),
        "found: highest test accuracy": float(test.accuracy.max()),
        "ends: test accuracy": float(test.accuracy[[0, -1]].mean()),
        "found: labels changed at the end": float(far[-1]),
        "found: largest change between neighbours": float(far.diff().abs().max()),
        "ends: training loss": float(seen["used"].loss[[0, -1]].mean()),
    }
    t = torch.linspace(0, 1, len(path)).tolist()
    series = {
        "loss, training images": seen["used"].loss,
        "loss, other training images": seen["other"].loss,
        "test accuracy": test.accuracy,
        "labels unlike the first member": far,
        "labels unlike the second member": test.apart[1],
    }
    points = [
        ("tunnel", n, a, float(b)) for n, v in series.items() for a, b in zip(t, v, strict=True)
    ]
    return [Row("tunnel", "train", n, "value", v) for n, v in values.items()], points

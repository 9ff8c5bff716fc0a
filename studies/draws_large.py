"""Draws of a residual network by SGHMC, beside SWAG, Laplace and more members, at equal cost.

    python -m studies.draws_large pack --data fashion.npz    the images, once
    python -m studies.draws_large choose --data fashion.npz  chosen.csv, on held-out images
    python -m studies.draws_large run --data fashion.npz     large.csv, seeds 0, 1, 2
    python -m studies.draws_large page                       large.md

`run` needs laplace-torch 0.3 for its rows; --skip laplace leaves them out. A second call goes on
with the next seed. Rows are written as they come.

Plan, written before the runs. Data: 8,000 images of Fashion-MNIST for training, 2,000 others for
the choice, 5,000 test images; MNIST and KMNIST as OOD sets, by entropy. Network: `network`. Members
by SGD along a cosine, 20 epochs, batches of 250, the library's prior.

- draws: SGHMC from four members, 480 steps, 20 draws a chain, of the whole network, of the last
  block of every member (last blocks), and on the frozen trunk of one member: heads, its last block,
  and LoRA of rank 4 from the third stage on (four each, trained three epochs before).
- swag: of the same members by the same number of steps of SGD.
- laplace: of one member, and of the last layers of four members.

Settings are chosen on the held-out images with seed 100, which is not judged: the lowest NLL of
four chains of 240 steps, among those of `settings` and of `RATES` that are tried within the time
given; the parts take turns, and draws and SWAG take turns in each part.

Judged: NLL, accuracy and AUROC, paired by seed with a 95 % interval, beside as many plain members
as train in the same seconds (8 at most). ECE stands beside it. A choice, not a result: the length
of all runs, which follows from the seconds at hand.

Changed after a first run of one seed, and before the runs of three seeds, because that run had time
for one setting of each part, temperature 1 and rate 0.02, and no time for SWAG on one trunk:
- temperatures 1, 0.1 and 0.01 for all parts at rate 0.02; then rate 0.1, coldest last; then, for
  the whole network, cyclical steps. The rate 0.5 of draws is left out, and SWAG begins at 0.02.
- accuracy and AUROC are judged as well, since they did not go with NLL.
- what the first use of the device loads is in no row's seconds.
- laplace-torch 0.3 with Jacobians image by image, and with the full matrix from them: see
  `curvature`.
"""

import argparse
import copy
import dataclasses
import math
import time
import traceback
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import shoal
from shoal.core.display.text import markdown_table
from shoal.data.files.raw import RAW
from shoal.prediction.predictive import Predictive
from shoal.prediction.statistics import t_quantile
from studies import RESULTS
from studies.common import append_rows, read_csv

PLACE = RESULTS / "draws"
POOL, CHAINS, BATCH, EPOCHS = 8, 4, 250, 20
DRAWS = 20
IMAGES = 100
"""Images whose Jacobians are in memory: 0.7 GB for all weights, and as much again some times."""
TRAINING: dict[str, Any] = {"optimizer": {"name": "sgd", "momentum": 0.9}, "lr": 0.1}
REFIT: dict[str, Any] = {"epochs": 3, "lr": 0.01}
STEPS = 480
PARTS = ("whole", "last blocks", "heads", "last block", "lora")
LAPLACE = (("heads", "head-full", 1), ("last block", "last-kron", 1), ("whole", "all-kron", 1))
LAPLACE += (("last blocks", "head-full", CHAINS),)
HEADER = ["part", "seed", "model", "networks", "nll", "accuracy", "ece", "mnist", "kmnist"]
HEADER += ["seconds"]
TRIED = ["part", "model", "rate", "temperature", "schedule", "nll", "accuracy", "ece", "seconds"]
JUDGED = {"nll": "NLL", "accuracy": "Accuracy", "mnist": "AUROC of MNIST"}
JUDGED |= {"kmnist": "AUROC of KMNIST"}
Chosen = dict[tuple[str, str], dict[str, Any]]
"""Settings of each part and model."""
TEXT = """# Draws of a residual network

    python -m studies.draws_large choose --data fashion.npz  # chosen.csv
    python -m studies.draws_large run --data fashion.npz     # large.csv
    python -m studies.draws_large page                       # this page

A network of 14 layers with filter response normalisation on 8,000 images of Fashion-MNIST, on one
H200. Each row stands beside as many plain members as train in the same seconds (8 at most). AUROC
of MNIST and KMNIST is by predictive entropy. The docstring of the command is the plan; it was
written before the runs. Seeds: {seeds}.

{table}

## What it shows

{shows}

{verdict}

## What the plan asks and this page lacks

{lacks}

## Settings that were tried

On held-out images, with seed 100, by chains of half the length. The rows above have the setting of
the lowest NLL.

{chosen}
"""
REMARKS = [
    "The first row of Laplace of seed 0 contains what the library loads: 5.4 s instead of 1.0.",
    "Time ended before the last two rows of seed 2, and before the last settings.",
]
"""Sentences about the last run that the rows cannot say."""
SIZES = {"train": 8000, "held": 2000, "test": 5000, "mnist": 1000, "kmnist": 1000}


class FilterResponse(nn.Module):
    """γ x / √(mean over pixels of x² + 1e-6) + β. Singh & Krishnan (2020), arXiv 1911.09737."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width, 1, 1))
        self.bias = nn.Parameter(torch.zeros(width, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        """The normalised images."""
        size = x.square().mean((2, 3), keepdim=True)
        return torch.addcmul(self.bias, x * torch.rsqrt(size + 1e-6), self.weight)


class Block(nn.Module):
    """Two convolutions and a shortcut, with SiLU as in Izmailov et al. (2021), arXiv 2104.14421."""

    def __init__(self, before: int, width: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(before, width, 3, stride, padding=1, bias=False)
        self.first_norm = FilterResponse(width)
        self.second = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.second_norm = FilterResponse(width)
        same = before == width
        self.shortcut = nn.Identity() if same else nn.Conv2d(before, width, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """silu(norm(conv(silu(norm(conv(x))))) + shortcut(x))."""
        h = F.silu(self.first_norm(self.first(x)))
        return F.silu(self.second_norm(self.second(h)) + self.shortcut(x))


def network() -> nn.Module:
    """A residual network of 14 layers: three stages of two blocks; "last" is the last block."""
    stem = nn.Conv2d(1, 16, 3, 2, padding=1, bias=False), FilterResponse(16), nn.SiLU()
    end = {"pool": nn.AdaptiveAvgPool2d(1), "flat": nn.Flatten(), "head": nn.Linear(64, 10)}
    parts = {
        "stem": nn.Sequential(*stem),
        "one": nn.Sequential(Block(16, 16, 1), Block(16, 16, 1)),
        "two": nn.Sequential(Block(16, 32, 2), Block(32, 32, 1)),
        "three": Block(32, 64, 2),
        "last": nn.Sequential(OrderedDict(block=Block(64, 64, 1), **end)),
    }
    return nn.Sequential(OrderedDict(parts))


# Data.


def pack(file: Path) -> None:
    """Fashion-MNIST and, as OOD sets, MNIST and KMNIST: some images as bytes."""
    firsts = {"train": ("fashion-mnist", 0), "held": ("fashion-mnist", 50_000)}
    firsts |= {"test": ("fashion-mnist", 0), "mnist": ("mnist", 0), "kmnist": ("kmnist", 0)}
    arrays = {}
    for name, (source, first) in firsts.items():
        x, y = RAW[source]("train" if name in ("train", "held") else "test")
        chosen = slice(first, first + SIZES[name])
        arrays[f"{name}_x"], arrays[f"{name}_y"] = x[chosen], y[chosen].astype(np.uint8)
    np.savez(file, **arrays)


class Data:
    """Some of the images on the device, in the scale of the training images."""

    def __init__(self, file: Path, device: str, names: Iterable[str] = SIZES) -> None:
        stored = np.load(file)
        self.x: dict[str, Tensor] = {}
        self.y: dict[str, Tensor] = {}
        for name in names:
            x = torch.tensor(stored[f"{name}_x"], device=device).float() / 255
            self.x[name] = ((x - 0.286) / 0.353).reshape(-1, 1, 28, 28)
            self.y[name] = torch.tensor(stored[f"{name}_y"], device=device).long()

    def few(self, count: int) -> "Data":
        """The same with the first images for training alone."""
        less = copy.copy(self)
        less.x, less.y = ({**each, "train": each["train"][:count]} for each in (self.x, self.y))
        return less

    @property
    def train(self) -> tuple[Tensor, Tensor]:
        """Inputs and labels."""
        return self.x["train"], self.y["train"]

    def scores(self, predict: Any) -> list[float]:
        """NLL, accuracy and ECE on the test set, or on held-out images; AUROC of OOD sets."""
        metrics, known = shoal.metrics, "test" if "test" in self.x else "held"
        pred, y = predict(self.x[known]), self.y[known].cpu()
        found = [metrics.nll(pred, y), metrics.accuracy(pred, y), metrics.ece(pred, y)]
        for name in ("mnist", "kmnist"):
            if name in self.x:
                other = predict(self.x[name])
                found.append(metrics.auroc(pred.entropy(), other.entropy()))
        return [float(value) for value in found]


class Clock:
    """Seconds of a block, of the device as well."""

    def __enter__(self) -> "Clock":
        self._wait()
        self.start = time.perf_counter()
        return self

    def __exit__(self, *error: object) -> None:
        self._wait()
        self.seconds = time.perf_counter() - self.start

    def _wait(self) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()


# Models.


def trained(ensemble: Any, data: Data, seed: int, **options: Any) -> shoal.Run:
    """Members without repulsion."""
    usual: dict[str, Any] = {"epochs": EPOCHS, "schedule": "cosine", "batch_size": BATCH}
    where = data.train[0].device
    return shoal.fit(
        ensemble, data.train, method="ensemble", seed=seed, device=where, progress=False,
        **(usual | TRAINING | options),
    )  # fmt: skip


def first(run: shoal.Run, members: int) -> shoal.Run:
    """The run with its first members alone."""
    return dataclasses.replace(run, ensemble=run.ensemble.slice_members(0, members))


def chains(
    run: shoal.Run, seed: int, steps: int, setting: dict[str, Any], **more: Any
) -> shoal.Run:
    """Draws by SGHMC whose steps are those of SGD at the learning rate of the setting.

    `shoal.draw` divides gradients by the temperature T, so its rate is T times that of SGD.
    """
    heat, cyclical = setting["temperature"], setting["schedule"] == "cyclical"
    cooled = dataclasses.replace(run, config={**run.config, "temperature": heat})
    sampler = {"name": "sghmc", "lr": heat * setting["rate"], "schedule": setting["schedule"]}
    warmup = 0 if cyclical else steps // 3
    thin = (steps - warmup) // (DRAWS * (2 if cyclical else 1))
    return shoal.draw(
        cooled, sampler=sampler, draws=DRAWS, warmup=warmup, thin=thin, batch_size=BATCH, seed=seed,
        progress=False, **more,
    )  # fmt: skip


def swag(run: shoal.Run, seed: int, steps: int, setting: dict[str, Any], **more: Any) -> shoal.Run:
    """SWAG of every member: normal laws of points along SGD with a constant rate.

    SGD are chains at a temperature of almost 0. Maddox et al. (2019), arXiv 1902.02476.
    """
    cold = {"temperature": 1e-10, "rate": setting["rate"], "schedule": "constant"}
    path = chains(run, seed, steps, cold, **more)
    weights = path.ensemble.weights
    points = {name: t.detach().unflatten(0, (DRAWS, -1)) for name, t in weights.items()}
    made = normal_law(points, DRAWS, seed)
    with torch.no_grad():
        for name, tensor in weights.items():
            tensor.copy_(made[name].flatten(0, 1))
    return path


def normal_law(points: dict[str, Tensor], count: int, seed: int) -> dict[str, Tensor]:
    """Draws [count, M, ...] of the normal laws of points [K, M, ...].

    With variances v and deviations D [K, weights] from the mean, the covariance is
    diag(v) / 2 + D^T D / (2 (K - 1)).
    """
    one = next(iter(points.values()))
    known, members = one.shape[:2]
    generator = torch.Generator(one.device).manual_seed(seed)
    normal = {"generator": generator, "device": one.device}
    share = torch.randn(count, known, members, **normal) / math.sqrt(2 * (known - 1))
    made = {}
    for name, each in points.items():
        mean, away = each.mean(0), each - each.mean(0)
        noise = torch.randn(count, *mean.shape, **normal)
        own = away.square().mean(0).div(2).sqrt() * noise
        made[name] = mean + own + torch.einsum("skm,km...->sm...", share, away)
    return made


def curvature() -> Any:
    """The Gauss-Newton matrices of laplace-torch 0.3, with Jacobians that cost B passes and not B².

    The library differentiates all outputs of a batch of B images by each other's images: 95 GiB at
    B = 250. Its full matrix multiplies an identity on the CPU by a network on the GPU.
    """
    from laplace.curvature import GGNInterface  # pyright: ignore[reportMissingImports]
    from laplace.curvature.curvlinops import CurvlinopsGGN  # pyright: ignore[reportMissingImports]

    class ByImage(CurvlinopsGGN):
        full = GGNInterface.full

        def jacobians(self, x: Tensor, enable_backprop: bool = False) -> tuple[Tensor, Tensor]:
            """Jacobians [B, classes, weights] and outputs [B, classes]."""

            def outputs(weights: Any, image: Tensor) -> tuple[Tensor, Tensor]:
                state = (weights, self.buffers_dict)
                found = torch.func.functional_call(self.model, state, image[None])[0]
                return found, found

            each = torch.vmap(torch.func.jacrev(outputs, has_aux=True), (None, 0))
            made, values = each(self.params_dict, x)
            return torch.cat([j.flatten(2) for j in made.values()], -1).detach(), values.detach()

    return ByImage


def laplace(nets: list[nn.Module], data: Data, kind: str) -> Any:
    """A mixture of Laplace approximations by laplace-torch: the function that predicts.

    The prior precision maximises the evidence, and the prediction is that of the linearised network
    with the probit approximation. Scales and shifts of the normalisation stay as they are.
    """
    from laplace import Laplace  # pyright: ignore[reportMissingImports]

    pairs = torch.utils.data.TensorDataset(*data.train)
    loader = torch.utils.data.DataLoader(pairs, batch_size=BATCH)
    which, structure = kind.split("-")
    made = []
    for net in nets:
        for name, parameter in net.named_parameters():
            inside = which == "all" or name.startswith("last.") or which == "head"
            parameter.requires_grad_("norm" not in name and "stem.1" not in name and inside)
        subset = "last_layer" if which == "head" else "all"
        posterior: Any = Laplace(
            net.eval(), "classification", subset, structure, backend=curvature()
        )
        posterior.fit(loader)
        posterior.optimize_prior_precision(method="marglik")
        made.append(posterior)

    def predict(x: Tensor) -> Predictive:
        each = [torch.cat([p(part).detach() for part in x.split(IMAGES)]) for p in made]
        logs = torch.stack(each).clamp(min=1e-12).log().cpu()
        return Predictive(logs, shoal.likelihoods.Categorical())

    return predict


def members_of(part: str, run: shoal.Run, data: Data, seed: int) -> tuple[shoal.Run, dict]:
    """The run at whose members the chains of a part begin, and the options of `draw`."""
    if part in ("whole", "last blocks"):
        return first(run, min(CHAINS, run.ensemble.members)), {
            "of": "last"
        } if part == "last blocks" else {}
    net = run.ensemble.member(0)
    builds = {
        "heads": lambda: shoal.adapters.last_layer(net, fresh=False),
        "last block": lambda: shoal.adapters.last_layer(net, "last", fresh=False),
        "lora": lambda: shoal.adapters.lora(
            net, rank=4, targets=("three.*", "last.block.*"), fresh=False
        ),
    }
    ensemble = shoal.Ensemble.init(builds[part](), members=CHAINS, seed=seed)
    return trained(ensemble, data, seed, cache=True, **REFIT), {"cache": True}


def warm_up(data: Data) -> None:
    """Train and sample once on a few images: what the first use loads is in no row's seconds."""
    few = data.few(4 * BATCH)
    run = trained(shoal.Ensemble.init(network, POOL, seed=0), few, 0, epochs=1)
    setting = {"rate": 0.02, "temperature": 1.0, "schedule": "constant"}

    def once(part: str) -> Iterator[shoal.Run]:
        start, more = members_of(part, run, few, 0)
        yield chains(start, 0, 2 * DRAWS, setting, **more)

    for part in PARTS:
        list(attempted(part, once(part)))


def predictor(run: shoal.Run) -> Any:
    """The function that predicts."""
    return lambda x: shoal.predict(run, x)


def compute(seed: int, data: Data, skip: str, chosen: Chosen) -> Any:
    """Rows of one seed: part, model, networks, scores and seconds of training."""
    ensemble = shoal.Ensemble.init(network, POOL, seed=seed)
    with Clock() as clock:
        run = trained(ensemble, data, seed)
    each, known = clock.seconds / POOL, {}

    def some(members: int) -> Any:
        def predict(x: Tensor) -> Predictive:
            if id(x) not in known:
                known[id(x)] = shoal.predict(run, x)
            whole = known[id(x)]
            return Predictive(whole.members[:members], whole.likelihood)

        return predict

    for members in range(1, POOL + 1):
        yield ["ensemble", "points", members, *data.scores(some(members)), members * each]
    for part in PARTS:
        yield from attempted(part, drawn(part, run, each, seed, data, chosen))
    for part, kind, count in LAPLACE if skip != "laplace" else ():
        yield from attempted(kind, approximated(part, kind, count, run, each, data))


def attempted(words: str, rows: Iterator[Any]) -> Iterator[Any]:
    """The rows until one fails; the others are worth their time."""
    try:
        yield from rows
    except Exception:
        print(words, traceback.format_exc(limit=-4), flush=True)


def drawn(
    part: str, run: shoal.Run, each: float, seed: int, data: Data, chosen: Chosen
) -> Iterator[list]:
    """Rows of one part; a member of the run took `each` seconds."""
    with Clock() as clock:
        start, options = members_of(part, run, data, seed)
    spent = clock.seconds + each * (1 if "cache" in options else CHAINS)
    if "cache" in options:
        yield [part, "points", CHAINS, *data.scores(predictor(start)), spent]
    for model in MODELS:
        if (part, model) not in chosen:  # no setting was tried
            continue
        with Clock() as clock:
            made = MODELS[model](start, seed, STEPS, chosen[part, model], **options)
        found = data.scores(predictor(made))
        yield [part, model, CHAINS * DRAWS, *found, spent + clock.seconds]


def approximated(
    part: str, kind: str, count: int, run: shoal.Run, each: float, data: Data
) -> Iterator[list]:
    """The row of a Laplace approximation."""
    with Clock() as clock:
        predict = laplace([run.ensemble.member(i) for i in range(count)], data, kind)
    found = data.scores(predict)
    yield [part, f"laplace {kind}", count, *found, clock.seconds + each * count]


MODELS = {"draws": chains, "swag": swag}
RATES = {"draws": (0.02, 0.1), "swag": (0.02, 0.1, 0.005)}
"""Learning rates among which held-out images choose, in the order in which they are tried."""
HEATS = (1.0, 0.1, 0.01)


def settings(part: str) -> list[dict[str, Any]]:
    """Settings of the chains among which held-out images choose, in the order of trials."""
    found = [
        {"rate": rate, "temperature": heat, "schedule": "constant"}
        for rate in RATES["draws"]
        for heat in HEATS
    ]
    more = [each | {"schedule": "cyclical"} for each in found[len(HEATS) :]]
    return found + (more if part == "whole" else [])


def cold_settings() -> list[dict[str, Any]]:
    """Settings of SWAG."""
    return [{"rate": rate, "temperature": 0.0, "schedule": "constant"} for rate in RATES["swag"]]


def choose(data: Data, within: float, file: Path) -> None:
    """Score settings on held-out images, by chains of half the length, until time is up."""
    began = time.perf_counter()
    run = trained(shoal.Ensemble.init(network, CHAINS, seed=100), data, 100)
    print("members", *data.scores(predictor(run)), flush=True)
    for turn in zip_longest(*(attempted(part, trials(part, run, data)) for part in PARTS)):
        for part, model, setting, make in filter(None, turn):
            if time.perf_counter() - began > within:
                return
            try:
                with Clock() as clock:
                    made = make()
                values = [*data.scores(predictor(made)), clock.seconds]
            except Exception:  # the other settings are worth their time
                print(part, model, setting, traceback.format_exc(limit=-4), flush=True)
                continue
            numbers = [f"{value:.6g}" for value in values]
            append_rows(file, TRIED, [[part, model, *setting.values(), *numbers]])


def trials(part: str, run: shoal.Run, data: Data) -> Iterator[tuple[str, str, dict, Any]]:
    """Part, model, setting, and the function that makes the draws."""
    start, more = members_of(part, run, data, 100)
    for pair in zip_longest(settings(part), cold_settings()):
        for (model, make), setting in zip(MODELS.items(), pair, strict=True):
            if setting is not None:
                yield part, model, setting, partial(make, start, 100, STEPS // 2, setting, **more)


def best(rows: list[dict[str, str]]) -> Chosen:
    """The setting with the lowest NLL for each part and model."""
    found: Chosen = {}
    finite = [row for row in rows if math.isfinite(float(row["nll"]))]
    for row in sorted(finite, key=lambda row: -float(row["nll"])):
        numbers = {name: float(row[name]) for name in ("rate", "temperature")}
        found[row["part"], row["model"]] = numbers | {"schedule": row["schedule"]}
    return found


def page(rows: list[dict[str, str]], tried: list[dict[str, str]]) -> str:
    """The page: every model beside the plain ensemble that takes as long."""
    values = by_network(rows)
    kinds = list(dict.fromkeys(key[:3] for key in values if key[0] != "ensemble"))
    seeds = sorted({r["seed"] for r in rows})
    lines, judged, words = [], [], {}
    for size in ("1", str(CHAINS), str(POOL)):
        found = [values["ensemble", "points", size, seed] for seed in seeds]
        lines.append(["plain ensemble", "points", size, *_means(found), ""])
    for kind in kinds:
        found = [values[(*kind, seed)] for seed in seeds if (*kind, seed) in values]
        beside = [as_long(row, values) for row in found]
        sizes = sorted({int(row["networks"]) for row in beside})
        many = f"{sizes[0]}" if len(sizes) == 1 else f"{sizes[0]} to {sizes[-1]}"
        lines.append([*kind, *_means(found), many])
        told = {name: _difference(name, found, beside) for name in JUDGED}
        judged.append([*kind[:2], many, len(found), *(interval for interval, _ in told.values())])
        words[", ".join(kind[:2])] = {name: word for name, (_, word) in told.items()}
    names = ["part", "model", "networks", *HEADER[4:], "plain members of the same seconds"]
    titles = ["part", "model", "plain members", "seeds"]
    titles += [f"{JUDGED[name]}, difference (95 %)" for name in JUDGED]
    return TEXT.format(
        seeds=", ".join(seeds),
        table=markdown_table(names, lines),
        verdict=markdown_table(titles, judged),
        shows=_shown(words),
        lacks="\n".join(f"- {each}" for each in [*_lacking(values, tried), *REMARKS]) or "Nothing.",
        chosen=markdown_table(TRIED, [[row[name] for name in TRIED] for row in tried]),
    )


def by_network(rows: list[dict[str, str]]) -> dict[tuple, dict[str, str]]:
    """Rows by part, model, number of networks and seed."""
    return {(r["part"], r["model"], r["networks"], r["seed"]): r for r in rows}


def _difference(
    name: str, found: list[dict[str, str]], beside: list[dict[str, str]]
) -> tuple[str, str]:
    """The mean difference of a score with its 95 % interval, and what it decides."""
    away = [float(a[name]) - float(b[name]) for a, b in zip(found, beside, strict=True)]
    if len(away) == 1:
        return f"{away[0]:+.4f} (one seed)", "not decided"
    half = t_quantile(0.975, len(away) - 1) * np.std(away, ddof=1) / math.sqrt(len(away))
    low, high = np.mean(away) - half, np.mean(away) + half
    word = "lower" if high < 0 else "higher" if low > 0 else "not decided"
    return f"{np.mean(away):+.4f} ({low:+.4f} to {high:+.4f})", word


def _shown(words: dict[str, dict[str, str]]) -> str:
    """What the intervals decide, score by score."""
    lines, forms = (
        [],
        {"lower": "lower for", "higher": "higher for", "not decided": "not decided for"},
    )
    for name, title in JUDGED.items():
        told = []
        for word, form in forms.items():
            kinds = [kind for kind, each in words.items() if each[name] == word]
            told += [f"{form} {'; '.join(kinds)}"] if kinds else []
        lines.append(f"- {title} beside as many seconds of plain members is {', and '.join(told)}.")
    undecided = all(word == "not decided" for each in words.values() for word in each.values())
    return "No difference is decided." if undecided else "\n".join(lines)


def _lacking(values: dict[tuple, dict[str, str]], tried: list[dict[str, str]]) -> list[str]:
    """Seeds, rows and settings of the plan that are not there."""
    found: dict[tuple[str, str], int] = {}
    for part, model, _, _ in values:
        found[part, model] = found.get((part, model), 0) + 1
    kinds = [(part, model) for part in PARTS for model in MODELS]
    kinds += [(part, f"laplace {kind}") for part, kind, _ in LAPLACE]
    lines = []
    for count, title in ((0, "No row"), (1, "One seed"), (2, "Two seeds")):
        which = [", ".join(kind) for kind in kinds if found.get(kind, 0) == count]
        lines += [f"{title}: {'; '.join(which)}."] if which else []
    for part in PARTS:
        for model, plan in (("draws", settings(part)), ("swag", cold_settings())):
            count = sum((row["part"], row["model"]) == (part, model) for row in tried)
            if count < len(plan):
                lines.append(f"Settings: {count} of {len(plan)} were tried for {part}, {model}.")
    return lines


def as_long(row: dict[str, str], values: dict[tuple, dict[str, str]]) -> dict[str, str]:
    """The plain ensemble of the same seed whose training takes as long, by whole members."""
    one = float(values["ensemble", "points", "1", row["seed"]]["seconds"])
    size = min(max(round(float(row["seconds"]) / one), 1), POOL)
    return values["ensemble", "points", str(size), row["seed"]]


def _means(found: list[dict[str, str]]) -> list[str]:
    """Means over seeds ± standard errors."""
    line = []
    for name, digits in zip(HEADER[4:], (4, 4, 4, 4, 4, 1), strict=True):
        each = [float(row[name]) for row in found]
        wide = len(each) > 1
        error = f" ± {np.std(each, ddof=1) / math.sqrt(len(each)):.{digits}f}" if wide else ""
        line.append(f"{np.mean(each):.{digits}f}{error}")
    return line


def complete(given: argparse.Namespace, file: Path, data: Data) -> None:
    """Add the rows of the seeds that are missing; no seed begins that would end too late."""
    began, longest = time.perf_counter(), 0.0
    chosen = best(read_csv(given.out / "chosen.csv", missing_ok=True))
    known = {row["seed"] for row in read_csv(file, missing_ok=True)}
    warm_up(data)
    for seed in [each for each in given.seeds.split(",") if each not in known]:
        start = time.perf_counter()
        if start - began + longest > given.within:
            break
        for part, model, networks, *numbers in compute(int(seed), data, given.skip, chosen):
            row = [part, seed, model, networks, *(f"{value:.6g}" for value in numbers)]
            append_rows(file, HEADER, [row])
            print(*row, flush=True)
        longest = max(longest, time.perf_counter() - start)


def main() -> None:
    """Do what is asked for."""
    parser = argparse.ArgumentParser(description="Draws of a residual network.")
    parser.add_argument("what", choices=("pack", "choose", "run", "page"))
    parser.add_argument("--data", type=Path, default=Path("fashion.npz"))
    parser.add_argument("--out", type=Path, default=PLACE)
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--skip", default="")
    parser.add_argument("--within", type=float, default=1e9, help="seconds for all seeds")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    file = given.out / "large.csv"
    if given.what == "pack":
        pack(given.data)
    elif given.what == "choose":
        data = Data(given.data, device, ("train", "held"))
        choose(data, given.within, given.out / "chosen.csv")
    elif given.what == "run":
        complete(given, file, Data(given.data, device, ("train", "test", "mnist", "kmnist")))
    else:
        (given.out / "large.md").write_text(
            page(read_csv(file), read_csv(given.out / "chosen.csv", missing_ok=True))
        )


if __name__ == "__main__":
    main()

"""The data sets of the study of `strength="auto"`: what trains, what chooses, what judges.

A fifth of the training data is held out and chooses. The test data judge: clean, under shifts that
the choice has not seen, and beside OOD inputs.

| kind | network | shifts that judge | OOD inputs |
| --- | --- | --- | --- |
| digits, grey images | perceptron, 2 hidden layers | all corruptions, severity 3 | another set |
| colour images | small CNN | all corruptions, severity 3 | another set |
| tables | perceptron, 1 layer of 50 | noise of half a standard deviation | columns permuted |
| features of EfficientNet-lite0 | linear | features of corrupted images | features of SVHN |
"""

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shoal.core.random import generator
from shoal.data.corruptions import with_corruptions
from shoal.data.files.raw import RAW
from shoal.data.load import load
from shoal.models import Blueprint, registry
from studies.common import image_set, test_of

TRAIN, TEST, CORRUPTED = 5_000, 1_500, 300
LARGEST_TABLE, ROWS = 10_000, 2_500
"""Tables with more training points (protein, naval) train on `ROWS` of them, drawn by the seed."""
OTHER = {
    "mnist": "fashion-mnist",
    "fashion-mnist": "mnist",
    "kmnist": "mnist",
    "notmnist": "fashion-mnist",
    "cifar10": "svhn",
    "svhn": "cifar10",
}
"""The OOD set of each set of images."""
TABLES = ("boston", "concrete", "energy", "wine", "yacht")
DESIGN = ("digits", "mnist", "fashion-mnist", "kmnist", "cifar10", "svhn", *TABLES, "features")
"""The sets on which the rule was designed."""
CHEAP = ("digits", *TABLES)
"""The sets of the design that train in seconds on a CPU; a controller was compared on them."""
SCIKIT_LEARN = {
    "breast-cancer": "load_breast_cancer",
    "diabetes": "load_diabetes",
    "wine-cultivars": "load_wine",
}
"""The tables of scikit-learn, and the functions that load them."""
UNSEEN_BEFORE = ("notmnist", "kin8nm", "power", "breast-cancer")
"""The sets that were opened after the rule was written, and came with it."""
UNSEEN_AFTER = ("diabetes", "wine-cultivars", "protein", "naval")
"""The sets that were opened after commit f792b82, which has the rule."""
UNSEEN = (*UNSEEN_BEFORE, *UNSEEN_AFTER)
"""The sets that took no part in the design."""
ALL = (*DESIGN, *UNSEEN)
SPLIT_IN_TEST = ("kmnist", "notmnist", "svhn")
"""Sets of which the published test images are divided into training and test images."""


@dataclass(frozen=True)
class Problem:
    """Data that train and judge, the network, and how it is trained.

    Attributes:
        x: training inputs.
        y: training targets.
        test: test inputs and targets.
        shifted: test inputs and targets under shift.
        ood: OOD inputs.
        build: makes one network.
        options: other arguments of `fit`.
    """

    x: Tensor
    y: Tensor
    test: tuple[Tensor, Tensor]
    shifted: tuple[Tensor, Tensor]
    ood: Tensor
    build: Callable[[], Any]
    options: dict[str, Any] = field(default_factory=dict)


def problem(name: str, seed: int, images: Any = None) -> Problem:
    """The problem called `name`; the seed chooses the split where there are several.

    Args:
        name: one of `DESIGN` or `UNSEEN`.
        seed: seed of the run.
        images: arrays `NAME_x` and `NAME_y` of the images; None reads them from the data folder.
    """
    if name == "digits":
        return _digits(seed)
    if name in OTHER:
        return _images(name, seed, images)
    if name == "features":
        return _features(seed)
    if name in SCIKIT_LEARN:
        return _scikit_learn(name, seed)
    return _uci(name, seed)


def read(name: str, images: Any = None) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Training images and labels, test images and labels."""
    if images is not None:
        x, y = images[f"{name}_x"], images[f"{name}_y"]
        return x[:TRAIN], y[:TRAIN], x[TRAIN:], y[TRAIN:]
    if name in SPLIT_IN_TEST:
        x, y = RAW[name]("test")
        return x[:TRAIN], y[:TRAIN], x[-TEST:], y[-TEST:]
    (x, y), (x_test, y_test) = (RAW[name](split) for split in ("train", "test"))
    return x[:TRAIN], y[:TRAIN], x_test[:TEST], y_test[:TEST]


def _images(name: str, seed: int, images: Any) -> Problem:
    x, y, x_test, y_test = read(name, images)
    other = read(OTHER[name], images)[2]
    make = partial(image_set, "images", (x, y))
    data = make((x_test, y_test))
    few = make((x_test[:CORRUPTED], y_test[:CORRUPTED]))
    ood = test_of(make((other, np.zeros(len(other))))).x
    model = "mlp" if x.ndim == 3 or x.shape[1] == 1 else "small-cnn"
    settings = {"hidden": [200, 200]} if model == "mlp" else {}
    network = registry.make({"name": model, **settings})
    return Problem(
        data.train.x,
        data.train.y,
        (test_of(data).x, test_of(data).y),
        _joined(with_corruptions(few, severities=(3,)).shifts.values()),
        ood,
        Blueprint(network, data.input_shape, 10),
        {"epochs": 20, "batch_size": 128, "lr": 1e-3, "schedule": "cosine"},
    )


def _joined(splits: Any) -> tuple[Tensor, Tensor]:
    found = [(split.x.cpu(), split.y.cpu()) for split in splits]
    return torch.cat([x for x, _ in found]), torch.cat([y for _, y in found])


def _digits(seed: int) -> Problem:
    data = load({"name": "digits", "seed": seed})
    network = registry.make({"name": "mlp", "hidden": [100, 100]})
    corrupted = with_corruptions(data, severities=(3,)).shifts
    keep = [s for name, s in corrupted.items() if not name.startswith("rotated")]
    return Problem(
        data.train.x,
        data.train.y,
        (test_of(data).x, test_of(data).y),
        _joined(keep),
        data.ood["photographs"].x,
        Blueprint(network, data.input_shape, 10),
        {"epochs": 40, "batch_size": 128, "lr": 1e-3, "schedule": "cosine"},
    )


def _uci(name: str, seed: int) -> Problem:
    data = load({"name": "uci", "problem": name, "split": seed})
    x, y = data.train.x, data.train.y
    if len(x) > LARGEST_TABLE:
        some = torch.randperm(len(x), generator=generator(seed, "rows"))[:ROWS]
        x, y = x[some], y[some]
    return _table((x, y), (test_of(data).x, test_of(data).y), seed)


def _scikit_learn(name: str, seed: int) -> Problem:
    from sklearn import datasets

    x, y = getattr(datasets, SCIKIT_LEARN[name])(return_X_y=True)
    order = torch.randperm(len(x), generator=generator(seed, "split"))
    x, y = torch.from_numpy(x)[order].float(), torch.from_numpy(y)[order]
    end = round(0.8 * len(x))
    x = (x - x[:end].mean(0)) / x[:end].std(0)
    y = ((y - y[:end].mean()) / y[:end].std()).float() if y.is_floating_point() else y.long()
    return _table((x[:end], y[:end]), (x[end:], y[end:]), seed)


def _table(train: tuple[Tensor, Tensor], test: tuple[Tensor, Tensor], seed: int) -> Problem:
    """A table of standardised columns; targets are standardised numbers or classes."""
    (x, y), (x_test, y_test) = train, test
    continuous = y.is_floating_point()
    network = registry.make({"name": "mlp", "hidden": [50]})
    options = {"epochs": 40, "batch_size": 100, "lr": 1e-2, "schedule": "cosine"}
    return Problem(
        x,
        y,
        test,
        (_noisy(x_test, seed), y_test),
        _permuted(x_test, seed),
        Blueprint(network, (x.shape[1],), 2 if continuous else int(y.max()) + 1),
        options | ({"likelihood": "heteroscedastic"} if continuous else {}),
    )


def _noisy(x: Tensor, seed: int) -> Tensor:
    return x + 0.5 * torch.randn(x.shape, generator=generator(seed, "noise"))


def _permuted(x: Tensor, seed: int) -> Tensor:
    """Every column in an order of its own: the same values, not together."""
    order = torch.rand(x.shape, generator=generator(seed, "columns")).argsort(0)
    return x.gather(0, order)


def _features(seed: int) -> Problem:
    from safetensors.torch import load_file

    home = Path(os.environ.get("SHOAL_PRETRAINED", Path.home() / ".cache/shoal-pretrained"))
    names = ("train", "test", "svhn", "corrupted")
    x = {n: load_file(home / f"features/{n}.safetensors")["x"].float() for n in names}
    labels = torch.from_numpy(np.load(home / "pack/labels.npy")).long()
    y, tested = labels[: len(x["train"])], labels[-len(x["test"]) :]
    some = slice(1_000 * seed, 1_000 * (seed + 1))
    mean, std = x["train"][some].mean(0), x["train"][some].std(0) + 1e-3
    x = {name: (value - mean) / std for name, value in x.items()}
    x["corrupted"] = x["corrupted"][::4]
    network = registry.make({"name": "mlp", "hidden": []})
    return Problem(
        x["train"][some],
        y[some],
        (x["test"], tested),
        (x["corrupted"], tested[:1_000].repeat(19)[::4]),
        x["svhn"],
        Blueprint(network, (x["train"].shape[1],), 10),
        {"epochs": 40, "batch_size": 128, "lr": 1e-3, "schedule": "cosine"},
    )

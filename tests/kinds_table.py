"""The table of kinds of network and data, which `tests/kinds` trains and `docs/networks.md` shows.

A kind says how its data come, how a user calls its network and which loss of torch it minimises.
"""

import functools
import importlib.util
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import kinds_networks as networks
import pytest
import torch
from kinds_networks import CLASSES, LENGTH, PLACES, WORDS, Graphs, Point, Record, library
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader, IterableDataset

from shoal import likelihoods

POINTS, BATCH = 12, 6
IGNORED = -100
METHODS = ("ensemble", "kde", "f-kde", "forde")


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def whole(top: int, *shape: int, seed: int = 1) -> Tensor:
    """Whole numbers below `top`; the first of them are 0, 1, ..., so that all values occur."""
    found = torch.randint(0, top, shape, generator=torch.Generator().manual_seed(seed))
    found.view(-1)[:top] = torch.arange(top)
    return found


LABELS = whole(CLASSES, POINTS)


@dataclass(frozen=True, eq=False)
class Kind:
    """One row of the table.

    Attributes:
        name: name of the kind.
        batch: the inputs and targets of a batch, in words.
        build: makes a network, or a list of (build, count).
        x: all inputs, as the network takes them, or a function that makes them.
        y: their targets.
        data: the training data, as a user gives them; None for the pair (x, y).
        loss: the loss of torch for outputs as the network returns them.
        raw: the output that is trained, of whatever the network returns.
        shape: shape of the members' outputs without the member axis.
        options: further arguments of `fit`.
        forde: the method that repels input gradients; None if there are no input gradients.
        weights: whether the members have a common space of weights.
        together: whether `vmap` runs all members at once.
        report: whether the test writes a report; otherwise it evaluates only.
        needs: library that must be installed.
    """

    name: str
    batch: str
    build: Any
    x: Any
    y: Any = field(default_factory=lambda: LABELS)
    data: Callable[[], Any] | None = None
    loss: Callable[[Tensor, Tensor], Tensor] = F.cross_entropy
    raw: Callable[[Any], Tensor] = lambda outputs: outputs
    shape: tuple[int, ...] = (POINTS, CLASSES)
    options: dict[str, Any] = field(default_factory=dict)
    forde: str | None = "forde"
    weights: bool = True
    together: bool = True
    report: bool = False
    needs: str | None = None

    def training(self) -> Any:
        """The training data, new for every run."""
        return (self.x, self.y) if self.data is None else self.data()

    def method(self, name: str) -> str | None:
        """The method for a column of the table; None if the kind has none."""
        if name == "kde":
            return name if self.weights else None
        return self.forde if name == "forde" else name

    @property
    def inputs(self) -> Any:
        """All inputs."""
        return self.x() if callable(self.x) else self.x

    @property
    def members(self) -> int | None:
        """Ensemble size for `Ensemble.init`."""
        return None if isinstance(self.build, list) else 2

    def by_hand(self, member: torch.nn.Module) -> Tensor:
        """Outputs of one network, called as a user calls it."""
        x = self.inputs
        if isinstance(x, dict):
            return self.raw(member(**x))
        if type(x) is tuple:
            return self.raw(member(*x))
        return self.raw(member(x))


def installed(library: str) -> bool:
    return importlib.util.find_spec(library) is not None


def _rows(x: Any, rows: Any) -> Any:
    if isinstance(x, dict):
        return {name: tensor[rows] for name, tensor in x.items()}
    return x[rows]


def _encoded() -> DataLoader:
    """A loader of `BatchEncoding`, as tokenizers and collators of transformers give them."""
    encoding = library("transformers").BatchEncoding
    points = [{**_rows(TEXT, i), "labels": LABELS[i]} for i in range(POINTS)]

    def collate(points: list[dict[str, Tensor]]) -> Any:
        return encoding({name: torch.stack([p[name] for p in points]) for name in points[0]})

    return DataLoader(points, BATCH, shuffle=True, collate_fn=collate)  # pyright: ignore


class Stream(IterableDataset):
    """Data points one after another, without a length."""

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        yield from zip(FEATURES, LABELS, strict=True)


def _ring(nodes: int) -> Tensor:
    start = torch.arange(nodes)
    return torch.stack([start, (start + 1) % nodes])


def _graphs(rows: range) -> Graphs:
    """Rings of three to five nodes, as one batch."""
    sizes = [3 + i % 3 for i in rows]
    firsts = [sum(sizes[:i]) for i in range(len(sizes))]
    edges = [_ring(size) + first for size, first in zip(sizes, firsts, strict=True)]
    owner = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
    nodes = torch.cat([random(size, 4, seed=i) for i, size in zip(rows, sizes, strict=True)])
    return Graphs(nodes, torch.cat(edges, 1), owner, LABELS[rows.start : rows.stop])


@functools.cache
def _geometric() -> list[Any]:
    data = library("torch_geometric.data").Data
    return [
        data(x=random(3 + i % 3, 4, seed=i), edge_index=_ring(3 + i % 3), y=LABELS[i : i + 1])
        for i in range(POINTS)
    ]


def _labels(i: int) -> tuple[Tensor, Tensor]:
    """Energy [1] and forces [n, 3] of a molecule."""
    return random(1, seed=i), random(3 + i % 3, 3, seed=i + 50)


@functools.cache
def _atoms() -> list[Any]:
    """Molecules of three to five atoms, all of them neighbours, with energies and forces."""
    data, found = library("torch_geometric.data").Data, []
    for i in range(POINTS):
        size = 3 + i % 3
        edges = (~torch.eye(size, dtype=torch.bool)).nonzero().T
        pos, z = random(size, 3, seed=i + 99), torch.arange(size)
        found.append(data(pos=pos, z=z, edge_index=edges, y=_labels(i)))
    return found


def _atoms_loader(size: int = BATCH, shuffle: bool = True) -> Any:
    return library("torch_geometric.loader").DataLoader(_atoms(), batch_size=size, shuffle=shuffle)


def _all_atoms() -> Any:
    return next(iter(_atoms_loader(POINTS, shuffle=False)))


@dataclass(frozen=True, eq=False)
class ForceKind(Kind):
    """Energies and forces, for which outputs end in the forces of each molecule."""

    def by_hand(self, member: torch.nn.Module) -> Tensor:
        """Energies [B, 1], then the forces of five atoms; zeros follow in smaller molecules."""
        x = self.inputs
        x.pos.requires_grad_()
        energy = member(x)
        (slope,) = torch.autograd.grad(energy.sum(), x.pos, create_graph=True)
        rows = [
            F.pad(-part, (0, 0, 0, 5 - len(part))) for part in slope.split(x.ptr.diff().tolist())
        ]
        return torch.cat([energy, torch.stack(rows).flatten(1)], 1)


def _force_loss(outputs: Tensor, y: tuple[Tensor, Tensor]) -> Tensor:
    """Minus the log density with a noise of 1: of B energies, and of three numbers an atom."""
    energy, forces = y
    kept = [row[: 3 * (3 + i % 3)] for i, row in enumerate(outputs[:, 1:])]
    errors = torch.cat([outputs[:, 0] - energy, torch.cat(kept) - forces.flatten()])
    return 0.5 * (errors.square().sum() + errors.numel() * math.log(2 * math.pi)) / len(energy)


def _geometric_loader(size: int = BATCH, shuffle: bool = True) -> Any:
    loader = library("torch_geometric.loader").DataLoader
    return loader(_geometric(), batch_size=size, shuffle=shuffle)


def _all_graphs() -> Any:
    return next(iter(_geometric_loader(POINTS, shuffle=False)))


def _masked(y: Tensor, ignored: int) -> Tensor:
    """The targets with about a third of them ignored."""
    hidden = torch.rand(y.shape, generator=torch.Generator().manual_seed(3)) < 0.3
    return torch.where(hidden, ignored, y)


def _tokens_last(loss: Callable[..., Tensor], **options: Any) -> Callable[[Tensor, Tensor], Tensor]:
    """torch wants the classes of [B, T, C] in the second axis."""
    return lambda outputs, y: loss(outputs.movedim(-1, 1), y, **options)


FEATURES, TOKEN = random(POINTS, 4), whole(WORDS, POINTS)
IMAGES, SEQUENCES = random(POINTS, 1, PLACES, PLACES), random(POINTS, LENGTH, 4)
PIXELS = whole(CLASSES, POINTS, PLACES, PLACES)
TOKENS, NEXT = whole(WORDS, POINTS, LENGTH), whole(WORDS, POINTS, LENGTH, seed=2)
TEXT = {
    "input_ids": TOKENS,
    "attention_mask": (TOKENS > 1).long().index_fill(1, torch.tensor([0]), 1),
}
TOKEN_SHAPE, PIXEL_SHAPE = (POINTS, LENGTH, WORDS), (POINTS, PLACES, PLACES, CLASSES)
HUGGING_FACE: dict[str, Any] = {"raw": lambda outputs: outputs.logits, "needs": "transformers"}
IGNORING: dict[str, Any] = {"likelihood": {"name": "categorical", "ignore_index": IGNORED}}


def _kinds() -> Iterator[Kind]:
    real = {"x": FEATURES}
    yield Kind("perceptron", "x [B, D], y [B]", networks.perceptron, **real, report=True)
    yield Kind("CNN with BatchNorm", "images [B, C, H, W], y [B]", networks.cnn, IMAGES)
    yield Kind(
        "U-Net", "images, y [B, H, W]", networks.UNet, IMAGES, PIXELS, shape=PIXEL_SHAPE,
        report=True,
    )  # fmt: skip
    yield Kind(
        "U-Net with ignored pixels", "images, y [B, H, W] with -100", networks.UNet, IMAGES,
        _masked(PIXELS, IGNORED), shape=PIXEL_SHAPE, options=IGNORING,
    )  # fmt: skip
    yield Kind(
        "ViT", '{"pixel_values", "labels"}', networks.vit, {"pixel_values": IMAGES},
        data=lambda: {"pixel_values": IMAGES, "labels": LABELS}, **HUGGING_FACE,
    )  # fmt: skip
    yield Kind(
        "BERT", "loader of `BatchEncoding`", networks.bert, TEXT, data=_encoded,
        forde="forde-identity", report=True, **HUGGING_FACE,
    )  # fmt: skip
    yield Kind(
        "GPT-2", '{"input_ids", "attention_mask", "labels" [B, T] with -100}', networks.gpt2, TEXT,
        _masked(NEXT, IGNORED), lambda: {**TEXT, "labels": _masked(NEXT, IGNORED)},
        loss=_tokens_last(F.cross_entropy), shape=TOKEN_SHAPE, forde="forde-identity", report=True,
        **HUGGING_FACE,
    )  # fmt: skip
    yield Kind("LSTM", "sequences [B, T, D], y [B]", networks.lstm, SEQUENCES, together=False)
    yield Kind("GRU", "sequences [B, T, D], y [B]", networks.gru, SEQUENCES)
    yield from _graph_kinds()
    yield from _structured_kinds()
    yield from _unusual_modules()
    yield from _one_trunk()
    yield Kind(
        "several labels", "x [B, D], y [B, K] of 0 and 1", networks.perceptron, **real,
        y=whole(2, POINTS, CLASSES).float(), loss=_summed(F.binary_cross_entropy_with_logits),
        options={"likelihood": "bernoulli"},
    )  # fmt: skip
    yield Kind(
        "counts", "x [B, D], y [B] of counts", networks.counter, **real,
        y=whole(4, POINTS).float(), shape=(POINTS, 1), options={"likelihood": "poisson"},
        loss=lambda f, y: F.poisson_nll_loss(f[:, 0], y) + torch.lgamma(y + 1).mean(),
    )  # fmt: skip


def _summed(loss: Callable[..., Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda outputs, y: loss(outputs, y, reduction="none").sum(-1).mean()


def _graph_kinds() -> Iterator[Kind]:
    yield Kind(
        "graph network (torch_geometric)", "loader of graph batches with `y`", networks.gcn,
        _all_graphs, data=_geometric_loader, forde=None, report=True, needs="torch_geometric",
    )  # fmt: skip
    yield Kind(
        "graph network", "objects with `.to` and `y`", networks.GraphNetwork,
        _graphs(range(POINTS)), data=lambda: [_graphs(range(6)), _graphs(range(6, POINTS))],
        forde=None,
    )  # fmt: skip
    pairs = map(_labels, range(POINTS))
    labels = tuple(torch.cat(parts) for parts in zip(*pairs, strict=True))
    forces = likelihoods.WithDerivatives(likelihoods.Gaussian(), of="pos", sign=-1)
    yield ForceKind(
        "energies and forces (torch_geometric)", "loader of graph batches with `y` a pair",
        networks.schnet, _all_atoms, labels, data=_atoms_loader, loss=_force_loss,
        shape=(POINTS, 16), options={"likelihood": forces}, forde=None, report=True,
        needs="torch_geometric",
    )  # fmt: skip


def _structured_kinds() -> Iterator[Kind]:
    two = (FEATURES, TOKEN)
    yield Kind("two inputs", "(a, b), y [B]", networks.TwoInputs, two)
    named = {"features": FEATURES, "token": TOKEN}
    yield Kind("dict of two inputs", '{"a", "b"}, y [B]', networks.TwoInputs, named)
    yield Kind("named tuple", "NamedTuple(a, b), y [B]", networks.OneObject, Point(*two))
    yield Kind("dataclass", "dataclass(a, b), y [B]", networks.OneObject, Record(*two))
    yield Kind(
        "IterableDataset", "points (x, y) without a length", networks.perceptron, FEATURES,
        data=Stream,
    )  # fmt: skip


def _unusual_modules() -> Iterator[Kind]:
    mixed = [(networks.perceptron, 1), (networks.wide_perceptron, 1)]
    yield Kind("mixed architectures", "x [B, D], y [B]", mixed, FEATURES, weights=False)
    yield Kind(
        "tied weights", "tokens [B, T], y [B, T]", networks.Tied, TOKENS, NEXT,
        loss=_tokens_last(F.cross_entropy), shape=TOKEN_SHAPE, forde="forde-identity",
    )  # fmt: skip
    yield Kind("spectral norm", "x [B, D], y [B]", networks.spectral, FEATURES, together=False)
    yield Kind(
        "spectral norm by a hook", "x [B, D], y [B]", networks.spectral_by_hook, FEATURES,
        together=False,
    )  # fmt: skip
    yield Kind("weight norm", "x [B, D], y [B]", networks.weight_normed, FEATURES)
    yield Kind("orthogonal weights", "x [B, D], y [B]", networks.orthogonal, FEATURES)
    yield Kind("lazy layers, called once", "x [B, D], y [B]", networks.lazy_called, FEATURES)
    first = {"raw": lambda outputs: outputs[0]}
    yield Kind("(logits, extra)", "x [B, D], y [B]", networks.WithExtra, FEATURES, **first)
    yield Kind(
        "dict of outputs", 'x [B, D], y [B]; `outputs="scores"`', networks.Several, FEATURES,
        raw=lambda outputs: outputs["scores"], options={"outputs": "scores"},
    )  # fmt: skip


def _one_trunk() -> Iterator[Kind]:
    """Members that share a trunk, frozen or trained by all of them."""
    images, table = "images [B, C, H, W], y [B]", "x [B, D], y [B]"
    yield Kind("low-rank adapters on a CNN", images, networks.low_rank, IMAGES, report=True)
    yield Kind("last layers on a CNN", images, networks.last_layers, IMAGES)
    yield Kind("scales on a CNN", images, networks.scales, IMAGES)
    text = {"data": _encoded, "forde": "forde-identity", **HUGGING_FACE}
    yield Kind(
        "low-rank adapters on BERT", "loader of `BatchEncoding`", networks.low_rank_bert, TEXT,
        **text,
    )  # fmt: skip
    text["needs"] = "peft"
    yield Kind("peft model", "loader of `BatchEncoding`", networks.peft_bert, TEXT, **text)
    yield Kind("multi-head", table, networks.multi_head, FEATURES)
    yield Kind("batch-ensemble", table, networks.rank_one, FEATURES)
    yield Kind("TabM", table, networks.tabm, FEATURES, report=True)


KINDS = list(_kinds())


def cases(*columns: str, works: bool = True) -> list[Any]:
    """Parameters for every kind, or for every kind and each of these methods that it takes.

    With `works=False`, methods that it cannot take. `make test` has every kind with f-kde and, in
    turn, with one other method; the whole product is left to `make nightly`.
    """
    parameters = []
    for number, kind in enumerate(KINDS):
        missing = kind.needs is not None and not installed(kind.needs)
        mark = pytest.mark.skipif(missing, reason=f"{kind.needs} is not installed")
        if not columns:
            parameters.append(pytest.param(kind, id=kind.name, marks=mark))
        for column in columns:
            if (kind.method(column) is not None) == works:
                usual = column in ("f-kde", METHODS[number % len(METHODS)]) or not works
                marks = [mark] if usual else [mark, pytest.mark.nightly]
                values = kind, column if kind.method(column) is None else kind.method(column)
                parameters.append(pytest.param(*values, id=f"{kind.name}-{column}", marks=marks))
    return parameters


def markdown() -> str:
    """The table as `docs/networks.md` shows it."""
    heads = ["kind", "data", *(f"`{name}`" for name in METHODS), "stored", "scored", "members"]
    lines = [_line(heads), _line(["---"] * len(heads))]
    for kind in KINDS:
        methods = [_method_cell(kind, name) for name in METHODS]
        scored = "evaluate, report" if kind.report else "evaluate"
        running = "together" if kind.together else "in turn"
        shown = kind.batch.replace("|", "\\|")
        lines.append(_line([kind.name, shown, *methods, "load, resume", scored, running]))
    return "\n".join(lines)


def _method_cell(kind: Kind, name: str) -> str:
    method = kind.method(name)
    return "refused" if method is None else "yes" if method == name else f"`{method}`"


def _line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"

"""A look at data and networks before training, which warns of likely mistakes.

A check is one function in `CHECKS`. It sees a `View`: a few hundred data points, and what is known
without reading more. It returns one sentence with the line to write, or None.
"""

import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from shoal.core.display.text import counted
from shoal.core.errors import ShoalWarning
from shoal.core.opaque import Opaque, tensors_in
from shoal.core.random import key
from shoal.core.structure import Inputs, parted
from shoal.data.batches.batch import Targets, raw_batch, targets_of
from shoal.data.batches.sources import ArrayBatches, LoaderBatches
from shoal.data.dataset import Dataset
from shoal.engine.members.network_call import call_network
from shoal.inference.ensemble import Ensemble
from shoal.inference.likelihoods import Bernoulli, Categorical, Gaussian, Likelihood
from shoal.inference.likelihoods.labels import Classes
from shoal.inference.likelihoods.real_targets import RealTargets
from shoal.inference.posterior import drawn_outputs
from shoal.inference.priors import Gaussian as GaussianPrior

__all__ = ["CHECKS", "View", "look", "warn"]

POINTS = 256
"""Data points that a check looks at."""

FEW = 4
"""Data points that pass through all members, or through a network of images or sequences."""

FAR = 30.0
"""Root mean square of an input from which it is far from unit scale; 1 / FAR² is as far below."""

ENOUGH = 20
"""Data points from which equality of a column with something else is no chance."""

PER_CLASS = 5
"""Data points per class from which a class that does not occur is no chance."""


@dataclass(frozen=True, eq=False)
class View:
    """What a look sees.

    Attributes:
        ensemble: the members, untrained or trained.
        likelihood: the likelihood of the run.
        chosen: whether the user named the likelihood.
        x: up to `POINTS` inputs.
        y: their targets; None for a structure of targets.
        points: number of data points N; None if it is not known without reading.
        inputs: all inputs [N, ...]; None if they are not in memory.
        targets: all targets [N, ...]; None if they are not in memory.
        names: names of the columns of a table.
        prepared: whether a data set or an estimator has prepared the inputs.
        samples: whether members are samples of the posterior, of which more are better.
    """

    ensemble: Ensemble
    likelihood: Likelihood
    chosen: bool
    x: Inputs
    y: Tensor | None
    points: int | None = None
    inputs: Tensor | None = None
    targets: Tensor | None = None
    names: Sequence[str] | None = None
    prepared: bool = False
    samples: bool = False

    @cached_property
    def outputs(self) -> Tensor | None:
        """Outputs of a member for a few inputs [1, B, *S, C]; None if they cannot be had."""
        return self._outputs_of(self.ensemble.slice_members(0, 1))

    @cached_property
    def every_output(self) -> Tensor | None:
        """Outputs of all members [M, B, *S, C], which take as long as many steps on a GPU."""
        return self._outputs_of(self.ensemble)

    def _outputs_of(self, members: Ensemble) -> Tensor | None:
        few = self._as_taken(FEW)
        with _aside(self.ensemble):
            try:
                return members.without_side_effects().train(False)(few).double()
            except Exception:  # a network that takes whole batches alone; `fit` calls it properly
                return None

    def sentences(self) -> list[str]:
        """The sentences of all checks."""
        return [sentence for check in CHECKS if (sentence := check(self)) is not None]

    @property
    def table(self) -> Tensor | None:
        """Rows of a table of real numbers [B, D] with D > 1; None for other inputs."""
        x = self.x
        if not isinstance(x, Tensor) or x.ndim != 2 or x.shape[1] < 2:
            return None
        return x.double() if x.is_floating_point() else None

    def column(self, index: int) -> str:
        """The name of a column of the table, as a sentence calls it."""
        return f"column {index if self.names is None else repr(str(self.names[index]))} of x"

    @cached_property
    def entries(self) -> list[tuple[nn.Module, Tensor]]:
        """The first layer with weights of each architecture, and the real numbers it gets."""
        flat = isinstance(self.x, Tensor) and self.x.ndim == 2
        few, found = self._as_taken(POINTS if flat else FEW), []
        for group in self.ensemble.groups:
            with _aside(self.ensemble), _entry(group.skeleton) as first, suppress(Exception):
                call_network(group.skeleton, group.first_member(), group.taken(few))
            found += first[:1]
        return found

    def _as_taken(self, rows: int) -> Inputs:
        x = self.x if isinstance(self.x, Opaque) else self.x[:rows]
        x = x.to(self.ensemble.device)
        real = not isinstance(x, Tensor) or x.is_floating_point()
        return x.to(self.ensemble.dtype) if real else x


@contextmanager
def _aside(ensemble: Ensemble) -> Iterator[None]:
    """A block whose passes leave generators, modes and statistics as they were, and stay silent."""
    modes = [(m, m.training) for group in ensemble.groups for m in group.skeleton.modules()]
    generators = [ensemble.device] if ensemble.device.type == "cuda" else []
    with warnings.catch_warnings(), torch.no_grad(), torch.random.fork_rng(generators):
        warnings.simplefilter("ignore")
        for module, _ in modes:
            module.training = False
        try:
            yield
        finally:
            for module, mode in modes:
                module.training = mode


@contextmanager
def _entry(network: nn.Module) -> Iterator[list[tuple[nn.Module, Tensor]]]:
    """The first layer with weights or statistics, with its real inputs; the pass ends there."""
    called: list[tuple[nn.Module, Tensor]] = []

    def note(module: nn.Module, values: tuple[Any, ...]) -> None:
        value = values[0] if values else None
        if isinstance(value, Tensor) and value.is_floating_point():
            called.append((module, value.detach()))
            raise StopIteration

    leaves = [module for module in network.modules() if not list(module.children())]
    weighted = [leaf for leaf in leaves if list(leaf.parameters()) or _normalises(leaf)]
    hooks = [leaf.register_forward_pre_hook(note) for leaf in weighted]
    try:
        yield called
    finally:
        for hook in hooks:
            hook.remove()


def _normalises(module: nn.Module) -> bool:
    """Whether a layer standardises what it gets: BatchNorm, LayerNorm, RMSNorm and the like."""
    return "norm" in type(module).__name__.lower()


def probabilities_already(view: View) -> str | None:
    """Outputs of a softmax or sigmoid, to which the likelihood would apply another.

    A softmax shows in rows of sum 1. A sigmoid shows in outputs between 0 and 1 for the members and
    for networks with large random weights, which other networks leave.
    """
    likelihood = view.likelihood
    if not isinstance(likelihood, Categorical | Bernoulli) or not _are_shares(view.outputs):
        return None
    outputs = view.every_output
    if outputs is None or not _are_shares(outputs):
        return None
    name = "softmax" if isinstance(likelihood, Categorical) else "sigmoid"
    what = "softmax" if bool(((outputs.sum(-1) - 1).abs() < 1e-4).all()) else "sigmoid"
    if (what == "sigmoid" or outputs.shape[-1] == 1) and not _stay_within(view):
        return None
    return (
        f"The outputs of the network are probabilities already, but the likelihood applies a "
        f"{name} itself; let the network return logits: leave out its last {what}."
    )


def _stay_within(view: View) -> bool:
    """Whether outputs are between 0 and 1 for networks of weights from N(0, 10²) too."""
    few = view._as_taken(FEW)
    with _aside(view.ensemble):
        try:
            start = key(0, "look", 0, view.ensemble.device)
            outputs = drawn_outputs(view.ensemble, GaussianPrior(10.0), 4, few, start)
        except Exception:
            return False
    return _are_shares(outputs)


def _are_shares(outputs: Tensor | None) -> bool:
    """Whether there are outputs, and all are between 0 and 1.

    Zeros alone, of a last layer that starts at zero, are no shares.
    """
    if outputs is None or not outputs.any():
        return False
    return bool(((outputs >= 0) & (outputs <= 1)).all())


def far_from_unit_scale(view: View) -> str | None:
    """Inputs whose root mean square, sqrt(mean² + std²), is above 30 or below 0.001.

    The first layer with weights decides: a network may scale its inputs itself.
    """
    if not any(tensor.is_floating_point() for tensor in tensors_in(view.x)):
        return None
    for layer, values in view.entries:
        axis = 1 if isinstance(layer, nn.modules.conv._ConvNd) and values.ndim > 2 else -1
        columns = values.double().movedim(axis, -1).flatten(0, -2)
        size = columns.square().mean(0).sqrt()
        most = float(size.max())
        if _normalises(layer) or most == 0 or 1 / FAR**2 <= most <= FAR:
            continue
        worst, mean, std = int(size.argmax()), columns.mean(0), columns.std(0, correction=0)
        what, line = "The inputs are far from unit scale, with", "x = (x - x.mean()) / x.std()"
        if _are_pixels(view.x):
            line = "x = x / 255, or pass x as bytes (uint8)"
        elif isinstance(view.x, Tensor) and values.shape == view.x.shape and values.ndim == 2:
            count = int((size > FAR).sum()) if most > FAR else len(size)
            verb = "is" if count == 1 else "are"
            what = f"{counted(count, 'column')} of x {verb} far from unit scale; "
            what += f"{view.column(worst)} has"
            line = "x = (x - x.mean(0)) / x.std(0)" + ("" if std.all() else ".clip(1e-6)")
        return (
            f"{what} mean {mean[worst]:.3g} and standard deviation {std[worst]:.3g}, from which "
            f"networks learn poorly; type {line}, and change later inputs by the same numbers."
        )
    return None


def _are_pixels(x: Inputs) -> bool:
    """Whether inputs are images, or their rows, with numbers from 0 to 255."""
    if not isinstance(x, Tensor) or x[0].numel() < ENOUGH:
        return False
    low, high = x.aminmax()
    dark = float((x.amin(0) == 0).double().mean())
    return bool(low >= 0) and 16 < float(high) <= 255 and (x.ndim > 2 or dark > 0.5)


def constant_columns(view: View) -> str | None:
    """Columns of a table that have one value for all data points.

    Pixels that are dark everywhere, at the smallest value of the table, are not told. Nor are
    columns of zeros in a standardised table, where a constant has become 0.
    """
    table, whole = view.table, view.inputs
    if table is None or whole is None or view.prepared or len(table) < ENOUGH:
        return None
    candidates = (table == table[:1]).all(0).nonzero().flatten().tolist()
    constant = [c for c in candidates if bool((whole[:, c] == whole[0, c]).all())]
    others = [c for c in range(table.shape[1]) if c not in constant]
    if not constant or not others:
        return None
    rest = table[:, others]
    lows, mean, std = rest.amin(0), rest.mean(0), rest.std(0, correction=0)
    pixels = float((lows == lows.min()).double().mean()) > 0.5
    standardised = float(((mean.abs() < 0.2) & ((std - 1).abs() < 0.2)).double().mean()) > 0.5
    quiet = [float(lows.min())] if pixels else [0.0] if standardised else []
    told = [c for c in constant if all(abs(float(whole[0, c]) - q) > 1e-6 for q in quiet)]
    if not told:
        return None
    first, more = told[0], len(told) - 1
    also = f", as {'is' if more == 1 else 'are'} {counted(more, 'other')}" if more else ""
    line = "x[:, x.std(0) > 0]" if view.names is None else "x.loc[:, x.std() > 0]"
    return (
        f"{_sentence(view.column(first))} is {float(whole[0, first]):g} for every data point"
        f"{also}, and tells nothing; leave such columns out: x = {line}."
    )


def leaked_target(view: View) -> str | None:
    """A column that is the target, up to shift and scale: its correlation with y is 1 or -1."""
    table, y = view.table, view.y
    if table is None or y is None or len(table) < ENOUGH:
        return None
    y = y.squeeze(-1) if y.ndim == 2 and y.shape[-1] == 1 else y
    if y.ndim != 1 or not (found := _equal_columns(table, y)):
        return None
    if view.inputs is not None and view.targets is not None:
        found = _equal_columns(view.inputs[:, found].double(), view.targets.flatten(), found)
    if not found:
        return None
    line = f"numpy.delete(x, {found[0]}, axis=1)"
    if view.names is not None:
        line = f"x.drop(columns={view.names[found[0]]!r})"
    return (
        f"{_sentence(view.column(found[0]))} is the target itself, up to shift and scale, so the "
        f"scores will mean nothing; leave it out: x = {line}."
    )


def _equal_columns(table: Tensor, y: Tensor, numbers: Sequence[int] | None = None) -> list[int]:
    """Columns whose correlation with y [N] is 1 or -1, to one in a million."""
    centred, target = table - table.mean(0), y.double().to(table.device)
    target = target - target.mean()
    sizes = centred.square().sum(0) * target.square().sum()
    square = (centred.T @ target).square()
    equal = ((sizes > 0) & (square > (1 - 1e-6) * sizes)).nonzero().flatten().tolist()
    return [c if numbers is None else numbers[c] for c in equal]


def labels_as_numbers(view: View) -> str | None:
    """Targets 0.0 and 1.0 to regress on, because they are floats and no likelihood was named."""
    y = view.y if view.targets is None else view.targets
    if view.chosen or y is None or not isinstance(view.likelihood, RealTargets):
        return None
    ones = y == 1
    if not bool((ones | (y == 0)).all()) or not ones.any() or ones.all():
        return None
    two = view.outputs is not None and view.outputs.shape[-1] == 2
    line = "y = y.astype(int) (y.long() for a tensor)" if two else "likelihood='bernoulli'"
    return (
        f"The targets are 0 and 1 as floats, so they are taken for real numbers with Gaussian "
        f"noise; for two classes type {line}, for real numbers likelihood='homoscedastic'."
    )


def few_classes(view: View) -> str | None:
    """All targets are of one class, or some classes of the network never occur."""
    y, likelihood = view.targets, view.likelihood
    classes = isinstance(likelihood, Classes | Bernoulli)
    if y is None or not classes or len(y) < 2 or y.numel() > len(y):
        return None
    counts = likelihood.counted(y)
    known = (y if counts is None else y[counts]).flatten()
    if y.is_floating_point() and bool((known != known.round()).any()):
        return None  # soft labels
    present = known.long().bincount().nonzero().flatten().tolist()
    if len(present) == 1:
        return (
            f"All {len(y):,} targets are of the class {present[0]}, so there is nothing to tell "
            f"apart; give data points of the other classes too."
        )
    if not isinstance(likelihood, Classes) or view.outputs is None:
        return None
    total = likelihood.classes(view.outputs.shape[-1])
    missing = sorted(set(range(total)) - set(present))
    if not missing or len(y) < PER_CLASS * total:
        return None
    shown = ", ".join(map(str, missing[:3])) + (", ..." if len(missing) > 3 else "")
    which = f"class {shown} never occurs" if len(missing) == 1 else f"classes {shown} never occur"
    line = f"give it {likelihood.width(len(present))}"
    if max(present) >= len(present):
        line += " and number the labels anew: y = numpy.unique(y, return_inverse=True)[1]"
    outputs = counted(view.outputs.shape[-1], "output")
    return f"The {which} in y, but the network has {outputs} for {total} classes; {line}."


def targets_not_scaled(view: View) -> str | None:
    """Targets above 100 or below 0.001 in size, for a likelihood that does not standardise."""
    y = view.y if view.targets is None else view.targets
    if y is None or not isinstance(view.likelihood, Gaussian) or view.likelihood.learned:
        return None
    size = float(y.double().square().mean().sqrt())
    if size == 0 or 1e-3 <= size <= 100:
        return None
    return (
        f"The targets have a root mean square of {size:.3g}, and the likelihood 'gaussian' does "
        f"not standardise them; type likelihood='homoscedastic', which does."
    )


def fewer_points_than_members(view: View) -> str | None:
    """An ensemble with more members than there are data points."""
    members = view.ensemble.members
    if view.points is None or view.points >= members or view.samples:
        return None
    return (
        f"There are {members} members but only {counted(view.points, 'data point')}; give more "
        f"data, or type members={max(view.points, 1)}."
    )


CHECKS: tuple[Callable[[View], str | None], ...] = (
    probabilities_already,
    far_from_unit_scale,
    constant_columns,
    leaked_target,
    labels_as_numbers,
    few_classes,
    targets_not_scaled,
    fewer_points_than_members,
)
"""All checks, in the order of their sentences."""


def look(
    ensemble: Ensemble,
    likelihood: Likelihood,
    batches: ArrayBatches | LoaderBatches,
    data: Any = None,
    chosen: bool = True,
    samples: bool = False,
) -> list[str]:
    """The sentences of all checks about the data and networks of a run.

    Args:
        ensemble: the members.
        likelihood: the likelihood of the run.
        batches: the training data; of a loader the batch that is read already.
        data: the data as the user gave them, which may name their columns.
        chosen: whether the user named the likelihood.
        samples: whether noise makes the members samples of the posterior.
    """
    if isinstance(batches, ArrayBatches):
        rows = torch.linspace(0, batches.n - 1, min(POINTS, batches.n)).round().long()
        x, y = batches.x[rows.to(batches.x.device)], batches.y[rows.to(batches.y.device)]
        inputs = batches.x if isinstance(batches.x, Tensor) else None
        points, targets = batches.n, _tensor(batches.y)
    else:
        (x, y), inputs = batches.first(), None
        points, targets = batches.known_points, _in_memory(batches)
    own = not isinstance(data, Dataset) or (data.spec or {"name": "file"}).get("name") == "file"
    prepared = not own or (isinstance(data, Dataset) and data.columns is not None)
    notes = data.notes if isinstance(data, Dataset) else ()
    seen = View(
        ensemble,
        likelihood,
        chosen,
        x,
        _tensor(y),
        points,
        inputs,
        targets,
        _names(data, x),
        prepared,
        samples,
    ).sentences()
    return [*notes, *seen]


_INSIDE = ("shoal.", "contextlib")


def warn(sentences: Sequence[str], known: Sequence[str] = ()) -> None:
    """Warn of every sentence that is not known, at the line of the user that called Shoal."""
    frame, level = sys._getframe(), 1
    while frame.f_back is not None and str(frame.f_globals.get("__name__")).startswith(_INSIDE):
        frame, level = frame.f_back, level + 1
    for sentence in sentences:
        if sentence not in known:
            warnings.warn(sentence, ShoalWarning, stacklevel=level)


def _tensor(y: Targets) -> Tensor | None:
    targets, _ = parted(y)
    return targets if isinstance(targets, Tensor) else None


def _in_memory(batches: LoaderBatches) -> Tensor | None:
    """All targets of a loader whose data are in memory; None for others."""
    loader = batches.loader
    if isinstance(loader, DataLoader):
        held: Any = loader.dataset
        whole = isinstance(held, TensorDataset) and len(held.tensors) == 2
        return _tensor(targets_of(held.tensors[1], None, batches.dtype)) if whole else None
    if not isinstance(loader, list | tuple):
        return None
    raws = [raw_batch(batch) for batch in loader]
    parts = [_tensor(targets_of(raw.y, None, batches.dtype, x=raw.x)) for raw in raws]
    shapes = {None if part is None else part.shape[1:] for part in parts}
    return None if None in shapes or len(shapes) > 1 else torch.cat(parts)  # pyright: ignore


def _sentence(words: str) -> str:
    return words[:1].upper() + words[1:]


def _names(data: Any, x: Inputs) -> Sequence[str] | None:
    """Names of the columns of a table, or of a data set that knows them."""
    if isinstance(data, Dataset):
        names = data.columns
    else:
        names = getattr(data[0], "columns", None) if isinstance(data, tuple) and data else None
    if names is None or isinstance(x, Opaque) or x.ndim != 2 or len(names) != x.shape[1]:
        return None
    return list(names)

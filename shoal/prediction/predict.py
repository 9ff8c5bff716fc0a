"""`predict`: predictions of trained members, in batches and without gradients."""

import copy
import math
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad

from shoal.core.devices import usable_device
from shoal.core.errors import ConfigError, DataError, ShoalWarning
from shoal.core.structure import Inputs
from shoal.core.values import describe_value
from shoal.data.batches.arrays import as_tensor
from shoal.data.batches.sources import checked_size, input_batches, input_count
from shoal.engine.members.input_derivatives import InputDerivatives
from shoal.engine.members.precision import calculating_in
from shoal.engine.processes.mesh import Mesh
from shoal.engine.resources.graph import captured_forward
from shoal.engine.resources.transfer import through_gpu
from shoal.inference.ensemble import Ensemble
from shoal.inference.likelihoods import (
    Categorical,
    Likelihood,
    WithDerivatives,
    known_likelihood,
)
from shoal.prediction.prediction_file import checked_out, read_prediction, writing
from shoal.prediction.predictive import ArrayLike, Predictive

__all__ = [
    "CollectedOutputs",
    "OutputBatches",
    "OutputStore",
    "SoundMembers",
    "collected",
    "member_outputs",
    "predict",
    "predict_together",
    "training_of",
]

_BATCH = 1024
"""Inputs per forward pass."""

_IN_MEMORY = 1 << 29
"""Most bytes of outputs that are kept in memory; more are in a temporary file."""

_CHUNK = 1 << 26
"""Bytes of a part, if the length is unknown; the C library gives such blocks back at once."""


def predict(
    source: Any,
    x: Any,
    *,
    batch_size: int = _BATCH,
    device: str | torch.device | None = None,
    likelihood: Likelihood | None = None,
    weights: ArrayLike | None = None,
    out: str | os.PathLike[str] | None = None,
    load: Callable[[Path], Any] | None = None,
    keep: bool = False,
    derivatives_of: str | bool | None = None,
) -> Predictive:
    """Predict the targets of inputs `x` with the members of `source`.

    Diverged members are left out, and a warning names them. The ensemble keeps its mode and its
    device. On a GPU a run predicts in the precision of its training.

    Args:
        source: a run (anything with `ensemble` and `likelihood`) or an ensemble.
        x: an array or tensor [B, ...], a dict, tuple or object of inputs as the network takes them,
            a `Split`, a pair (x, y), a torch `Dataset` of points x or (x, y), or a loader or other
            iterable of batches.
        batch_size: inputs per forward pass; a loader has its own batch size.
        device: device of the computation; None for the ensemble's device.
        likelihood: distribution of the targets, given the outputs. None takes the run's likelihood,
            or `Categorical` for an ensemble.
        weights: weights of all members [M], including diverged members; None for equal weights.
        out: file that ends in .safetensors, to which the outputs are written batch by batch. The
            prediction then reads them from the file, and may be larger than the memory. The file
            appears when it is complete; `Predictive.load` opens it again.
        load: function that opens a run folder, if `source` is a path.
        keep: leave the prediction on its GPU, where metrics are faster.
        derivatives_of: name of the input by which predictions are differentiated, or True for the
            only real input. None for those that the run was trained on, and False for none.

    Returns:
        The prediction; its tensors are on the CPU, in single or double precision. Outputs of more
        than 512 MiB are in a temporary file without a name (see TMPDIR). Its quantities
        have the shape of the run's training targets, such as [B] for targets [N].
    """
    checked_size(batch_size)
    source = _opened(source, load)
    ensemble = getattr(source, "ensemble", source)
    if not callable(ensemble) or not hasattr(ensemble, "alive"):
        raise ConfigError(
            f"predict needs an Ensemble, a Run or a run folder, not {type(source).__name__}"
        )
    if likelihood is not None:
        likelihood = known_likelihood("likelihood", likelihood)
    meaning: Likelihood = likelihood or getattr(source, "likelihood", None) or Categorical()
    meaning = _with_derivatives(meaning, derivatives_of)
    path, keep = (None, keep) if out is None else (checked_out(out), False)
    precision, trained = training_of(source)
    with differentiating(ensemble, meaning):
        batches = OutputBatches(ensemble, x, batch_size, device, keep, precision, trained)
        return collected(batches, ensemble.alive, meaning, weights, path, _target_ndim(source))


def _with_derivatives(likelihood: Likelihood, of: str | bool | None) -> Likelihood:
    """The likelihood with the derivatives that a user asks for."""
    trained = isinstance(likelihood, WithDerivatives)
    if of is None or (trained and of in (True, likelihood.of)):
        return likelihood
    values = likelihood.values if trained else likelihood
    if of is False:
        return values
    if of is not True and not isinstance(of, str):
        raise ConfigError(
            f"derivatives_of must be the name of an input, True or False, not {describe_value(of)}"
        )
    return WithDerivatives.for_prediction(values, None if of is True else of)


@contextmanager
def differentiating(ensemble: Any, likelihood: Likelihood) -> Iterator[None]:
    """A block in which the outputs of members end in the derivatives of their likelihood."""
    before = getattr(ensemble, "derivatives", None)
    if before is None and likelihood.derivatives_by is None:
        yield
        return
    ensemble.derivatives = likelihood.derivatives_by
    try:
        yield
    finally:
        ensemble.derivatives = before


def collected(
    batches: "OutputBatches | _DividedBatches",
    alive: Tensor,
    likelihood: Likelihood,
    weights: ArrayLike | None = None,
    path: Path | None = None,
    target_ndim: int | None = None,
) -> Predictive:
    """The prediction from batches of outputs, in memory or in a file; see `predict`."""
    if path is None:
        outputs = CollectedOutputs(batches.count)
        sound = _sound(batches.into(outputs), alive)
        kept = sound.nonzero().flatten().tolist()
        shares, likelihood = _of_sound(weights, sound), batches.placed(likelihood)
        return Predictive(outputs.finish(kept), likelihood, shares, target_ndim)
    with writing(path, likelihood, batches.count, target_ndim) as file:
        sound = _sound(batches.into(file), alive)
        file.likelihood = likelihood = batches.placed(likelihood)
        file.finish(sound.nonzero().flatten().tolist(), _of_sound(weights, sound))
    return Predictive(*read_prediction(path, likelihood))


def member_outputs(
    ensemble: Any,
    x: Any,
    batch_size: int = _BATCH,
    device: str | torch.device | None = None,
    keep: bool = False,
    precision: str | None = None,
    trained: Sequence[float] | None = None,
) -> Tensor:
    """Outputs of every member [M, B, C], diverged members included; see `predict`.

    Inputs are checked against `trained`, the range of the training inputs.
    """
    batches = OutputBatches(ensemble, x, batch_size, device, keep, precision, trained)
    outputs = CollectedOutputs(batches.count)
    return outputs.finish(range(len(batches.into(outputs))))


class OutputStore(Protocol):
    """What takes outputs batch by batch: memory, a file, or another process."""

    def add(self, outputs: Tensor) -> None:
        """Take the outputs of the next batch [M, B, ..., C]."""
        ...


class CollectedOutputs:
    """Outputs of members [M, N, ..., C] in memory, or in a temporary file if they are large.

    With a known number of data points the tensor is made once, and batches are copied to their
    places. Otherwise there are parts, and each is freed as soon as it is copied to the result.

    >>> outputs = CollectedOutputs(count=5)
    >>> for batch in torch.arange(5.0).view(1, 5, 1).split(2, dim=1):
    ...     outputs.add(batch)
    >>> outputs.finish([0]).flatten()
    tensor([0., 1., 2., 3., 4.])

    Args:
        count: expected number of data points; None if unknown.
    """

    def __init__(self, count: int | None = None) -> None:
        self.count = count or 0
        self.parts: list[Tensor] = []
        self.filled = 0  # data points in the last part
        self.room = _IN_MEMORY

    def add(self, outputs: Tensor) -> None:
        """Take the outputs of the next batch [M, B, ..., C]; a pinned buffer may then change.

        Batches of objects may have different numbers of outputs: all end in zeros.
        """
        outputs = self._as_wide(outputs)
        batch, done = outputs.shape[1], 0
        if not self.parts and batch == self.count:
            self.parts = [outputs.to(_kept_type(outputs), copy=outputs.is_pinned())]
            self.filled = done = batch
        while done < batch:
            if not self.parts or self.filled == self.parts[-1].shape[1]:
                self._more(outputs)
            last = self.parts[-1]
            count = min(batch - done, last.shape[1] - self.filled)
            last[:, self.filled : self.filled + count] = outputs[:, done : done + count]
            self.filled, done = self.filled + count, done + count

    def _as_wide(self, outputs: Tensor) -> Tensor:
        """Outputs and parts with as many columns as the widest of them."""
        width = self.parts[-1].shape[-1] if self.parts else outputs.shape[-1]
        missing = outputs.shape[-1] - width
        if missing > 0:
            self.parts = [pad(part, (0, missing)) for part in self.parts]
        return pad(outputs, (0, -missing)) if missing < 0 else outputs

    def _more(self, outputs: Tensor) -> None:
        members, batch, *rest = outputs.shape
        dtype = _kept_type(outputs)
        rows = _CHUNK // max(members * torch.Size(rest).numel() * dtype.itemsize, 1)
        rows = self.count if self.count and not self.parts else max(rows, batch)
        self.parts.append(_room(outputs, (members, rows, *rest), dtype, self.room))
        self.room -= self.parts[-1].nbytes
        self.filled = 0

    def finish(self, kept: Sequence[int]) -> Tensor:
        """The outputs of some members, in the given increasing order."""
        whole = self._joined()
        if len(kept) == len(whole):
            return whole
        for new, old in enumerate(kept):  # a copy of the whole would double the memory
            if new != old:
                whole[new] = whole[old]
        return whole[: len(kept)]

    def _joined(self) -> Tensor:
        parts, self.parts = self.parts[::-1], []
        parts[0] = parts[0][:, : self.filled]
        if len(parts) == 1:
            return parts[0].contiguous()
        members, _, *rest = parts[0].shape
        shape = members, sum(part.shape[1] for part in parts), *rest
        joined = _room(parts[0], shape, parts[0].dtype, _IN_MEMORY)
        start = 0
        while parts:
            part = parts.pop()
            joined[:, start : start + part.shape[1]] = part
            start += part.shape[1]
        return joined


def _room(like: Tensor, shape: Sequence[int], dtype: torch.dtype, room: int) -> Tensor:
    """An empty tensor: where `like` is, or in a temporary file if it takes more than `room` bytes.

    The file has no name, and is gone with the tensor. A GPU gives at most half of its free memory.
    """
    size = math.prod(shape)
    if like.is_cuda and 2 * size * dtype.itemsize <= torch.cuda.mem_get_info(like.device)[0]:
        return like.new_empty(shape, dtype=dtype)
    if size * dtype.itemsize > room:
        with suppress(OSError, AttributeError), NamedTemporaryFile(prefix="shoal-") as file:
            os.posix_fallocate(file.fileno(), 0, size * dtype.itemsize)  # or the disk is full
            return torch.from_file(file.name, shared=True, size=size, dtype=dtype).view(shape)
    return torch.empty(shape, dtype=dtype)


def _kept_type(outputs: Tensor) -> torch.dtype:
    return torch.float64 if outputs.dtype == torch.float64 else torch.float32


class SoundMembers:
    """Which members are finite, found batch by batch; a logit of -inf is allowed.

    Args:
        uneven: batches may have different numbers of outputs.
    """

    def __init__(self, uneven: bool = False) -> None:
        self.sound: Tensor | None = None
        self.shape: torch.Size | None = None
        self.uneven = uneven

    def see(self, outputs: Tensor) -> None:
        """Look at the outputs of a batch [M, B, ..., C], and refuse another shape than before."""
        if self.shape is not None and outputs.shape[2:] != self.shape and not self.uneven:
            raise DataError(
                "the batches give outputs of different shapes, such as sequences of different "
                "lengths; pad the inputs to one length, or predict one batch at a time"
            )
        self.shape = outputs.shape[2:]
        finite = (outputs < torch.inf).flatten(1).all(-1)
        self.sound = finite if self.sound is None else self.sound & finite


class OutputBatches:
    """The outputs of an ensemble, batch by batch; the arguments are those of `member_outputs`."""

    def __init__(
        self,
        ensemble: Any,
        x: Any,
        batch_size: int,
        device: str | torch.device | None,
        keep: bool,
        precision: str | None,
        trained: Sequence[float] | None,
    ) -> None:
        self.ensemble, self.x, self.size = ensemble, x, batch_size
        self.device, self.keep = device, keep
        self.precision, self.trained = precision, trained
        self.takes = getattr(ensemble, "takes_inputs", lambda count: False)
        self.count = input_count(x, self.takes)
        self.derivatives: InputDerivatives | None = None

    def into(self, store: OutputStore) -> Tensor:
        """Give all outputs to a store; returns which members have finite outputs [M]."""
        with torch.no_grad(), _ready(self.ensemble, self.device, self.precision) as placed:
            self.derivatives = getattr(placed, "derivatives", None)
            members = SoundMembers(uneven=self.derivatives is not None)
            for outputs in self._computed(placed, members):
                store.add(outputs)
        if members.sound is None:
            raise DataError("there is nothing to predict: x has no inputs")
        return members.sound

    def placed(self, likelihood: Likelihood) -> Likelihood:
        """The likelihood that knows where derivatives are in the outputs, if there are any."""
        if not isinstance(likelihood, WithDerivatives) or self.derivatives is None:
            return likelihood
        trained = likelihood.layout is not None
        return likelihood if trained else likelihood.with_layout(*self.derivatives.seen[0])

    def _computed(self, placed: Any, members: SoundMembers) -> Iterator[Tensor]:
        whole, there = getattr(placed, "takes_whole", None), torch.device(placed.device)
        batches = input_batches(
            self.x, self.size, None, placed.dtype, whole, self.trained, self.takes
        )
        on_gpu = there.type == "cuda"
        # blocks of offloaded members come through the host, which no captured pass contains
        captures = on_gpu and isinstance(placed, Ensemble) and placed.offload is None
        passes = captured_forward(placed, self.count) if captures else nullcontext(placed)
        one = self.count is not None and self.count <= self.size

        with passes as forward:

            def compute(x: Inputs) -> Tensor:
                outputs = forward(x)
                members.see(outputs)
                return outputs

            if on_gpu and not self.keep and not one:
                yield from through_gpu(batches, compute, there)
                return
            for batch in batches:
                outputs = compute(batch.to(there))
                # metrics sum in double precision, which only CUDA devices have
                yield outputs if on_gpu and self.keep else outputs.cpu()


def _of_sound(weights: ArrayLike | None, sound: Tensor) -> Tensor | None:
    """The weights of the finite members, rescaled to sum 1."""
    if weights is None:
        return None
    shares, sound = as_tensor(weights, "weights").double(), sound.cpu()
    if shares.shape != sound.shape:
        raise DataError(
            f"weights must be one number for each of the {len(sound)} members, "
            f"not of shape {list(shares.shape)}"
        )
    if bool(sound.all()):
        return shares
    kept = shares[sound]
    if not kept.sum() > 0:
        raise DataError("only diverged members have weight; give weight to finite members")
    return kept / kept.sum()


def training_of(source: Any) -> tuple[str | None, Sequence[float] | None]:
    """Precision of a run's training, and the range of its inputs; None for an ensemble."""
    precision = (getattr(source, "config", None) or {}).get("precision")
    return precision, (getattr(source, "provenance", None) or {}).get("input_range")


def _target_ndim(source: Any) -> int | None:
    """Number of axes of the training targets; None for an ensemble, and for older runs."""
    layout = getattr(getattr(source, "likelihood", None), "layout", None)
    if layout is not None:
        return layout.value_ndim
    shape = getattr(source, "target_shape", None)
    return None if shape is None else 1 + len(shape)


def _opened(source: Any, load: Callable[[Path], Any] | None) -> Any:
    if not isinstance(source, str | os.PathLike):
        return source
    if load is None:
        raise ConfigError(
            f"predict cannot open the folder '{source}'; type: predict(shoal.load('{source}'), x)"
        )
    return load(Path(source))


@contextmanager
def _ready(
    ensemble: Any, device: str | torch.device | None, precision: str | None
) -> Iterator[Any]:
    """The ensemble in evaluation mode on a device; restores its mode."""
    there = torch.device(ensemble.device) if device is None else usable_device(device)
    # moving in place would detach the tensors from an active optimiser
    placed = ensemble if there == ensemble.device else copy.deepcopy(ensemble).to(there)
    training, rests = placed.training, getattr(placed, "rests", False)
    if not rests:
        placed.train(False)
    try:
        with calculating_in(precision, placed) if _on_gpu(placed, there) else nullcontext():
            yield placed
    finally:
        if not rests:
            placed.train(training)


def _on_gpu(ensemble: Any, device: torch.device) -> bool:
    return device.type == "cuda" and isinstance(ensemble, Ensemble)


def _sound(finite: Tensor, alive: Tensor) -> Tensor:
    """Which members are sound [M]: finite weights and outputs; a warning names the others."""
    sound = (alive.to(finite.device) & finite).cpu()  # one wait for the device, not several
    if sound.all():
        return sound
    if not sound.any():
        raise DataError(
            f"all {len(sound)} members diverged, so there is no prediction; "
            f"train again with a smaller learning rate"
        )
    lost = ", ".join(str(i) for i in (~sound).nonzero().flatten().tolist())
    warnings.warn(
        f"left out of the prediction, diverged: members {lost} of {len(sound)}",
        ShoalWarning,
        stacklevel=4,
    )
    return sound


def predict_together(
    run: Any,
    x: Any,
    *,
    device: str | torch.device | None = None,
    out: str | os.PathLike[str] | None = None,
) -> Predictive | None:
    """Predict with the members of a run, divided over the processes of the process group.

    All processes call this function with the same inputs. One process predicts as `predict` does.

    Args:
        run: the run, with all members.
        x: inputs as `predict` takes them.
        device: device of this process; None for the ensemble's device.
        out: file for the outputs, which the first process writes batch by batch.

    Returns:
        The prediction on the first process, and None on the others.
    """
    ensemble = run.ensemble
    mesh = Mesh.current(ensemble.members, device=device or ensemble.device)
    if mesh is None:
        return predict(run, x, device=device, out=out)
    if mesh.place[1] > 0:
        return None  # more processes than members: another process has the same members
    members = ensemble.slice_members(mesh.own.start, mesh.own.stop)
    precision, trained = training_of(run)
    batches = OutputBatches(members, x, _BATCH, device, False, precision, trained)
    batches = _DividedBatches(mesh, batches)
    if mesh.first:
        path = None if out is None else checked_out(out)
        ndim = _target_ndim(run)
        return collected(batches, ensemble.alive, run.likelihood, path=path, target_ndim=ndim)
    batches.into(_Nowhere())
    return None


class _DividedBatches:
    """Outputs of all members on the first process; other processes send theirs."""

    def __init__(self, mesh: Mesh, batches: OutputBatches) -> None:
        self.mesh, self.batches, self.count = mesh, batches, batches.count
        self.placed = batches.placed

    def into(self, store: OutputStore) -> Tensor:
        finite = self.batches.into(_Joined(self.mesh, store))
        return _joined(self.mesh, finite.cpu().to(torch.uint8)).bool()


class _Joined:
    """A store that adds the outputs of the other processes to those of this process."""

    def __init__(self, mesh: Mesh, store: OutputStore) -> None:
        self.mesh, self.store = mesh, store

    def add(self, outputs: Tensor) -> None:
        self.store.add(_joined(self.mesh, outputs.cpu()))


class _Nowhere:
    """A store that keeps nothing."""

    def add(self, outputs: Tensor) -> None:
        pass


def _joined(mesh: Mesh, local: Tensor) -> Tensor:
    """Rows of all members on the first process; other processes send theirs and keep them."""
    if not mesh.first:
        mesh.send(local)
        return local
    others = [
        mesh.receive(local.new_empty(shard.stop - shard.start, *local.shape[1:]), row)
        for row, shard in enumerate(mesh.shards)
        if row > 0
    ]
    return torch.cat([local, *others])

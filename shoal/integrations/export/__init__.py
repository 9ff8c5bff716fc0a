"""`shoal.export`: one file with all members, for servers that have onnxruntime or torch alone.

The file takes any number of inputs and gives the prediction with its uncertainty. It is opened
again and compared with `predict` before it gets its name, so a file that differs never appears. A
file computes the quantities of `Predictive` in a graph of torch operations:

| likelihood | outputs |
| --- | --- |
| `Categorical`, `Ordinal` | `probs`, `entropy`, `aleatoric`, `mutual_information`, `disagreement` |
| `Bernoulli` | the same, and `mean`: the probability of 1 in each column |
| `Gaussian`, `HomoscedasticGaussian`, `HeteroscedasticGaussian`, `MixtureDensity` | `mean`, |
| | `stddev`, `entropy`, `aleatoric`, `mutual_information`, `disagreement`, quantiles if asked |
| `StudentT`, `Poisson`, `NegativeBinomial` | the same without quantiles |
| `Custom` | `mean`, `disagreement` |
"""

import copy
import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shoal.analysis.evidence.compute_evidence import member_weights
from shoal.core.display.text import counted
from shoal.core.errors import ConfigError, DataError, ShoalError
from shoal.core.storage.disk import checked_path, replacing, sync
from shoal.core.structure import Inputs, Structured
from shoal.data.batches.sources import input_batches
from shoal.data.dataset import Dataset
from shoal.engine.members.network_call import arguments
from shoal.inference.ensemble import Ensemble
from shoal.inference.likelihoods import Likelihood, MixtureDensity
from shoal.inference.unrolled import UnrolledEnsemble
from shoal.integrations.export.formats import (
    open_file,
    traced,
    write_compiled,
    write_onnx,
    write_program,
)
from shoal.models.blueprint import Blueprint
from shoal.prediction import predict
from shoal.prediction.mixture import deviation
from shoal.prediction.predict import member_outputs
from shoal.prediction.predictive import Predictive
from shoal.training.folder.own_data import own_data
from shoal.training.folder.run import Run, load

__all__ = ["MEANINGS", "Exported", "ExportedModule", "export", "output_names", "values_of"]


MEANINGS = {
    "probs": "class probabilities of the ensemble",
    "mean": "mean of the target; the probability of 1 for columns of 0 and 1",
    "stddev": "standard deviation of the target, noise and disagreement together",
    "entropy": "total uncertainty in nats; for numbers, of the Gaussian with this mean and stddev",
    "aleatoric": "mean entropy of the members in nats",
    "mutual_information": "epistemic uncertainty in nats, entropy - aleatoric",
    "disagreement": "standard deviation over the members, averaged over the outputs",
    "members": "outputs of every member before the likelihood",
}
_QUANTILE = "quantile_"
_PARTS, _ROUNDS = 32, 6
"""A quantile lies in one of 32 parts of its range, then in one of 32 parts of the part."""


def output_names(
    likelihood: Likelihood, quantiles: Sequence[float] = (), members: bool = False
) -> list[str]:
    """The outputs of a file for this likelihood, in order.

    >>> from shoal.inference.likelihoods import Gaussian
    >>> output_names(Gaussian(), quantiles=(0.05,))[-1]
    'quantile_0.05'
    """
    kinds = likelihood.about.kinds
    uncertain = ["entropy", "aleatoric", "mutual_information", "disagreement"]
    if "binary" in kinds:
        names = ["mean", "probs", *uncertain]
    elif "classes" in kinds:
        names = ["probs", *uncertain]
    elif "numbers" in kinds:
        names = ["mean", "stddev", *uncertain]
    else:
        names = ["mean", "disagreement"]
    for level in quantiles:
        if not _has_quantiles(likelihood):
            raise ConfigError(
                f"a file has no quantiles for {likelihood}; leave quantiles out, and use stddev"
            )
        if not 0 < level < 1:
            raise ConfigError(f"the level of a quantile must be between 0 and 1, not {level}")
        names.append(f"{_QUANTILE}{level:g}")
    return [*names, "members"] if members else names


def _has_quantiles(likelihood: Likelihood) -> bool:
    """Whether the distribution function is made of normal ones, which every format computes."""
    return "gaussian" in likelihood.about.kinds or isinstance(likelihood, MixtureDensity)


def _normals(likelihood: Likelihood, outputs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Weights, means and standard deviations of each member's normals, each [M, ..., K, J]."""
    if isinstance(likelihood, MixtureDensity):
        weights, means, variances = likelihood.normal_components(outputs)
        return weights, means, variances.sqrt()
    mean, variance = (moment.unsqueeze(-1) for moment in likelihood.moments(outputs))
    return torch.ones_like(mean), mean, variance.sqrt()


def values_of(pred: Predictive, names: Sequence[str]) -> dict[str, Tensor]:
    """The named quantities of a prediction, in the type of its outputs."""
    values = {}
    for name in names:
        if name.startswith(_QUANTILE):
            value = pred.quantile(float(name.removeprefix(_QUANTILE)))
        else:
            value = getattr(pred, name)
            value = value if isinstance(value, Tensor) else value()
        values[name] = value.to(pred.members.dtype)
    return values


class _Traced(Predictive):
    """A prediction of any number of data points: no step depends on values or on their number."""

    share: float

    @classmethod
    def of(
        cls, members: Tensor, likelihood: Likelihood, weights: Tensor | None, share: float
    ) -> "_Traced":
        traced = object.__new__(cls)
        vars(traced).update(members=members, likelihood=likelihood, weights=weights, share=share)
        return traced

    def by_blocks(self, compute: Callable[..., Tensor], *along: Tensor) -> Tensor:
        return compute(self, *along)

    def disagreement(self) -> Tensor:
        return deviation(self, self.share)

    def quantile(self, level: float) -> Tensor:
        """As `mixture.bisected_quantile`, with a few wide steps: a graph holds every step."""
        weights, means, stddevs = (t.unsqueeze(-1) for t in _normals(self.likelihood, self.members))
        low = self.mean - self.stddev / math.sqrt(min(level, 1 - level) / 2)
        width = 2 * (self.mean - low)
        inner = torch.arange(1, _PARTS, dtype=low.dtype) / _PARTS
        for _ in range(_ROUNDS):
            places = low.unsqueeze(-1) + width.unsqueeze(-1) * inner
            z = (places.unsqueeze(-2) - means) / (math.sqrt(2) * stddevs)
            below = self.average((weights * (1 + z.erf()) / 2).sum(-2)) < level
            width = width / _PARTS
            low = low + width * below.sum(-1)
        return low + width


class ExportedModule(nn.Module):
    """Input tensors, in order, to the named quantities of the ensemble's prediction.

    Args:
        ensemble: the members that count.
        pred: a prediction of these members; gives likelihood and weights.
        example: inputs, whose structure is that of all inputs.
        names: the outputs.
    """

    weights: Tensor | None

    def __init__(
        self,
        ensemble: UnrolledEnsemble,
        pred: Predictive,
        example: Tensor | Structured,
        names: Sequence[str],
    ) -> None:
        super().__init__()
        self.ensemble, self.likelihood, self.names = ensemble, pred.likelihood, list(names)
        weights = pred.weights
        self.register_buffer("weights", None if weights is None else weights.clone())
        self.share = 1 / pred.size if weights is None else float(weights.square().sum())
        self._form = None
        if isinstance(example, Structured):
            self._form = tuple(example.tensors), example.form
        self.eval()

    def forward(self, *tensors: Tensor) -> dict[str, Tensor]:
        """The quantities by name."""
        if self._form is None:
            outputs = self.ensemble(*tensors)
        else:
            names, form = self._form
            inputs = Structured(dict(zip(names, tensors, strict=True)), form)
            positional, named = arguments(self.ensemble.members[0], inputs)
            outputs = self.ensemble(*positional, **named)
        pred = _Traced.of(outputs, self.likelihood, self.weights, self.share)
        return values_of(pred, self.names)


SIZES = (1, 7, 64)
"""Batch sizes at which a file is compared with `predict`."""

_TOLERANCES = {None: 1e-5, "float16": 1e-2, "int8": 0.1}
"""Largest allowed difference by precision, relative to the largest value of an output or to 1."""


@dataclass(frozen=True)
class Exported:
    """A written file.

    Attributes:
        path: the file.
        outputs: names of the outputs, in order.
        differences: largest difference of each output from `predict`, relative to the output's
            largest value or to 1, over batches of 1, 7 and 64 inputs.
        bytes: size of the file.
        metadata: what the file says about itself, as plain values.
    """

    path: Path
    outputs: tuple[str, ...]
    differences: dict[str, float]
    bytes: int
    metadata: dict[str, Any]

    @property
    def difference(self) -> float:
        """The largest difference of all outputs."""
        return max(self.differences.values())

    def __repr__(self) -> str:
        size = f"{counted(self.metadata['members'], 'member')}, {self.bytes:,} bytes"
        return f"Exported({str(self.path)!r}, {size}, difference {self.difference:.1e})"


def export(
    source: Run | Ensemble | str | os.PathLike[str],
    path: str | os.PathLike[str],
    x: Any = None,
    *,
    likelihood: Likelihood | None = None,
    weights: Any = "uniform",
    data: Any = None,
    members: bool = False,
    quantiles: Sequence[float] = (),
    merge: bool = False,
    precision: str | None = None,
    compile: bool = False,
    classes: Sequence[str] | None = None,
    preprocessing: Mapping[str, Any] | None = None,
    tolerance: float | None = None,
) -> Exported:
    """Write all members and their prediction to one file with a free batch size.

    Outputs for classes: `probs`, `entropy`, `aleatoric`, `mutual_information`, `disagreement`.
    Outputs for numbers: `mean` and `stddev` instead of `probs`, and quantiles if asked. Diverged
    members and members of weight 0 are left out.

    Args:
        source: a run, an ensemble, or the folder of a run.
        path: a file that ends in .onnx (onnxruntime) or in .pt2 (`torch.export.load`).
        x: example inputs, for shapes, types and the comparison with `predict`. None takes test
            inputs of the run's data set, or random inputs for a registered network.
        likelihood: likelihood of an ensemble's outputs; a run has its own.
        weights: weights of the members, as of `predict`.
        data: data for named weights, as of `predict`.
        members: add the outputs of every member, `members` [M, B, C].
        quantiles: levels, such as (0.05, 0.95), for likelihoods made of Gaussians.
        merge: multiply adapters into their layers; the file then holds a network per member.
        precision: "float16" or "int8" for smaller ONNX files; the difference is measured.
        compile: write a .pt2 package of compiled code for this kind of machine (AOTInductor).
        classes: names of the classes; None takes those of the run's data set.
        preprocessing: anything about inputs and targets that users of the file need, as plain
            values: column names, scaling, units.
        tolerance: largest allowed difference from `predict`; None for 1e-5, for 0.01 with float16,
            for 0.1 with int8.
    """
    place = checked_path(path, "path")
    _check_format(place, precision, compile)
    source = load(Path(source)) if isinstance(source, str | os.PathLike) else source
    ensemble = getattr(source, "ensemble", source)
    if not isinstance(ensemble, Ensemble):
        raise ConfigError(f"export needs a run or an ensemble, not {type(source).__name__}")
    known = _known_data(source) if x is None or classes is None else None
    rows = _rows(source, ensemble, x, known)
    if isinstance(weights, str):
        weights = None if weights == "uniform" else member_weights(source, weights, data)
    pred = predict(source, rows, device="cpu", likelihood=likelihood, weights=weights)
    kept, pred = _counted(ensemble, rows, pred, weights)
    names = output_names(pred.likelihood, quantiles, members)
    unrolled = UnrolledEnsemble(ensemble.groups, kept, merge).cpu()
    module = ExportedModule(unrolled, pred, rows, names)
    facts = _metadata(source, pred, kept, rows, names)
    facts |= _world(source, known, classes, preprocessing, pred)
    facts["precision"] = precision or str(ensemble.dtype).removeprefix("torch.")
    limit = _TOLERANCES[precision] if tolerance is None else tolerance
    return _written(module, place, rows, values_of(pred, names), facts, precision, compile, limit)


def _written(
    module: ExportedModule,
    path: Path,
    rows: Tensor | Structured,
    expected: dict[str, Tensor],
    facts: dict[str, Any],
    precision: str | None,
    compiled: bool,
    limit: float,
) -> Exported:
    """Write the file beside its place, compare it with `predict`, and move it there."""
    with torch.no_grad():
        module(*_tensors(rows[:7]))  # learns which steps are random, before tracing
    program = traced(module, _tensors(rows[:7]))
    with replacing(path, sum(t.nbytes for t in module.parameters())) as temporary:
        if path.suffix == ".onnx":
            write_onnx(program, temporary, facts, precision)
        else:
            (write_compiled if compiled else write_program)(program, temporary, facts)
        differences = _differences(temporary, compiled, rows, expected)
        worst = max(differences, key=lambda name: differences[name])
        if not differences[worst] <= limit:
            raise ConfigError(
                f"the output '{worst}' of {path.name} differs from predict by "
                f"{differences[worst]:.1e}, more than {limit:g}, so no file is written; a larger "
                f"tolerance= would accept it"
            )
        size = temporary.stat().st_size
        sync(temporary)
    return Exported(path, tuple(expected), differences, size, facts)


def _differences(
    path: Path, compiled: bool, rows: Tensor | Structured, expected: dict[str, Tensor]
) -> dict[str, float]:
    """Largest relative difference of each output of a file, over several batch sizes."""
    run, _ = open_file(path, compiled)
    differences = dict.fromkeys(expected, 0.0)
    for size in SIZES:
        with torch.no_grad():
            outputs = run(_tensors(rows[:size]))
        for name, whole in expected.items():
            wanted = whole[:, :size] if name == "members" else whole[:size]
            output = outputs[name]
            if output.shape != wanted.shape:
                raise ConfigError(
                    f"the output '{name}' has shape {tuple(output.shape)} for {size} inputs, not "
                    f"{tuple(wanted.shape)}; the network does not take every batch size"
                )
            scale = max(1.0, float(whole.abs().max()))
            difference = float((output.double() - wanted.double()).abs().max()) / scale
            larger = max(differences[name], difference)
            differences[name] = larger if difference == difference else torch.inf
    return differences


def _check_format(path: Path, precision: str | None, compiled: bool) -> None:
    if path.suffix not in (".onnx", ".pt2"):
        raise ConfigError(f"a file to export ends in .onnx or .pt2, not as {path.name!r}")
    if precision not in _TOLERANCES:
        raise ConfigError(f"precision must be 'float16' or 'int8', not {precision!r}")
    if precision is not None and path.suffix != ".onnx":
        raise ConfigError(f"{precision} is for .onnx files; name the file {path.stem}.onnx")
    if compiled and path.suffix != ".pt2":
        raise ConfigError(f"compiled code is a .pt2 file; name the file {path.stem}.pt2")


def _known_data(source: Any) -> Dataset | None:
    """The data set of a run; None if the run cannot load it."""
    if not isinstance(source, Run):
        return None
    with suppress(ShoalError):
        return own_data(source, "this run", "pass x=inputs")
    return None


def _rows(source: Any, ensemble: Ensemble, x: Any, known: Dataset | None) -> Tensor | Structured:
    """As many example inputs as the largest compared batch; few inputs repeat."""
    if x is None:
        x = (known.test or known.train).x[: SIZES[-1]] if known else _drawn(source, ensemble)
    trained = (getattr(source, "provenance", None) or {}).get("input_range")
    batches = input_batches(
        x, SIZES[-1], "cpu", ensemble.dtype, ensemble.takes_whole, trained, ensemble.takes_inputs
    )
    batch: Inputs | None = next(iter(batches), None)
    if not isinstance(batch, Tensor | Structured):
        raise DataError(
            f"export needs tensors as example inputs, not {type(x).__name__}; pass x=inputs"
        )
    if len(batch) == 0:
        raise DataError("export needs at least one example input; x is empty")
    return batch[torch.arange(SIZES[-1]) % len(batch)]


def _drawn(source: Any, ensemble: Ensemble) -> Tensor:
    """Random inputs of a registered network, in the range of its training inputs."""
    build = ensemble.builds[0]
    if not isinstance(build, Blueprint):
        raise ConfigError(
            "the shape of the inputs is not known; give some inputs: export(run, path, x)"
        )
    provenance = getattr(source, "provenance", None) or {}
    low, high = provenance.get("input_range") or (-1.0, 1.0)
    random = torch.Generator().manual_seed(0)
    return low + (high - low) * torch.rand(SIZES[-1], *build.input_shape, generator=random)


def _counted(
    ensemble: Ensemble, rows: Any, pred: Predictive, weights: Any
) -> tuple[list[int], Predictive]:
    """Numbers of the finite members with weight, and their prediction."""
    outputs = member_outputs(ensemble, rows, device="cpu")
    sound = ensemble.alive.cpu() & outputs.flatten(1).isfinite().all(1)
    numbers = sound.nonzero().flatten()
    if pred.weights is None:
        return numbers.tolist(), pred
    heavy = pred.weights > 0
    weights = pred.weights[heavy] / pred.weights[heavy].sum()
    return numbers[heavy].tolist(), Predictive(pred.members[heavy], pred.likelihood, weights)


def _metadata(
    source: Any, pred: Predictive, kept: list[int], rows: Any, names: Sequence[str]
) -> dict[str, Any]:
    """Members, inputs and outputs of a file, as plain values."""
    tensors = {"x": rows} if isinstance(rows, Tensor) else rows.tensors
    inputs = [
        {
            "name": name,
            "dtype": str(t.dtype).removeprefix("torch."),
            "shape": ["batch", *t.shape[1:]] if t.ndim else [],
        }
        for name, t in tensors.items()
    ]
    quantile = "this quantile of the target"
    outputs = [{"name": name, "meaning": MEANINGS.get(name, quantile)} for name in names]
    total = getattr(source, "ensemble", source).members
    return {
        "shoal": _version(),
        "task": pred.task,
        "likelihood": str(pred.likelihood),
        "members": len(kept),
        "left_out": [i for i in range(total) if i not in kept],
        "weights": None if pred.weights is None else pred.weights.tolist(),
        "inputs": inputs,
        "outputs": outputs,
    }


def _version() -> str | None:
    """Version of the package; None if it is not installed."""
    with suppress(PackageNotFoundError):
        return version("shoal")
    return None


def _world(
    source: Any,
    known: Dataset | None,
    classes: Sequence[str] | None,
    preprocessing: Mapping[str, Any] | None,
    pred: Predictive,
) -> dict[str, Any]:
    """What the numbers mean: class names, and how inputs and targets were prepared."""
    provenance = getattr(source, "provenance", None) or {}
    prepared = {key: provenance.get(key) for key in ("input_range", "pixel_range")}
    if known is not None and known.scaling is not None:
        prepared["target_scaling"] = {"mean": known.scaling.mean, "std": known.scaling.std}
    prepared = {key: value for key, value in prepared.items() if value is not None}
    prepared |= copy.deepcopy(dict(preprocessing or {}))
    try:
        json.dumps(prepared)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"preprocessing must be plain values for JSON: {error}") from None
    if classes is None and known is not None and pred.likelihood.about.has_classes:
        classes = known.classes
    if classes is not None:
        classes = [str(name) for name in classes]
        if len(classes) != pred.probs.shape[-1]:
            raise ConfigError(
                f"there are {pred.probs.shape[-1]} classes, but classes has {len(classes)} names"
            )
    return {"classes": classes, "preprocessing": prepared}


def _tensors(rows: Tensor | Structured) -> list[Tensor]:
    return [rows] if isinstance(rows, Tensor) else list(rows.tensors.values())

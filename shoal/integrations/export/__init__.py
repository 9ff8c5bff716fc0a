"""`shoal.export`: one file with all members, for servers that have onnxruntime or torch alone.

The file takes any number of inputs and gives the prediction with its uncertainty. It is opened
again and compared with `predict` before it gets its name, so a file that differs never appears. A
file computes the quantities of `Predictive` in a graph of torch operations:

| likelihood | outputs |
| --- | --- |
| `Categorical`, `Ordinal` | `probs`, `entropy`, `aleatoric`, `mutual_information`, `disagreement` |
| `Bernoulli` | the same, and `mean`: the probability of 1 in each column |
| likelihoods of real targets | `mean`, `stddev`, `entropy`, `aleatoric`, |
| | `mutual_information`, `disagreement`, quantiles if asked |
| `Poisson`, `NegativeBinomial` | the same without quantiles |
| `Custom` | `mean`, `disagreement` |
"""

import copy
import json
import os
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from shoal.analysis.evidence.compute_evidence import member_weights
from shoal.core.arguments import checked, instance_of, list_of, one_of, positive, share, text, whole
from shoal.core.arguments import path as path_of
from shoal.core.errors import ConfigError, DataError, ShoalError, ShoalWarning
from shoal.core.structure import Inputs, Structured
from shoal.data.batches.sources import as_split, input_batches
from shoal.data.dataset import Dataset, Split
from shoal.inference.ensemble import Ensemble
from shoal.inference.likelihoods import Likelihood, known_likelihood
from shoal.inference.unrolled import UnrolledEnsemble
from shoal.integrations.export.formats import (
    open_file,
    write_compiled,
    write_onnx,
    write_program,
)
from shoal.integrations.export.graph import MEANINGS, ExportedModule, output_names, values_of
from shoal.integrations.export.written import SIZES, TOLERANCES, Answers, Exported, written
from shoal.models.blueprint import Blueprint
from shoal.prediction import predict
from shoal.prediction.predict import member_outputs
from shoal.prediction.predictive import Predictive
from shoal.training.folder.own_data import PREPARED_BY, own_data
from shoal.training.folder.provenance import drawn_inputs
from shoal.training.folder.run import Run, load
from shoal.training.folder.run_folder import DRAWS

if TYPE_CHECKING:
    from shoal.integrations.export.estimator import EstimatorFile
    from shoal.integrations.sklearn import EnsembleEstimator

__all__ = ["Exported", "export"]


@checked(
    path=path_of,
    precision=one_of("float16", "int8"),
    quantiles=list_of(share),
    classes=list_of(text),
    preprocessing=instance_of(Mapping, "a dict of plain values"),
    tolerance=positive,
    most=whole,
    likelihood=known_likelihood,
)
def export(
    source: "Run | Ensemble | EnsembleEstimator | str | os.PathLike[str]",
    path: str | os.PathLike[str],
    x: Any = None,
    *,
    likelihood: Likelihood | None = None,
    weights: Any = "uniform",
    data: Any = None,
    members: bool = False,
    quantiles: Sequence[float] = (),
    most: int | None = None,
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
        source: a run, an ensemble, the folder of a run, or an estimator of `shoal.sklearn`. The
            file of an estimator has the preprocessing inside, and one input per column.
        path: a file that ends in .onnx (onnxruntime) or in .pt2 (`torch.export.load`).
        x: example inputs, for shapes, types and the comparison with `predict`. None takes inputs of
            the run's data, or random inputs of the shape and type that the run was trained on.
        likelihood: likelihood of an ensemble's outputs; a run has its own.
        weights: weights of the members, as of `predict`.
        data: data for named weights, as of `predict`.
        members: add the outputs of every member, `members` [M, B, C].
        quantiles: levels, such as (0.05, 0.95), for likelihoods of real targets.
        most: write at most so many members, evenly spaced, such as draws of all chains; the file is
            compared with predictions of these. A run of more than 64 draws needs it.
        merge: multiply adapters into their layers; the file then holds a network per member.
        precision: "float16" or "int8" for smaller ONNX files; the difference is measured.
        compile: write a .pt2 package of compiled code for this kind of machine (AOTInductor).
        classes: names of the classes; None takes those of the run's data set.
        preprocessing: anything about inputs and targets that users of the file need, as plain
            values: column names, scaling, units.
        tolerance: largest allowed difference from `predict`; None for 1e-5, for 0.01 with float16,
            for 0.1 with int8.
    """
    place = Path(path)
    _check_format(place, precision, compile)
    source = load(Path(source)) if isinstance(source, str | os.PathLike) else source
    source, table = _with_fewer(source, most, weights), None
    if callable(getattr(source, "predictive", None)):
        table = _of_estimator(source, place, x, precision, likelihood, classes)
        source, x, classes = table.model.precise_run, table.rows, table.class_names
    ensemble = getattr(source, "ensemble", source)
    if not isinstance(ensemble, Ensemble):
        raise ConfigError(f"export needs a run or an ensemble, not {type(source).__name__}")
    known = _known_data(source) if x is None or classes is None else None
    rows = _rows(source, ensemble, x, known)
    if isinstance(weights, str):
        weights = None if weights == "uniform" else member_weights(source, weights, data)
    pred = predict(source, rows, device="cpu", likelihood=likelihood, weights=weights)
    kept, pred = _counted(ensemble, rows, pred, weights)
    names = (table.output_names if table else output_names)(pred.likelihood, quantiles, members)
    unrolled = UnrolledEnsemble(ensemble.groups, kept, merge).cpu()
    module = ExportedModule(unrolled, pred, rows, names)
    facts = _metadata(source, pred, kept, rows, names)
    facts |= _world(source, known, classes, preprocessing, pred)
    facts["precision"] = precision or str(ensemble.dtype).removeprefix("torch.")
    limit = TOLERANCES[precision] if tolerance is None else tolerance
    if table is not None:
        facts |= table.facts(names, preprocessing)
        return table.written(module, place, pred, facts, limit)
    if "inputs" in _of_preprocessing(source):
        line = f'shoal.export(model, "{place.name}") writes a file that takes raw columns'
        warnings.warn(f"{_of_preprocessing(source)['inputs']}; {line}", ShoalWarning, stacklevel=3)
    if place.suffix == ".onnx":
        write = partial(write_onnx, metadata=facts, precision=precision)
    else:
        write = partial(write_compiled if compile else write_program, metadata=facts)

    def opened(file: Path) -> Answers:
        run, _ = open_file(file, compile)
        return lambda size: run(_tensors(rows[:size]))

    expected = values_of(pred, names)
    return written(module, place, _tensors(rows[:7]), expected, facts, limit, write, opened)


_DRAWS = 64
"""Draws from which on a file would be slow to write and to load."""


def _with_fewer(source: Any, most: int | None, weights: Any) -> Any:
    """The source with at most so many members; a run of many draws says that it needs a number."""
    run = getattr(source, "run_", source)
    ensemble = getattr(run, "ensemble", run)
    count = getattr(ensemble, "members", 0)
    if most is None:
        if DRAWS in getattr(run, "config", {}) and count > _DRAWS:
            raise ConfigError(
                f"one file cannot hold {count:,} draws well; type most=32 for so many of them, "
                f"evenly spaced"
            )
        return source
    if not isinstance(weights, str) or weights != "uniform":
        raise ConfigError("weights belong to all members; leave out most or weights")
    if not isinstance(ensemble, Ensemble):
        return source
    fewer = ensemble.spaced(most)
    if run is ensemble:
        return fewer
    run = replace(run, ensemble=fewer)
    if not hasattr(source, "run_"):
        return run
    model = copy.copy(source)
    model.run_ = run
    return model


def _of_estimator(
    model: Any, path: Path, x: Any, precision: str | None, likelihood: Any, classes: Any
) -> "EstimatorFile":
    """The file of an estimator, which knows its likelihood and classes."""
    from shoal.integrations.export.estimator import EstimatorFile

    if path.suffix != ".onnx":
        raise ConfigError(
            f"an estimator takes texts, which only ONNX has; name the file {path.stem}.onnx"
        )
    if precision is not None:
        raise ConfigError(f"the file of an estimator is in double precision, not {precision}")
    if likelihood is not None or classes is not None:
        raise ConfigError("an estimator has its own likelihood and classes; leave them out")
    return EstimatorFile(model, x)


def _check_format(path: Path, precision: str | None, compiled: bool) -> None:
    if path.suffix not in (".onnx", ".pt2"):
        raise ConfigError(f"a file to export ends in .onnx or .pt2, not as {path.name!r}")
    if precision is not None and path.suffix != ".onnx":
        raise ConfigError(f"{precision} is for .onnx files; name the file {path.stem}.onnx")
    if compiled and path.suffix != ".pt2":
        raise ConfigError(f"compiled code is a .pt2 file; name the file {path.stem}.pt2")


def _known_data(source: Any) -> Dataset | None:
    """The data set of a run; None if the run cannot load it."""
    if not isinstance(source, Run):
        return None
    if source.given is not None:
        return source.given.data if isinstance(source.given.data, Dataset) else None
    with suppress(ShoalError):
        return own_data(source, "this run", "pass x=inputs")
    return None


def _rows(source: Any, ensemble: Ensemble, x: Any, known: Dataset | None) -> Tensor | Structured:
    """As many example inputs as the largest compared batch; few inputs repeat."""
    if x is None:
        x = (known.test or known.train).x[: SIZES[-1]] if known else _example(source, ensemble)
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


def _example(source: Any, ensemble: Ensemble) -> Any:
    """Training inputs of a run in memory, or random inputs like them; see `_drawn`."""
    given = getattr(source, "given", None)
    if given is not None and isinstance(given.data, tuple | Mapping | Split):
        inputs = as_split(given.data, ensemble.dtype, ensemble.takes_whole).x
        if isinstance(inputs, Tensor | Structured):
            return inputs[: SIZES[-1]]
    described = (getattr(source, "provenance", None) or {}).get("inputs")
    if described is None:
        return _drawn(source, ensemble)
    return drawn_inputs(described, SIZES[-1])


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
    kept = replace(pred, members=pred.members[heavy], weights=weights)
    return numbers[heavy].tolist(), kept


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


def _of_preprocessing(source: Any) -> dict[str, str]:
    """What users of the file must know if an estimator prepared the inputs of a run."""
    data = (getattr(source, "config", None) or {}).get("data")
    estimator = data.get(PREPARED_BY) if isinstance(data, Mapping) else None
    if estimator is None:
        return {}
    fact = f"the inputs are what model.preprocessing_ of the {estimator} gives, not raw columns"
    return {"inputs": fact}


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
    prepared |= _of_preprocessing(source)
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

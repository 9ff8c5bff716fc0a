"""An estimator of `shoal.sklearn` as one ONNX file: preprocessing, members, class names, intervals.

The preprocessing is a module of torch in double precision, with the numbers that scikit-learn
fitted, and is traced together with the members. Torch has no texts: before the graph a
`LabelEncoder` numbers the categories of each column, and behind it a `Gather` names the classes.
So few nodes are smaller than a converter, which has neither our dates nor texts with gaps, and
computes in single precision.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sklearn.compose import ColumnTransformer
from torch import Tensor, nn

from shoal.core.errors import ConfigError
from shoal.core.optional import require
from shoal.inference.likelihoods import Likelihood
from shoal.integrations.export.formats import onnx_session, write_onnx
from shoal.integrations.export.graph import (
    MEANINGS,
    ExportedModule,
    TracedPrediction,
    has_quantiles,
    output_names,
    values_of,
)
from shoal.integrations.export.written import SIZES, Answers, Exported, written
from shoal.integrations.sklearn import (
    DAY,
    PERIODS,
    EnsembleEstimator,
    as_categories,
    as_numbers,
    as_seconds,
    is_table,
)
from shoal.prediction.decisions import CrossConformalIntervals

__all__ = ["EstimatorFile"]

LEVEL, DEFAULT_LEVEL = "level", 0.9
"""An optional input: the probability of the interval from `low` to `high`."""

NO_DATE = int(np.iinfo(np.int64).min)
"""A gap in a column of dates, as `astype("int64")` of numpy writes it."""

_GAPS = ("", "nan", "None", "<NA>", "NaT")
"""Texts of a gap: the empty text, and what Python prints for a missing value."""

_TEXTS = ("categories", "codes")
"""Kinds of columns that a file takes as texts."""

_NAMES = {
    "label": "the most probable class; for several labels at once 0 or 1",
    "probabilities": "probability of each class; for several labels at once that of 1",
    "low": "lower end of the central interval of probability `level`",
    "high": "upper end of the central interval of probability `level`",
}

_CONFORMAL = {
    "low": "lower end of the cross-conformal (CV+) interval of this `level`",
    "high": "upper end of the cross-conformal (CV+) interval of this `level`",
}


@dataclass(frozen=True)
class _Column:
    """One input of the file: a column of the table, or all columns of an array.

    Attributes:
        name: name of the input.
        column: name of the column.
        place: place of the column in the table.
        kind: as in `preprocessing_for`; "array" for all columns at once.
        texts: the categories as texts; a gap is a category if training had one.
        gap: text of a gap: the first of `_GAPS` that is no category.
    """

    name: str
    column: str
    place: int
    kind: str
    texts: tuple[str, ...] = ()
    gap: str = ""

    def about(self, shape: Sequence[int]) -> dict[str, Any]:
        """The input in the metadata."""
        texts = ("string", self.gap)
        kinds = {"categories": texts, "codes": texts, "dates": ("int64", NO_DATE)}
        dtype, gap = kinds.get(self.kind, ("float64", "NaN"))
        facts = {"name": self.name, "dtype": dtype, "shape": ["batch", *shape], "gap": gap}
        if self.kind == "dates":
            facts["unit"] = "seconds since 1970-01-01 UTC"
        if self.kind in _TEXTS:
            facts["categories"] = [text for text in self.texts if text != self.gap]
        return facts if self.kind == "array" else facts | {"column": self.column}

    def array(self, X: Any) -> np.ndarray:
        """The values of the input for a table."""
        if self.kind == "array":
            return as_numbers(X)
        column = X.iloc[:, [self.place]]
        if self.kind in _TEXTS:
            return np.array(_as_texts(as_categories(column)[:, 0], self.gap), dtype=object)
        if self.kind == "dates":
            seconds = as_seconds(column)[:, 0]
            gaps = np.isnan(seconds)
            return np.where(gaps, NO_DATE, np.where(gaps, 0, seconds).astype(np.int64))
        return as_numbers(column)[:, 0]

    def tensor(self, array: np.ndarray) -> Tensor:
        """The values as the graph takes them: the numbers of categories, -1 for unknown ones."""
        if self.kind in _TEXTS:
            places = {text: place for place, text in enumerate(self.texts)}
            return torch.tensor([places.get(text, -1) for text in array])
        return torch.from_numpy(array)


def _as_texts(values: np.ndarray, gap: str) -> list[str]:
    """Categories as texts; a gap is NaN."""
    return [gap if value != value else str(value) for value in values.tolist()]


class _Standardised(nn.Module):
    """Numbers [B, K] as the pipeline gives them: scaled, with bins, no gaps, and indicators."""

    mean: Tensor
    scale: Tensor
    indicated: Tensor

    def __init__(self, pipeline: Any) -> None:
        super().__init__()
        steps, imputer = pipeline.named_steps, pipeline[-1]
        scaler: Any = steps["standardscaler"]
        tails: Any = steps.get("heavytails")
        ranges: Any = steps.get("inrange")  # pickles of former versions have none
        bins: Any = steps.get("piecewiselinear")
        features = getattr(imputer.indicator_, "features_", np.zeros(0, np.int64))
        buffers = {"mean": scaler.mean_, "scale": scaler.scale_, "indicated": features}
        heavy = np.zeros(0, bool) if tails is None else np.isfinite(tails.scale_)
        self.has_tails = bool(heavy.any())
        self.has_ranges = ranges is not None
        if ranges is not None:
            buffers["lowest"] = np.nan_to_num(ranges.low_, nan=-np.inf)
            buffers["highest"] = np.nan_to_num(ranges.high_, nan=np.inf)
        self.has_bins = bins is not None and len(bins.bins[0]) > 0
        if tails is not None and self.has_tails:
            buffers |= {"heavy": heavy, "median": tails.median_}
            buffers |= {"spread": np.where(heavy, tails.scale_, 1.0)}
        if bins is not None and self.has_bins:
            buffers |= dict(zip(("column", "left", "width"), bins.bins, strict=True))
        for name, values in buffers.items():
            self.register_buffer(name, torch.from_numpy(np.array(values)))

    def forward(self, numbers: Tensor) -> Tensor:
        gaps, values = numbers.isnan(), dict(self.named_buffers())
        if self.has_tails:  # onnxruntime has no asinh in double precision
            r = (numbers - values["median"]) / values["spread"]
            asinh = r.sign() * (r.abs() + (r.square() + 1).sqrt()).log()
            numbers = torch.where(values["heavy"], asinh, numbers)
        standard = (numbers - self.mean) / self.scale
        filled = torch.where(standard.isnan(), torch.zeros_like(standard), standard)
        if self.has_ranges:
            filled = filled.maximum(values["lowest"]).minimum(values["highest"])
        parts = [filled]
        if self.has_bins:
            bins = (filled[:, values["column"]] - values["left"]) / values["width"]
            parts.append(bins.clamp(0.0, 1.0))
        parts += [gaps[:, self.indicated].to(filled)] if len(self.indicated) else []
        return torch.cat(parts, 1)


class _Table(nn.Module):
    """Columns by their place, each [B], as the fitted preprocessing gives them [B, D]."""

    def __init__(self, preprocessing: ColumnTransformer) -> None:
        super().__init__()
        self.parts, self.sizes, self.standardised = [], {}, nn.ModuleDict()
        for kind, pipeline, places in preprocessing.transformers_:
            if kind in ("remainder", "left out") or not len(places):
                continue
            self.parts.append((kind, list(places)))
            if kind in _TEXTS:
                self.sizes[kind] = [len(each) for each in pipeline[-1].categories_]
                continue
            self.standardised[kind] = _Standardised(pipeline)
            if kind == "dates":
                self.periods = pipeline.named_steps["dateparts"].periods_

    def forward(self, columns: Mapping[int, Tensor]) -> Tensor:
        parts = []
        for kind, places in self.parts:
            chosen = [columns[place] for place in places]
            if kind in _TEXTS:  # an unknown category is -1
                pairs = zip(chosen, self.sizes[kind], strict=True)
                if kind == "categories":
                    parts += [(c[:, None] == torch.arange(n)).double() for c, n in pairs]
                else:  # as `CategoryCodes`
                    parts += [(c[:, None].double() + 1.5) / (n + 1) for c, n in pairs]
                continue
            if kind == "dates":
                pairs = zip(chosen, self.periods, strict=True)
                chosen = [part for c, periods in pairs for part in _date_parts(c, periods)]
            parts.append(self.standardised[kind](torch.stack(chosen, 1)))
        return torch.cat(parts, 1)


def _date_parts(seconds: Tensor, periods: Sequence[str]) -> list[Tensor]:
    """The parts of dates in whole seconds [B], as `DateParts` gives them."""
    known, whole = seconds != NO_DATE, seconds.double()
    circle = torch.tensor(2 * np.pi, dtype=torch.float64)  # a scalar would become single precision
    parts = [torch.where(known, whole / DAY, torch.full_like(whole, torch.nan))]
    for name in periods:
        angle = circle * (whole.remainder(PERIODS[name]) / PERIODS[name])
        for side in (angle.sin(), angle.cos()):
            parts.append(torch.where(known, side, torch.zeros_like(side)))
    return parts


class _EstimatorModule(nn.Module):
    """Columns, and the level where the file has intervals, to the outputs by name."""

    def __init__(self, inner: ExportedModule, file: "EstimatorFile", names: Sequence[str]) -> None:
        super().__init__()
        fitted = file.model.preprocessing_
        self.inner, self.table = inner, None if fitted is None else _Table(fitted)
        self.names, self.file, self.dtype = list(names), file, file.model.precise_run.ensemble.dtype

    def forward(self, *tensors: Tensor) -> dict[str, Tensor]:
        columns, level = tensors[: len(self.file.columns)], tensors[-1]
        if self.table is not None:
            if self.file.is_array:
                given = dict(enumerate(columns[0].unbind(1)))
            else:
                given = {c.place: t for c, t in zip(self.file.columns, columns, strict=True)}
            x = self.table(given)
        else:
            x = columns[0] if self.file.is_array else torch.stack(columns, 1)
        return self.file.values(self.inner.prediction(x.to(self.dtype)), self.names, level)


class EstimatorFile:
    """What the ONNX file of an estimator takes and gives.

    Args:
        model: a fitted estimator.
        x: a table to compare the file with `predict`; None draws one.
    """

    model: Any

    def __init__(self, model: EnsembleEstimator, x: Any = None) -> None:
        if not hasattr(model, "run_"):
            name = type(model).__name__
            raise ConfigError(f"this {name} is not fitted; type model.fit(X, y) before export")
        self.model, fitted = model, model.preprocessing_
        if fitted is not None and not _is_ours(fitted):
            raise ConfigError(
                f"a file holds the preprocessing 'auto', not {type(fitted).__name__}; "
                f"export model.run_, and prepare its inputs by model.preprocessing_"
            )
        self.rule = _rule(model)
        self.columns = self._columns()
        X = self._drawn() if x is None else x
        X = model._checked_inputs(X, reset=False)
        rows = np.arange(SIZES[-1]) % len(X)
        self.X = X.iloc[rows] if is_table(X) else X[rows]
        self.rows = torch.from_numpy(model._prepared(self.X))

    @property
    def is_array(self) -> bool:
        """Whether the file has one input with all columns."""
        return self.columns[0].kind == "array"

    def _columns(self) -> list[_Column]:
        model, kinds = self.model, {}
        texts: dict[int, Any] = {}
        if model.preprocessing_ is not None:
            for kind, pipeline, places in model.preprocessing_.transformers_:
                kinds |= dict.fromkeys(places, kind)
                if kind in _TEXTS and len(places):
                    known = map(_category_texts, pipeline[-1].categories_)
                    texts |= dict(zip(places, known, strict=True))
        named = hasattr(model, "feature_names_in_")
        if not named and set(kinds.values()) <= {"numbers"}:
            return [_Column("x", "x", 0, "array")]
        count = model.n_features_in_
        labels = model.feature_names_in_ if named else [f"column_{i}" for i in range(count)]
        taken, columns = set(MEANINGS) | set(_NAMES) | {LEVEL}, []
        for i, label in enumerate(labels):
            kind = kinds.get(i, "numbers")
            if kind == "left out":
                continue
            if kind == "words":
                raise ConfigError(
                    f"a file cannot hash the words of column {str(label)!r}; fit without this "
                    f"column, or export model.run_ and prepare its inputs by model.preprocessing_"
                )
            name = str(label) or f"column_{i}"
            while name in taken or name.startswith("quantile_"):
                name = f"column_{name}"
            taken.add(name)
            columns.append(_Column(name, str(label), i, kind, *texts.get(i, ())))
        return columns

    def _drawn(self) -> Any:
        """A table with every category, gaps and unknown texts; random numbers and dates."""
        random, n, model = np.random.default_rng(0), SIZES[-1], self.model
        if model.preprocessing_ is None:
            shape = _input_shape(model)
            x = random.normal(size=(n, *shape))
            return x if self.is_array else self._as_table(list(x.T))
        drawn: dict[int, Any] = {}
        for kind, pipeline, places in model.preprocessing_.transformers_:
            for i, place in enumerate(places):
                if kind == "left out":
                    drawn[place] = np.full(n, "", dtype=object)
                    continue
                if kind in _TEXTS:
                    known = pipeline[-1].categories_[i].tolist()
                    numbers = known and not isinstance(known[0], str)
                    other = [] if numbers else ["a text that training had not"]
                    values = np.array([*known, *other, None], dtype=object)
                    drawn[place] = values[np.arange(n) % len(values)]
                    continue
                column = i
                if kind == "dates":  # a column of days, before two columns for each period
                    periods = pipeline.named_steps["dateparts"].periods_
                    column += sum(2 * len(each) for each in periods[:i])
                scaler = pipeline.named_steps["standardscaler"]
                values = scaler.mean_[column] + scaler.scale_[column] * random.normal(size=n)
                if tails := pipeline.named_steps.get("heavytails"):
                    whole = np.zeros((n, len(scaler.mean_)))
                    whole[:, column] = values
                    values = tails.inverse_transform(whole)[:, column]
                values[random.random(n) < 0.1] = np.nan
                drawn[place] = _as_dates(values) if kind == "dates" else values
        columns = [drawn[place] for place in range(len(drawn))]
        return np.stack(columns, 1) if self.is_array else self._as_table(columns)

    def _as_table(self, columns: Sequence[np.ndarray]) -> Any:
        pandas = require("pandas", extra="frames")
        table = pandas.DataFrame(dict(enumerate(columns)))
        return table.set_axis(getattr(self.model, "feature_names_in_", table.columns), axis=1)

    def output_names(
        self, likelihood: Likelihood, quantiles: Sequence[float], members: bool
    ) -> list[str]:
        """The outputs, in order."""
        names = [n for n in output_names(likelihood, quantiles, members) if n != "probs"]
        if "classes" in likelihood.about.kinds:
            return ["label", "probabilities", *(n for n in names if n != "mean")]
        if not has_quantiles(likelihood) and self.rule is None:
            return names
        at = names.index("stddev") + 1
        return [*names[:at], "low", "high", *names[at:]]

    def values(self, pred: Any, names: Sequence[str], level: Any) -> dict[str, Tensor]:
        """The outputs of a prediction by name, in the shapes of the estimator."""
        several, values = "binary" in pred.likelihood.about.kinds, {}
        flat = not getattr(self.model, "_columns", True)
        ends = self._ends(pred, level) if "low" in names else ()
        for name in names:
            if name in ("label", "probabilities"):
                probs = pred.mean if several else pred.probs
                if name == "label":
                    probs = (probs > 0.5).long() if several else probs.argmax(-1)
                values[name] = probs
            elif name in ("low", "high"):
                values[name] = ends[name == "high"].to(pred.members.dtype)
            else:
                values |= values_of(pred, [name])
            if flat and name != "members" and values[name].ndim == 2:
                values[name] = values[name].squeeze(1)
        return values

    def _ends(self, pred: Any, level: Any) -> tuple[Tensor, Tensor]:
        """Both ends of the interval, as `predict_interval` has them."""
        if self.rule is None:
            return pred.interval(level)
        if isinstance(pred, TracedPrediction):
            return self._traced_rule(pred, level)
        return self.rule.at(level)(pred)

    @cached_property
    def _traced_rule(self) -> "_TracedIntervals":
        """The rule as a graph; it is made before tracing, which sees no conditions on values."""
        assert self.rule is not None
        return _TracedIntervals(self.rule)

    def written(
        self, inner: ExportedModule, path: Path, pred: Any, facts: dict[str, Any], limit: float
    ) -> Exported:
        """Write the file and compare it with the estimator."""
        names = [each["name"] for each in facts["outputs"]]
        module, interval = _EstimatorModule(inner, self, names), "low" in names
        arrays = {c.name: c.array(self.X) for c in self.columns}
        level = [torch.tensor(DEFAULT_LEVEL, dtype=torch.float64)] if interval else []
        example = [column.tensor(arrays[column.name][:7]) for column in self.columns]
        classes = self._classes() if "label" in names else None
        finish = partial(_with_texts, columns=self.columns, classes=classes, interval=interval)

        def opened(file: Path) -> Answers:
            session = onnx_session(file)

            def answers(size: int) -> dict[str, Tensor]:
                feeds = {name: array[:size] for name, array in arrays.items()}
                outputs = dict(zip(names, session.run(names, feeds), strict=True))
                if classes is not None:
                    places = {label: place for place, label in enumerate(classes.tolist())}
                    outputs["label"] = np.array([places[x] for x in outputs["label"].tolist()])
                return {name: torch.from_numpy(value) for name, value in outputs.items()}

            return answers

        write = partial(write_onnx, metadata=facts, finish=finish)
        expected = self.values(pred, names, DEFAULT_LEVEL)
        return written(module, path, [*example, *level], expected, facts, limit, write, opened)

    @property
    def class_names(self) -> list[str] | None:
        """Names of the classes or of the columns of labels."""
        names = self.model._class_names()
        return None if names is None else list(names)

    def _classes(self) -> np.ndarray | None:
        """The labels in the type of the file; None for several labels at once."""
        classes = getattr(self.model, "classes_", None)
        if classes is None or getattr(self.model, "_several", False):
            return None
        if classes.dtype.kind in "OUS":
            return np.array([str(label) for label in classes], dtype=object)
        kinds = {"b": np.bool_, "f": np.float64}
        return classes.astype(kinds.get(classes.dtype.kind, np.int64))

    def facts(self, names: Sequence[str], given: Mapping[str, Any] | None) -> dict[str, Any]:
        """Inputs and outputs in the metadata, and what users give about the preprocessing."""
        shape = list(_input_shape(self.model)) if self.is_array else []
        inputs = [column.about(shape) for column in self.columns]
        if "low" in names:
            level: dict[str, Any] = {"name": LEVEL, "dtype": "float64", "shape": []}
            inputs.append(level | {"default": DEFAULT_LEVEL})
        meanings = MEANINGS | _NAMES | ({} if self.rule is None else _CONFORMAL)
        outputs = [
            {"name": name, "meaning": meanings.get(name, "this quantile of the target")}
            for name in names
        ]
        name, inside = type(self.model).__name__, dict(given or {})
        inside |= {"inputs": "raw columns; the preprocessing is inside the file"}
        return {"estimator": name, "inputs": inputs, "outputs": outputs, "preprocessing": inside}


def _rule(model: Any) -> CrossConformalIntervals | None:
    """The rule for intervals of a regressor with conformal=True."""
    rule = model.conformal_ if getattr(model, "conformal", False) else None
    return rule if isinstance(rule, CrossConformalIntervals) else None


class _TracedIntervals:
    """A rule for intervals that sorts the numbers of all training points [N, b], as a graph can.

    Levels that need more training points have infinite ends.
    """

    def __init__(self, rule: CrossConformalIntervals) -> None:
        scores = rule.scores
        self.total = scores.points + 1
        folds = range(scores.sorted.shape[1])
        self.held = [(scores.member_folds == fold).nonzero().flatten() for fold in folds]
        self.columns = []
        for own, counts in zip(scores.sorted, scores.counts.diff(), strict=True):
            fold, place = own.isfinite().nonzero(as_tuple=True)
            times = torch.cat([counts[fold, place].double(), torch.ones(1, dtype=torch.float64)])
            self.columns.append((fold, own[fold, place].unsqueeze(1), times))

    def __call__(self, pred: TracedPrediction, level: Tensor) -> tuple[Tensor, Tensor]:
        """Both ends, in the shape of the targets."""
        known = pred.likelihood, None, None, 0.0
        each = [TracedPrediction.of(pred.members.index_select(0, m), *known) for m in self.held]
        mean, unit = torch.stack([p.mean for p in each]), torch.stack([p.stddev for p in each])
        rank = (self.total * level - 1e-9).ceil().clamp_min(1)
        low, high = -self._ranked(-mean, unit, rank), self._ranked(mean, unit, rank)
        if pred.likelihood.discrete:
            low, high = low.ceil(), high.floor()
        return pred.as_targets(low), pred.as_targets(high)

    def _ranked(self, start: Tensor, unit: Tensor, rank: Tensor) -> Tensor:
        """As `FoldScores.ranked`, from the centre and unit of each fold [K, b, D] to [b, D]."""
        columns = []
        for d, (fold, scores, times) in enumerate(self.columns):
            numbers = start[..., d].index_select(0, fold)
            numbers = numbers + scores * unit[..., d].index_select(0, fold)
            numbers, order = torch.cat([numbers, torch.full_like(numbers[:1], torch.inf)]).sort(0)
            place = (times[order].cumsum(0) < rank).sum(0, keepdim=True)
            columns.append(numbers.gather(0, place)[0])
        return torch.stack(columns, -1)


def _is_ours(preprocessing: Any) -> bool:
    """Whether `preprocessing_for` made it."""
    if not isinstance(preprocessing, ColumnTransformer):
        return False
    kinds = {kind for kind, _, _ in preprocessing.transformers}
    return kinds <= {"numbers", "dates", "words", "left out", *_TEXTS}


def _input_shape(model: Any) -> tuple[int, ...]:
    """Shape of one input of an array."""
    build: Any = model.run_.ensemble.builds[0]
    if model.preprocessing_ is None and hasattr(build, "input_shape"):
        return tuple(build.input_shape)
    return (model.n_features_in_,)


def _category_texts(categories: np.ndarray) -> tuple[tuple[str, ...], str]:
    """Categories as texts, and the text of a gap."""
    known = {str(value) for value in categories.tolist() if value == value}
    gap = next(text for text in (*_GAPS, "a gap in the column") if text not in known)
    texts = tuple(_as_texts(categories, gap))
    if len(set(texts)) < len(texts):
        raise ConfigError(
            f"two categories of a column have the same text; rename one of {sorted(known)[:5]}"
        )
    return texts, gap


def _as_dates(days: np.ndarray) -> np.ndarray:
    gaps = np.isnan(days)
    whole = np.where(gaps, 0, days * DAY).astype("int64").astype("datetime64[s]")
    whole[gaps] = np.datetime64("NaT")
    return whole


def _with_texts(
    model: Any, columns: Sequence[_Column], classes: np.ndarray | None, interval: bool
) -> None:
    """Add to a graph what torch cannot trace: texts, class names and a default of the level."""
    onnx = require("onnx", extra="export")
    graph, helper = model.graph, onnx.helper
    encoders = []
    for column in columns:
        if column.kind not in _TEXTS:
            continue
        keys = {text: place for place, text in enumerate(column.texts)}
        if column.gap in keys:  # training had gaps
            keys = {text: keys[column.gap] for text in _GAPS} | keys
        number = f"number of {column.name}"
        encoders.append(
            helper.make_node(
                "LabelEncoder",
                [column.name],
                [number],
                domain="ai.onnx.ml",
                keys_strings=list(keys),
                values_int64s=list(keys.values()),
                default_int64=-1,
            )  # fmt: skip
        )
        _renamed(graph, column.name, number)
        _typed(graph.input, column.name, onnx.TensorProto.STRING)
    nodes = [*encoders, *graph.node]
    if classes is not None:
        _renamed(graph, "label", "number of label")
        names: Mapping[str, Any] = {"O": onnx.TensorProto.STRING, "b": onnx.TensorProto.BOOL}
        names |= {"i": onnx.TensorProto.INT64, "f": onnx.TensorProto.DOUBLE}
        kind = names[classes.dtype.kind]
        graph.initializer.append(
            helper.make_tensor("classes", kind, [len(classes)], _plain(classes))
        )
        nodes.append(helper.make_node("Gather", ["classes", "number of label"], ["label"]))
        _typed(graph.output, "label", kind)
    if interval:
        default = helper.make_tensor(LEVEL, onnx.TensorProto.DOUBLE, [], [DEFAULT_LEVEL])
        graph.initializer.append(default)
    if encoders:
        model.opset_import.append(helper.make_opsetid("ai.onnx.ml", 3))
    nodes = [onnx.NodeProto.FromString(node.SerializeToString()) for node in nodes]
    del graph.node[:]
    graph.node.extend(nodes)


def _plain(classes: np.ndarray) -> list[Any]:
    return [c.encode() for c in classes] if classes.dtype.kind == "O" else classes.tolist()


def _renamed(graph: Any, old: str, new: str) -> None:
    """Give an inner value another name, in all nodes."""
    for node in graph.node:
        for names in (node.input, node.output):
            for place, name in enumerate(names):
                if name == old:
                    names[place] = new


def _typed(values: Any, name: str, kind: int) -> None:
    next(each for each in values if each.name == name).type.tensor_type.elem_type = kind

"""Storage of the evidence with its run, and the member weights for predictions."""

import math
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

import torch
from torch import Tensor

from shoal.analysis.evidence.compute_evidence import Evidence, Weighting, evidence, step_of
from shoal.analysis.evidence.prior_comparison import PriorResult
from shoal.analysis.stored_results import keep_result, stored_table, write_result
from shoal.core.errors import CheckpointCorrupt, ConfigError, DataError
from shoal.core.registry import nearest
from shoal.core.values import describe_value
from shoal.training.folder.own_data import again, own_data

__all__ = [
    "FILE",
    "keep_evidence",
    "kept_evidence",
    "load_evidence",
    "member_weights",
    "save_evidence",
]

FILE = "evidence.json"
_OLD_KEYS = {"rungs": "learned_priors", "judged": "evaluated_on", "living": "finite_members"}
NAMED = ("uniform", "posterior", "stacking")


def save_evidence(found: Evidence, folder: Path | str) -> None:
    """Write the evidence to the folder of the run."""
    write_result(folder, FILE, found)


def keep_evidence(run: Any, found: Evidence) -> None:
    """Store the evidence with its run."""
    keep_result(run, "evidence", FILE, found)


def kept_evidence(run: Any) -> Evidence | None:
    """The evidence that `keep_evidence` stored; None without any."""
    if getattr(run, "folder", None) is not None:
        return load_evidence(run.folder)
    return getattr(run, "results", {}).get("evidence")


def load_evidence(folder: Path | str) -> Evidence | None:
    """The evidence that `shoal evidence` stored in the folder of a run; None without any."""
    value = stored_table(folder, FILE, "evidence")
    if value is None:
        return None
    try:
        value = {_OLD_KEYS.get(key, key): each for key, each in value.items()}
        priors = [PriorResult(**_known(_numbers(p))) for p in value.pop("learned_priors")]
        weightings = {k: Weighting(**_numbers(w)) for k, w in value.pop("weightings").items()}
        hints = get_type_hints(Evidence)
        value = {key: _not_null(each, hints.get(key)) for key, each in value.items()}
        found = Evidence(learned_priors=priors, weightings=weightings, **value)
        for each in (found, *priors, *weightings.values()):
            _check_types(each)
        return found
    except (TypeError, KeyError, AttributeError) as error:
        raise CheckpointCorrupt(
            f"{Path(folder) / FILE} is not valid evidence ({error}); "
            f"type: {again('evidence', folder)}"
        ) from None


def member_weights(run: Any, kind: str, data: Any = None) -> Tensor | None:
    """The weights [M] with this name; None for uniform weights.

    The weights come from the run's folder, if its evidence belongs to the last training step.
    Otherwise they are computed from `data`, or from the run's data set if it can be loaded.
    """
    if kind not in NAMED:
        raise ConfigError(f"there are no weights called '{kind}'; {nearest(str(kind), NAMED)}")
    if kind == "uniform":
        return None
    kept = None if data is not None else kept_evidence(run)
    if kept is None or kept.step != step_of(run):
        known = own_data(run, "this run", "pass data=(x, y)") if data is None else data
        kept = evidence(run, known, priors=False)
    if kind not in kept.weightings:
        raise DataError(
            "stacking weights need held-out data, and this data set has none; "
            "pass data=Dataset(..., test=Split(x, y))"
        )
    weights = [math.nan if w is None else w for w in kept.weightings[kind].weights]
    return torch.tensor(weights, dtype=torch.float64)


def _known(result: dict[str, Any]) -> dict[str, Any]:
    """A stored result with the centre of Gaussians; older files have it only in the name."""
    old = {f"Gaussians {words}": centre for words, centre in _CENTRES.items()}
    centre = next((c for name, c in old.items() if str(result["name"]).startswith(name)), "")
    return {"centre": centre, **result}


_CENTRES = {"at the members": "members", "at zero": "zero"}


def _numbers(table: dict[str, Any]) -> dict[str, Any]:
    """The table with null (a number that is not finite) as NaN."""
    return {name: float("nan") if value is None else value for name, value in table.items()}


def _not_null(value: Any, annotation: Any) -> Any:
    """The value with NaN where its type is a float and the file has null."""
    if value is None and annotation is float:
        return math.nan
    if isinstance(value, list) and get_args(annotation) == (float,):
        return [math.nan if each is None else each for each in value]
    return value


def _check_types(found: Any) -> None:
    """Refuse values of wrong types."""
    for name, annotation in get_type_hints(type(found)).items():
        if not _fits(getattr(found, name), annotation):
            raise TypeError(f"{name} is {describe_value(getattr(found, name))}")


def _fits(value: Any, annotation: Any) -> bool:
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin is list:
        return isinstance(value, list) and all(_fits(each, inner[0]) for each in value)
    if origin is dict:
        return isinstance(value, dict) and all(_fits(each, inner[1]) for each in value.values())
    if annotation is float:  # None means a number that is not finite
        return value is None or (isinstance(value, int | float) and not isinstance(value, bool))
    return isinstance(value, annotation)

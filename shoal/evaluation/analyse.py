"""`shoal.landscape` and `shoal.evidence`: the analyses of the command line, as functions."""

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from shoal.analysis.evidence.compute_evidence import Evidence
from shoal.analysis.evidence.compute_evidence import evidence as compute_evidence
from shoal.analysis.evidence.store import keep_evidence
from shoal.analysis.landscape.scene import AnalysisResult, Effort
from shoal.analysis.landscape.scene import registry as landscape_parts
from shoal.analysis.landscape.study import study
from shoal.core.errors import ConfigError
from shoal.core.progress import Ticker
from shoal.data.dataset import Dataset
from shoal.evaluation.given_data import Labelled, opened, placed, training_data
from shoal.training.own_data import what_to_type
from shoal.training.run import Run

__all__ = ["evidence", "landscape"]


def landscape(
    run: Run | str | os.PathLike[str],
    data: Dataset | Labelled | str | Mapping[str, Any] | None = None,
    *,
    test: Labelled | None = None,
    parts: Sequence[str] | None = None,
    quick: bool = False,
    points: int | None = None,
    inputs: int | None = None,
    steps: int | None = None,
    fresh: bool = False,
    seed: int = 0,
    device: str | torch.device | None = None,
    progress: bool = False,
) -> dict[str, AnalysisResult]:
    """What lies around and between the members of a run, part by part.

    Each part is computed once and kept in the folder of the run, or in memory with a run that has
    none; `shoal.report` shows it. The command `shoal landscape RUN` does the same.

    Args:
        run: a run, or its folder.
        data: what it was trained on: a `Dataset`, a pair (x, y) or a loader; by default its data
            set, where that can be loaded by name.
        test: test data, a pair (x, y) or a loader, for data without any.
        parts: names of parts, such as "line" and "tunnel"; all by default.
        quick: coarse, to see whether it works.
        points: along each side of a plane (41).
        inputs: how many of the test and of the training data are looked at (2000).
        steps: of training a curve (300).
        fresh: compute again what is kept already.
        seed: decides everything random.
        device: where to compute; None stays where the members are.
        progress: show how far it is.

    Returns:
        Numbers and tensors of each part; `part.scores["missing"]` says why a part has none.
    """
    wanted = {"points": points, "inputs": inputs, "steps": steps}
    effort = _effort(quick, {key: value for key, value in wanted.items() if value is not None})
    names = _part_names(parts)
    run = placed(opened(run), device)
    advice = f"type: {what_to_type('landscape', run.config)}"
    known = training_data(run, data, test, advice, run.ensemble.dtype)
    seen: Counter[str] = Counter()
    with Ticker(len(names), show=progress) as ticker:

        def tell(name: str, kept: bool) -> None:
            ticker.tick(f"{name} (was there already)" if kept else name)

        def tick(name: str, count: int) -> None:
            seen[name] += count
            ticker.note(f"{name}: {seen[name]:,} networks")

        return study(run, known, names, effort=effort, fresh=fresh, seed=seed, tell=tell, tick=tick)


def evidence(
    run: Run | str | os.PathLike[str],
    data: Dataset | Labelled | str | Mapping[str, Any] | None = None,
    *,
    test: Labelled | None = None,
    priors: bool = True,
    points: int = 500,
    flow_steps: int = 200,
    progress: bool = False,
) -> Evidence:
    """In what sense a run is Bayesian: evidence, weights of the members, richer learned priors.

    It is kept in the folder of the run, or in memory with a run that has none, for its page and for
    weighted predictions. The command `shoal evidence RUN` does the same.

    Args:
        run: a run, or its folder.
        data: what it was trained on: a `Dataset`, a pair (x, y) or a loader; by default its data
            set, where that can be loaded by name.
        test: test data, a pair (x, y) or a loader, which judge the weights.
        priors: also fit the richer priors, which takes most of the time.
        points: training data that the curvature is summed over, scaled up to all of them.
        flow_steps: of the ascent of the flow prior.
        progress: show how far it is.
    """
    if points < 1 or flow_steps < 0:
        raise ConfigError("points must be 1 or more, and flow_steps 0 or more")
    run = opened(run)
    advice = f"type: {what_to_type('evidence', run.config)}"
    known = training_data(run, data, test, advice, run.ensemble.dtype)
    with Ticker(7 if priors else 3, show=progress) as ticker:
        how = {"points": points, "flow_steps": flow_steps}
        found = compute_evidence(run, known, priors=priors, tell=ticker.tick, **how)
    keep_evidence(run, found)
    return found


def _effort(quick: bool, wanted: Mapping[str, int]) -> Effort:
    for key, value in wanted.items():
        if value < 2:
            raise ConfigError(f"{key} must be 2 or more, not {value}")
    return replace(Effort.quick() if quick else Effort(), **wanted)


def _part_names(parts: Sequence[str] | None) -> list[str]:
    import shoal.analysis.landscape.analyses  # noqa: F401  # registers them

    names = landscape_parts.names() if parts is None else list(parts)
    if isinstance(parts, str) or not names:
        raise ConfigError(
            f"parts is a list of names, not {parts!r}; choose from: {', '.join(landscape_parts)}"
        )
    for name in names:
        landscape_parts[name]
    return names

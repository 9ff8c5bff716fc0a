"""`shoal.landscape`, `shoal.evidence`, `shoal.fidelity` and `run.chains`: analyses of a run."""

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from shoal.analysis.chains import POINTS, ChainDiagnostics, diagnose
from shoal.analysis.evidence.compute_evidence import Evidence, keep_evidence
from shoal.analysis.evidence.compute_evidence import evidence as compute_evidence
from shoal.analysis.fidelity.certificate import METHODS, Certificate, certify, keep_certificate
from shoal.analysis.landscape.scene import AnalysisResult, Effort
from shoal.analysis.landscape.scene import registry as landscape_analyses
from shoal.analysis.landscape.study import study
from shoal.core.arguments import (
    checked,
    list_of,
    seconds,
    text,
    whole,
    whole_from,
    whole_or_zero,
)
from shoal.core.arguments import (
    device as usable,
)
from shoal.core.display.progress import Ticker
from shoal.core.errors import ConfigError
from shoal.data.dataset import Dataset
from shoal.engine.members.precision import full_precision
from shoal.evaluation.data_arguments import (
    Labelled,
    evaluation_data,
    opened,
    placed,
    training_data,
)
from shoal.evaluation.evaluate import labelled_test
from shoal.prediction.metrics.similarity import COMPARED
from shoal.training.folder.own_data import what_to_type
from shoal.training.folder.run import Run
from shoal.training.folder.run_folder import DRAWS

__all__ = ["chains", "evidence", "fidelity", "landscape"]


@checked(
    points=whole_from(2, 10_000),
    inputs=whole_from(2),
    steps=whole_from(2),
    parts=list_of(text),
    device=usable,
)
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
    """Analyse the loss landscape around and between the members of a run.

    Each analysis is computed once. Its result stays in the folder of the run, or in memory for a
    run without a folder, and `shoal.report` shows it. The command `shoal landscape RUN` does the
    same.

    Args:
        run: a run, or its folder.
        data: training data of the run: a `Dataset`, a pair (x, y) or a loader; by default the data
            set of the run, if it can be loaded by name.
        test: test set, a pair (x, y) or a loader, if `data` has none.
        parts: names of analyses, such as "line" and "tunnel"; all by default.
        quick: coarse and fast, to check that everything runs.
        points: grid points along each side of a plane (default: 41).
        inputs: number of test and of training points (default: 2000).
        steps: number of steps to train a curve (default: 300).
        fresh: recompute everything.
        seed: fixes all randomness.
        device: device to compute on; None keeps the device of the members.
        progress: show progress.

    Of a run of draws, 64 evenly spaced draws stand for all.

    Returns:
        Results by name of the analysis; `result.scores["missing"]` is the reason if an analysis
        could not be computed.
    """
    wanted = {"points": points, "inputs": inputs, "steps": steps}
    effort = _effort(quick, {key: value for key, value in wanted.items() if value is not None})
    names = _analysis_names(parts)
    run = placed(opened(run).trained, device)
    if DRAWS in run.config:
        run = replace(run, ensemble=run.ensemble.spaced(COMPARED))
    advice = f"type: {what_to_type('landscape', run.config)}"
    known = training_data(run, data, test, advice, run.ensemble.dtype)
    seen: Counter[str] = Counter()
    with Ticker(len(names), show=progress) as ticker:

        def done(name: str, kept: bool) -> None:
            ticker.tick(f"{name} (kept from before)" if kept else name)

        def tick(name: str, count: int) -> None:
            seen[name] += count
            ticker.note(f"{name}: {seen[name]:,} networks")

        return study(run, known, names, effort=effort, fresh=fresh, seed=seed, tell=done, tick=tick)


@checked(points=whole, flow_steps=whole_or_zero)
def evidence(
    run: Run | str | os.PathLike[str],
    data: Dataset | Labelled | str | Mapping[str, Any] | None = None,
    *,
    test: Labelled | None = None,
    priors: bool = True,
    points: int | None = None,
    flow_steps: int = 200,
    progress: bool = False,
) -> Evidence:
    """Compute the log evidence, the member weights and learned priors of a run.

    The result stays in the folder of the run, or in memory for a run without a folder. Reports and
    weighted predictions use it. The command `shoal evidence RUN` does the same.

    Args:
        run: a run, or its folder.
        data: training data of the run: a `Dataset`, a pair (x, y) or a loader; by default the data
            set of the run, if it can be loaded by name.
        test: test set, a pair (x, y) or a loader, to evaluate the weights on.
        priors: also compare learned priors, which takes most of the time.
        points: number of training points for the curvature, which is scaled up to all points; by
            default 500, and at least 10 per weight in the last layer.
        flow_steps: number of steps to fit the flow prior.
        progress: show progress.
    """
    run = opened(run).trained
    if "any" not in run.likelihood.about.kinds:
        raise ConfigError("a custom loss is not a likelihood, so the run has no evidence")
    if DRAWS in run.config:
        raise ConfigError(
            "evidence is computed around maxima of the posterior, and draws are not maxima; ask "
            "the run whose members the chains began at"
        )
    advice = f"type: {what_to_type('evidence', run.config)}"
    known = training_data(run, data, test, advice, run.ensemble.dtype)
    with Ticker(8 if priors else 3, show=progress) as ticker:
        how = {"points": points, "flow_steps": flow_steps}
        result = compute_evidence(run, known, priors=priors, tell=ticker.tick, **how)
    keep_evidence(run, result)
    return result


@checked(
    methods=list_of(text),
    subspace=whole,
    points=whole_from(2),
    draws=whole_from(10),
    chains=whole_from(2),
    within=seconds,
)
def fidelity(
    run: Run | str | os.PathLike[str],
    data: Dataset | Labelled | str | Mapping[str, Any] | None = None,
    *,
    test: Labelled | None = None,
    methods: Sequence[str] = METHODS,
    subspace: int | None = None,
    points: int | None = None,
    draws: int = 1000,
    chains: int = 4,
    within: float = 600.0,
    seed: int = 0,
    progress: bool = False,
) -> Certificate:
    """Measure how close methods are to the posterior of a run's last layer, or in a subspace.

    Given the trunk, NUTS samples the posterior of the last layer (`shoal[fidelity]`); for real
    targets with one noise it is known in closed form. The distances of three kinds of predictions
    are measured: of this run, of last layers that other methods train on the same features, and of
    last-layer Laplace. The trunk is that of member 0 if members have trunks of their own.

    With `subspace=10`, NUTS samples the posterior of the whole network in ten directions through
    one member: principal components of the first chain for a run of draws, random ones for trained
    members. Methods train or draw in the same directions.

    The result stays in the folder of the run, or in memory for a run without a folder, and
    `shoal.report` shows it. The command `shoal fidelity RUN` does the same.

    Args:
        run: a run, or its folder.
        data: training data of the run: a `Dataset`, a pair (x, y) or a loader; by default the data
            set of the run, if it can be loaded by name.
        test: test set, a pair (x, y) or a loader, if `data` has none.
        methods: methods that train the same weights, as NAME, NAME:legacy or NAME:calibrated, and
            samplers that draw them.
        subspace: number of directions of a subspace; None for the last layer.
        points: number of training points of the posterior; all by default.
        draws: draws per chain.
        chains: number of chains.
        within: longest expected time of sampling in seconds; a longer one is refused.
        seed: fixes all randomness.
        progress: show progress.
    """
    run = placed(opened(run).trained, "cpu")
    advice = f"type: {what_to_type('fidelity', run.config)}"
    known = training_data(run, data, test, advice, run.ensemble.dtype)
    how = {"methods": methods, "points": points, "draws": draws, "chains": chains}
    how["subspace"] = subspace
    with Ticker(1 + len(methods), show=progress) as ticker:
        certificate = certify(run, known, **how, within=within, seed=seed, tell=ticker.tick)
    keep_certificate(run, certificate)
    return certificate


@checked(points=whole_from(2), device=usable)
@full_precision()
def chains(
    run: Run | str | os.PathLike[str],
    data: Dataset | Labelled | str | Mapping[str, Any] | None = None,
    *,
    points: int = POINTS,
    device: str | torch.device | None = None,
    seed: int = 0,
) -> ChainDiagnostics:
    """Whether the draws of a run can be trusted; see `Run.chains`."""
    run = placed(opened(run), device)
    dataset = evaluation_data(run, data, verb="chains")
    test, scaling = labelled_test(dataset), dataset.scaling
    return diagnose(run, test, name=dataset.name, scaling=scaling, points=points, seed=seed)


def _effort(quick: bool, wanted: Mapping[str, int]) -> Effort:
    return replace(Effort.quick() if quick else Effort(), **wanted)


def _analysis_names(parts: Sequence[str] | None) -> list[str]:
    import shoal.analysis.landscape.analyses  # noqa: F401  # registers the analyses

    names = landscape_analyses.names() if parts is None else list(parts)
    if not names:
        raise ConfigError(
            f"parts is a list of names, not {parts!r}; choose from: {', '.join(landscape_analyses)}"
        )
    for name in names:
        landscape_analyses[name]
    return names

"""`grow` adds members to a trained ensemble."""

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Unpack

import torch

from shoal.core.arguments import flag, whole_from
from shoal.core.errors import ConfigError
from shoal.data.dataset import Dataset, Split
from shoal.inference.ensemble import Ensemble
from shoal.inference.members import as_saved
from shoal.training.fit import fit
from shoal.training.folder.own_data import own_data
from shoal.training.folder.run import Run, is_adopted, opened
from shoal.training.folder.run_folder import DRAWS
from shoal.training.loop.callbacks import Callback, EpochEnd
from shoal.training.options.options import EXCLUDES, KEPT, RunOptions, accepted

__all__ = ["grow"]

_TAKES = {name: {other} for name, other in EXCLUDES.items()} | {"method": {"strength", "legacy"}}
"""Settings that a change discards: another length drops `steps`, another method its strength."""


def grow(
    run: Run | str | os.PathLike[str],
    more: int = 5,
    *,
    data: Dataset | Split | tuple[Any, Any] | Iterable[Any] | None = None,
    out: str | Path | None = None,
    resume: bool = False,
    loggers: Sequence[Any] = (),
    callbacks: Sequence[Callback | Callable[[EpochEnd], Any]] = (),
    progress: bool = True,
    **settings: Unpack[RunOptions],
) -> Run:
    """Train new members, which the old members repel.

    The old members are frozen: they enter the kernel, and only the new members move. New members
    have the velocity that they would have in the whole ensemble. The result is a run of all
    members, the old members first. New members are drawn from the run's seed, as if the ensemble
    had been larger from the start. They have the run's last architecture.

    Args:
        run: a run or its folder.
        more: how many new members.
        data: the training data; by default those of the run, if they are in memory or can be
            loaded.
        out: the folder that stores the grown run.
        resume: continue the grown run in `out`, if there is one.
        loggers: as in `shoal.fit`.
        callbacks: as in `shoal.fit`.
        progress: show a progress bar, or one line per epoch.

    Every other argument is an option of `shoal.fit`, such as `epochs`. By default it keeps the
    run's value. Adopted networks have no method: name the method of the new members.
    """
    changes = accepted(grow, RunOptions, settings)
    run, more, resume = opened(run), whole_from(1)("more", more), flag("resume", resume)
    if is_adopted(run.config) and "method" not in changes:
        raise ConfigError(
            "these members were adopted, so their method is not known; "
            "name the method of the new members, such as method='f-kde'"
        )
    if DRAWS in run.config:
        raise ConfigError(
            "the members of this run are draws; grow the run that they were drawn from"
        )
    arguments = _arguments(run, changes, data is None)
    if run.ensemble.offload is not None:  # the members are on the host, their device is not
        arguments.setdefault("device", run.ensemble.device)
    whole = _extended(run.ensemble, more, int(run.config.get("init_seed") or 0))
    return fit(
        whole,
        data if data is not None else arguments.pop("data"),
        **arguments,
        frozen=run.ensemble.members,
        out=out,
        resume=resume,
        loggers=loggers,
        callbacks=callbacks,
        progress=progress,
    )


def _arguments(run: Run, changes: Mapping[str, Any], same_data: bool) -> dict[str, Any]:
    """The run's arguments of `fit`, with the changes, and its data if they stay the same."""
    given = run.given if same_data else None
    if given is not None:
        kept = {"data": given.data, "sample_weight": given.weight, "validation": given.validation}
        changes = {**{name: each for name, each in kept.items() if each is not None}, **changes}
    elif same_data:
        data = own_data(run, "this run", "pass data=(x, y)", whole=True)
        changes = {**changes, "data": data}
    known = set(KEPT) - {"likelihood", "frozen"} - changes.keys()
    for key in changes:
        known -= _TAKES.get(key, set())
    stored = {key: value for key, value in run.config.items() if key in known and value is not None}
    for key, value in stored.items():
        if isinstance(value, dict) and "custom" in value:
            raise ConfigError(
                f"the {key} of this run was your own '{value['custom']}', which a run cannot "
                f"store; type: shoal.grow(run, {key}={value['custom']})"
            )
    return {"likelihood": run.trained.likelihood, **stored, **changes}


def _extended(ensemble: Ensemble, more: int, seed: int) -> Ensemble:
    """The same members, bit for bit, followed by new members."""
    pairs = [
        (build, group.members)
        for build, group in zip(ensemble.builds, ensemble.groups, strict=True)
        if build is not None
    ]
    if len(pairs) < len(ensemble.groups):
        raise ConfigError(
            "this run has no build for its networks; pass build to shoal.load or shoal.adopt"
        )
    build, count = pairs.pop()
    pairs.append((build, count + more))
    whole = Ensemble.init(as_saved(pairs, ensemble.state, ensemble.frozen_state), seed=seed)
    whole.builds = list(ensemble.builds)
    whole.to("cpu" if ensemble.offload is not None else ensemble.device, ensemble.dtype)
    known = ensemble.state
    whole.arrange_like(known)
    with torch.no_grad():
        for name, tensor in whole.state.items():
            old_members = tensor if name.startswith("shared/") else tensor[: len(known[name])]
            old_members.copy_(known[name])
    return whole

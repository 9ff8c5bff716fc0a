"""`grow` adds members to a trained ensemble."""

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, Unpack

import torch

from shoal.core.arguments import flag, positive, whole_from
from shoal.core.display.progress import notice
from shoal.core.display.text import plus_minus
from shoal.core.errors import ConfigError, DataError
from shoal.core.storage.files import write_json
from shoal.core.structure import parted
from shoal.core.values import describe_value
from shoal.data.batches.sources import gathered
from shoal.data.dataset import Dataset, Split, held_out
from shoal.inference.ensemble import Ensemble
from shoal.inference.members import as_saved
from shoal.prediction import predict
from shoal.prediction.worth import Gain, size_curves
from shoal.training.fit import fit
from shoal.training.folder.own_data import own_data
from shoal.training.folder.run import Run, is_adopted, opened
from shoal.training.folder.run_folder import DRAWS
from shoal.training.loop.callbacks import Callback, EpochEnd
from shoal.training.options.options import EXCLUDES, KEPT, RunOptions, accepted

__all__ = ["GROWTH", "grow"]

GROWTH = "growth.json"
"""What was expected before each step of growing, and what was decided."""

_TAKES = {name: {other} for name, other in EXCLUDES.items()} | {"method": {"strength", "legacy"}}
"""Settings that a change discards: another length drops `steps`, another method its strength."""


def grow(
    run: Run | str | os.PathLike[str],
    more: int = 5,
    *,
    until: str | None = None,
    price: float | None = None,
    most: int | None = None,
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

    With `until="worth it"` the run grows in steps and stops by itself. Before each step, subsets of
    the members tell how much further members are expected to lower the NLL on validation data; see
    `Run.worth`. It grows by as many as are worth `price` each, at most `more` at a time, and
    stops when the next one is not. The last note of the run says why.

        shoal.grow(run, until="worth it", price=0.001, validation=(x_val, y_val))

    Args:
        run: a run or its folder.
        more: how many new members; with `until`, how many at a time at most.
        until: "worth it", or None to grow once.
        price: the gain in NLL, in nats per data point, that one more member must be expected to
            bring.
        most: members at which growing stops in any case; None for no such number.
        data: the training data; by default those of the run, if they are in memory or can be
            loaded.
        out: the folder that stores the grown run. With `until`, every step is a run of its own,
            such as `out/members-8`, and `out/growth.json` says what was expected and decided.
        resume: continue the grown run in `out`, if there is one.
        loggers: as in `shoal.fit`.
        callbacks: as in `shoal.fit`.
        progress: show a progress bar, or one line per epoch.

    Every other argument is an option of `shoal.fit`, such as `epochs`. By default it keeps the
    run's value. Adopted networks have no method: name the method of the new members. `until` needs
    validation data: those of the run, or `validation=(x, y)`.
    """
    changes = accepted(grow, RunOptions, settings)
    run, more, resume = opened(run), whole_from(1)("more", more), flag("resume", resume)
    rule = _rule(until, price, most)
    loop: dict[str, Any] = {"loggers": loggers, "callbacks": callbacks, "progress": progress}
    if rule is not None:
        return _grow_by_steps(run, more, rule, data, out, changes, resume=resume, **loop)
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
        **loop,
    )


class _Rule(NamedTuple):
    """When growing stops: the price of a member in nats, and the most members."""

    price: float
    most: int | None


def _rule(until: Any, price: Any, most: Any) -> _Rule | None:
    if until is None:
        for name, value in (("price", price), ("most", most)):
            if value is not None:
                raise ConfigError(f'{name} is for growing in steps; add until="worth it"')
        return None
    if until != "worth it":
        raise ConfigError(f'until must be "worth it" or None, not {describe_value(until)}')
    if price is None:
        raise ConfigError(
            'until="worth it" needs the price of a member, in nats of NLL; type price=0.001'
        )
    return _Rule(positive("price", price), None if most is None else whole_from(1)("most", most))


def _grow_by_steps(
    run: Run, more: int, rule: _Rule, data: Any, out: Any, changes: dict[str, Any], **loop: Any
) -> Run:
    """Grow while further members are worth their price on validation data."""
    split = _validation(run, data, changes)
    steps: list[dict[str, Any]] = []
    while True:
        pred, y, weight = predict(run, split).values_alone(*parted(split.y))
        curve = size_curves(pred, y, weight=weight, scores=("nll",))["nll"]
        members, one = run.ensemble.members, curve.gain(1)
        room = more if rule.most is None else min(more, rule.most - members)
        count = curve.members_worth(rule.price, room)
        steps.append({"members": members, "gain": one.value, "error": one.error, "more": count})
        sentence = _decided(members, one, count, room, rule)
        if loop["progress"]:
            notice(sentence)
        if out is not None:
            table = {"price": rule.price, "points": curve.points, "steps": steps}
            write_json(Path(out) / GROWTH, table | ({} if count else {"stopped": sentence}))
        if not count:
            return replace(run, notes=[*run.notes, sentence])
        folder = None if out is None else Path(out) / f"members-{members + count}"
        run = grow(run, count, data=data, out=folder, **loop, **changes)


def _decided(members: int, one: Gain, count: int, room: int, rule: _Rule) -> str:
    """One sentence about a step, or about the end."""
    gain = f"one more lowers the NLL by {plus_minus(one.value, one.error)} nats in expectation"
    if count:
        return f"{members} members: {gain}; {count} more are worth {rule.price:.4g} nats each."
    if room < 1:
        return f"Growing stopped at {members} members, the most that were wanted: {gain}."
    return f"Growing stopped at {members} members: {gain}, less than the price of {rule.price:.4g}."


def _validation(run: Run, data: Any, changes: Mapping[str, Any]) -> Split:
    """The validation data on which further members are judged, of which no member has seen any."""
    arguments = _arguments(run, changes, data is None)
    data = data if data is not None else arguments["data"]
    validation, dtype = arguments.get("validation"), run.ensemble.dtype
    if isinstance(validation, float):
        whole = data.train if isinstance(data, Dataset) else gathered(data, dtype)
        held = held_out(len(whole), validation, int(arguments.get("seed") or 0))[1]
        return Split(whole.x[held], whole.y[held])
    if validation is None and isinstance(data, Dataset):
        validation = data.validation
    if isinstance(validation, Dataset):
        validation = validation.validation
    if validation is None:
        raise ConfigError(
            'until="worth it" needs data that no member has seen; pass validation=(x, y)'
        )
    split = validation if isinstance(validation, Split) else gathered(validation, dtype)
    if split.y is None:
        raise DataError("validation data need targets; pass validation=(x, y)")
    return split


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

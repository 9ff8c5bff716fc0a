"""A run: the result of `fit`, in memory and in its folder, and `load`, which reads the folder."""

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shoal.core import factories
from shoal.core.display.notebook import ORANGE, Curve, curves_svg, facts_html
from shoal.core.errors import ConfigError, StorageError
from shoal.core.storage.checkpoints import steps
from shoal.core.storage.disk import checked_path
from shoal.core.values import check_spec, describe_value
from shoal.inference import likelihoods
from shoal.inference.ensemble import Ensemble
from shoal.inference.likelihoods import Likelihood
from shoal.inference.members import Build
from shoal.models.blueprint import Blueprint
from shoal.training.folder.calibration import calibration_note, read_calibration
from shoal.training.folder.choice import Choice
from shoal.training.folder.history import best_epoch, best_epochs, has_diverged
from shoal.training.folder.run_folder import DRAWS, RunFolder

__all__ = [
    "ADOPTED",
    "GivenData",
    "Run",
    "RunFolder",
    "is_adopted",
    "load",
    "model_config",
    "opened",
    "run_id",
]

ADOPTED = "adopted"
"""The method of a run whose members were trained elsewhere."""

_BESIDE = 32 << 20
_MOST_LAYERS = 5000


def is_adopted(config: Mapping[str, Any]) -> bool:
    """Whether the members were trained elsewhere, so that their training is not known."""
    return config.get("method") == ADOPTED


@dataclass(frozen=True, eq=False)
class GivenData:
    """What `fit` was given to train on; a run in memory refers to it, and no file has it.

    Attributes:
        data: the training data, as they were given.
        validation: validation data of the user's own; None if there are none.
        weight: `sample_weight`, as it was given.
    """

    data: Any
    validation: Any = None
    weight: Any = None


@dataclass(frozen=True, repr=False)
class Run:
    """A trained ensemble with its settings and history.

    Attributes:
        ensemble: the members.
        likelihood: distribution of the targets, given the members' outputs.
        config: every setting, as plain values.
        history: one row per epoch.
        notes: important sentences, for example that repulsion was negligible.
        provenance: versions, device, data digest, input range, wall time.
        folder: the folder of the run; None for a run in memory.
        results: results of `shoal.evaluate`, `shoal.landscape` and `shoal.evidence`, by name, for a
            run in memory. A run with a folder stores them in files.
        choice: what a search chose, with `method="auto"` or `strength="auto"`; None otherwise.
        given: the data as `fit` got them, for `grow`, `compress` and analyses of a run in memory.
            A loaded or copied run has None.
    """

    ensemble: Ensemble
    likelihood: Likelihood
    config: dict[str, Any]
    history: list[dict[str, Any]]
    notes: list[str] = field(default_factory=list)
    provenance: dict[str, Any] = field(default_factory=dict)
    folder: Path | None = None
    results: dict[str, Any] = field(default_factory=dict, compare=False)
    choice: Choice | None = None
    given: GivenData | None = field(default=None, compare=False)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "given": None}  # data of the user do not travel with a copy

    @property
    def warnings(self) -> tuple[str, ...]:
        """The warnings of the run, which are notes too; none for runs of older versions."""
        return tuple(self.provenance.get("warnings", ()))

    @property
    def trained(self) -> "Run":
        """The run with the likelihood of its training, without `shoal.calibrate`."""
        if not self.likelihood.calibration:
            return self
        likelihood = _likelihood(self.config, self.likelihood.uncalibrated)
        return replace(self, likelihood=likelihood.restored(self.likelihood.uncalibrated.state))

    @property
    def target_shape(self) -> tuple[int, ...] | None:
        """Shape of one data point's targets, such as () for [N]; None for older runs."""
        shape = self.provenance.get("target_shape")
        return None if shape is None else tuple(shape)

    @property
    def best_epoch(self) -> int | None:
        """The epoch with the lowest validation NLL, or out-of-fold NLL; None without either."""
        return best_epoch(self.history)

    @property
    def best_epochs(self) -> list[int | None] | None:
        """The epoch with each trained member's lowest NLL on its fold; None without folds."""
        return best_epochs(self.history)

    def worth(
        self,
        data: Any = None,
        *,
        ood: Mapping[str, Any] | None = None,
        beside: "Mapping[str, Run | str | os.PathLike[str]] | None" = None,
        device: Any = None,
        seed: int = 0,
    ) -> Any:
        """What more members would add, from subsets of the members at hand, and what they cost.

            found = run.worth((x_test, y_test), ood={"letters": x_letters})
            found.gain(2).value, found.gain(2, "accuracy").value, found.seconds

        The expected NLL, accuracy or RMSE and CRPS, and AUROC of ensembles of 1 to M members are
        averages over all subsets of each size, or over random ones for many members. Their
        continuation beyond M has an interval. At least three members are needed.

        Members are taken as exchangeable: new ones are drawn as the old ones were. Repelled members
        are subsets of one ensemble, not ensembles of their own.

        Args:
            data: test data, as `shoal.evaluate` takes them.
            ood: out-of-distribution inputs by name, for AUROC.
            beside: other runs by name, such as a longer training or wider networks, whose gain in
                NLL and whose further seconds are shown too.
            device: device to compute on; None keeps the device of the members.
            seed: fixes the random subsets.

        Returns:
            A `shoal.Worth`.
        """
        return factories["worth"](self, data, ood=ood, beside=beside, device=device, seed=seed)

    def chains(
        self, data: Any = None, *, points: int = 200, device: Any = None, seed: int = 0
    ) -> Any:
        """Whether the draws of `shoal.draw` can be trusted, judged by predictions.

            found = run.chains((x_test, y_test))
            found.trusted, found.warnings

        R-hat and effective draws of predictions and log-likelihoods, drift of the NLL, chains that
        are stuck or lost, refused steps and energy error: a sentence each.

        Args:
            data: labelled data, as `shoal.evaluate` takes them.
            points: number of data points whose predictions are followed, chosen at random.
            device: device to compute on; None keeps the device of the members.
            seed: fixes the chosen points.

        Returns:
            A `shoal.ChainDiagnostics`.
        """
        return factories["chains"](self, data, points=points, device=device, seed=seed)

    def __repr__(self) -> str:
        facts = self._facts()
        where = "in memory" if self.folder is None else repr(str(self.folder))
        return f"Run({facts['method']}, {facts['training']}, {self.ensemble!r}, {where})"

    def _repr_html_(self) -> str:
        where = "not kept in a folder" if self.folder is None else self.folder
        notes = {"notes": " ".join(self.notes) or None, "folder": where}
        facts = {**self._facts(), "ensemble": self.ensemble, **notes}
        return facts_html("Run", facts, _history_svg(self.history))

    def _facts(self) -> dict[str, object]:
        method, loss = self.config.get("method"), self.history[-1]["loss"] if self.history else None
        epochs = len(self.history)
        diverged = ", diverged" if has_diverged(self.history) else ""
        last = "" if loss is None else f", last loss {loss:.4g}{diverged}"
        known = f"{epochs} epoch{'' if epochs == 1 else 's'}{last}"
        return {
            "method": method.get("name", "custom") if isinstance(method, dict) else method,
            "training": "training not known" if is_adopted(self.config) else known,
        }


def _history_svg(history: Sequence[Mapping[str, Any]]) -> str:
    """Mean loss, the range of the members' losses, and NLL on validation data, as SVG.

    An empty text where no epoch has a finite loss, as for adopted members.
    """
    losses = [row.get("loss") for row in history]
    if not any(_is_finite(loss) for loss in losses):
        return ""
    members = [
        [loss for loss in row.get("member_loss") or () if _is_finite(loss)] for row in history
    ]
    curves = {
        "training loss (area: all members)": Curve(
            losses,
            low=[min(each, default=None) for each in members],
            high=[max(each, default=None) for each in members],
        )
    }
    held_out = [(row.get("validation") or {}).get("nll") for row in history]
    if any(_is_finite(value) for value in held_out):
        curves["validation NLL"] = Curve(held_out, ORANGE, dashed=True)
    ends = (history[0].get("epoch", 1), history[-1].get("epoch", len(history)))
    return curves_svg(curves, "epoch", ends, "nats per data point")


def _is_finite(value: float | None) -> bool:
    return value is not None and math.isfinite(value)


def opened(run: "Run | str | os.PathLike[str]") -> "Run":
    """The run itself, or the run in a folder."""
    if isinstance(run, str | os.PathLike):
        return load(Path(run))
    if not hasattr(run, "ensemble") or not hasattr(run, "likelihood"):
        raise ConfigError(
            f"wanted a run or its folder, not {describe_value(run)}; for an ensemble type: "
            f"shoal.evaluate(shoal.predict(ensemble, x), y)"
        )
    return run


def load(
    folder: str | Path,
    build: Build | Sequence[tuple[Build, int]] | None = None,
    likelihood: Likelihood | None = None,
) -> Run:
    """Load a run from its folder, at its last valid checkpoint.

    A run with `keep="best"` has the members of its best epoch so far.

    Args:
        folder: the folder that `fit(out=...)` wrote.
        build: makes the networks; not needed for a registered model.
        likelihood: the likelihood of the run, if it is your own; a registered one is in the folder.
    """
    files = RunFolder(checked_path(folder, "folder"))
    config = files.config()
    if not steps(files.checkpoints) and DRAWS in config:
        raise StorageError(
            f"the chains of {files.path} have not ended; type shoal.draw(..., out=..., resume=True)"
        )
    if not steps(files.checkpoints):
        raise StorageError(
            f"{files.path} holds no checkpoint yet; its run stopped before the first checkpoint"
        )
    likelihood, numbers = _likelihood(config, likelihood), None
    if build is None:
        build = blueprints = _builds(config, files.path)
        numbers = sum(blueprint.numbers() * count for blueprint, count in blueprints)
    # A checkpoint holds at most eight numbers of eight bytes per weight, and some small tensors.
    checkpoint = files.checkpoint(limit=None if numbers is None else 64 * numbers + _BESIDE)
    likelihood = likelihood.restored(files.likelihood_state(checkpoint))
    calibrated = read_calibration(files.path, checkpoint.step)
    state = files.ensemble_state(checkpoint)
    if numbers is not None:
        _check_size(state, numbers, files.path)
    frozen = state.keys() - checkpoint.parts.get("ensemble", {}).keys()
    if DRAWS in config:
        ensemble = _drawn(state, build, frozen, config)
    else:
        ensemble = Ensemble.from_state(state, build, frozen)
    ensemble.use_output(config.get("outputs"))
    ensemble.derivatives = likelihood.derivatives_by
    provenance = files.provenance()
    notes = provenance.pop("notes", [])
    return Run(
        ensemble,
        calibrated or likelihood,
        config,
        checkpoint.state["history"],
        notes + ([calibration_note(calibrated)] if calibrated else []),
        provenance,
        files.path,
        choice=files.choice(),
    )


def _drawn(
    state: dict[str, Tensor],
    build: Build | Sequence[tuple[Build, int]],
    frozen: Iterable[str],
    config: Mapping[str, Any],
) -> Ensemble:
    """An ensemble of draws; only as many networks are made as there are chains."""
    count = config[DRAWS]["draws"]
    chains = [table["members"] // count for table in config["model"]]
    makes = [build] if callable(build) else [make for make, _ in build]
    first = {**state, "alive": state["alive"][: sum(chains)]}
    weights: dict[str, Tensor] = {}
    for name, tensor in state.items():
        kind, _, rest = name.partition("/")
        if kind not in ("weights", "buffers"):
            continue
        group = int(rest.partition(".")[0].removeprefix("group")) if len(chains) > 1 else 0
        exact = tensor.float() if tensor.dtype == torch.bfloat16 else tensor
        first[name] = exact[: chains[group]]
        if kind == "weights":
            weights[rest] = exact
    pairs = list(zip(makes, chains, strict=True))
    return Ensemble.from_state(first, pairs, frozen).repeated(count, weights)


def run_id(folder: Path | str) -> str | None:
    """The unique name of a run; None for older runs and for folders without a run."""
    files = RunFolder(Path(folder))
    return files.provenance().get("run_id") if (files.path / "provenance.json").exists() else None


def _check_size(state: Mapping[str, Tensor], numbers: int, path: Path) -> None:
    """Refuse networks whose size differs from the tensors, before memory is allocated."""
    held = sum(tensor.numel() for name, tensor in state.items() if name != "alive")
    held += _repeated(state)
    if held != numbers:
        raise ConfigError(
            f"the networks in the config.toml of {path} hold {numbers:,} numbers, its "
            f"checkpoint holds {held:,}; restore the original config.toml"
        )


def _repeated(state: Mapping[str, Tensor]) -> int:
    """How many more numbers there would be if no tensor were shared."""
    total = 0
    for name, tensor in state.items():
        kind, _, rest = name.partition("/")
        if kind == "shared":
            group = rest.partition(".")[0] + "."
            weights = [t for n, t in state.items() if n.startswith(f"weights/{group}")]
            weights = weights or [t for n, t in state.items() if n.startswith("weights/")]
            total += tensor.numel() * (len(weights[0]) - 1 if weights else 0)
    return total


def model_config(ensemble: Ensemble) -> dict[str, Any]:
    """The networks as a folder stores them: their blueprints, or the name of the user's class."""
    tables = []
    for build, group in zip(ensemble.builds, ensemble.groups, strict=True):
        if isinstance(build, Blueprint):
            tables.append(build.spec | {"members": group.members})
        else:
            made = type(group.prototype) if build is None else build
            name = getattr(made, "__qualname__", type(made).__qualname__)
            tables.append({"custom": name, "members": group.members})
    return {"members": ensemble.members, "init_seed": ensemble.seed, "model": tables}


def _builds(config: dict[str, Any], folder: Path) -> list[tuple[Blueprint, int]]:
    """Blueprints of the networks, each with its number of members."""
    pairs = []
    lists = [v for table in config.get("model", []) for v in table.values() if isinstance(v, list)]
    if sum(map(len, lists)) > _MOST_LAYERS:
        raise ConfigError(f"the run's config.toml has networks of over {_MOST_LAYERS:,} layers")
    for table in config.get("model", []):
        if "custom" in table:
            raise ConfigError(
                f"the network of {folder} was made by your own '{table['custom']}', not stored "
                f"there; type: shoal.load({str(folder)!r}, build={_argument(table['custom'])})"
            )
        settings = dict(table)
        count = settings.pop("members", None)
        if type(count) is not int or count < 1:
            raise ConfigError(
                f"the run's config.toml has a model of {describe_value(count)} members"
            )
        try:
            pairs.append((Blueprint.from_spec(settings), count))
        except KeyError as error:
            raise ConfigError(f"the run's config.toml has a model without {error}") from error
        except TypeError as error:
            raise ConfigError(
                f"the run's config.toml has a model of wrong types: {error}"
            ) from error
    return pairs


def _argument(name: str) -> str:
    """The name of a function if users can type it, or a placeholder."""
    return name if name.isidentifier() else "build"


def _likelihood(config: dict[str, Any], likelihood: Likelihood | None) -> Likelihood:
    spec = config.get("likelihood", "categorical")
    if isinstance(spec, dict) and "custom" in spec:
        if likelihood is not None:
            return likelihood
        raise ConfigError(
            f"this run's likelihood is your own '{spec['custom']}', which a folder cannot store; "
            f"type: shoal.load(folder, build, likelihood=...)"
        )
    check_spec("likelihood", spec, likelihoods.registry)
    return likelihoods.registry.make(spec)

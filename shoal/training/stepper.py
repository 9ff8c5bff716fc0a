"""One training step for loops of one's own: the step of `fit`, without its loop."""

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Unpack

import torch
from torch import Tensor

from shoal.core.arguments import flag, not_negative, positive
from shoal.core.errors import ConfigError, DataError
from shoal.core.opaque import Opaque
from shoal.core.structure import Inputs, MemberWeighted, Structured, parted
from shoal.core.values import describe_value
from shoal.data.batches.batch import (
    Targets,
    inputs_of,
    raw_batch,
    rounded,
    target_shape,
    targets_of,
)
from shoal.data.batches.sources import ArrayBatches
from shoal.engine.members.precision import calculating_in, full_precision
from shoal.engine.resources.graph import CapturedMove
from shoal.inference.ensemble import Ensemble
from shoal.inference.likelihoods import Likelihood, default_for
from shoal.inference.likelihoods.custom_loss import Custom
from shoal.inference.posterior import initialised_from, site_axes, total_weight
from shoal.inference.priors import FunctionalPrior, WeightPrior
from shoal.interaction.axes import needs_data
from shoal.interaction.methods import Method
from shoal.interaction.repulsion import Repulsion
from shoal.training.mover.mover import Mover
from shoal.training.mover.prepare import destination, nothing_to_prepare, prepared
from shoal.training.options.look import View, warn
from shoal.training.options.optim import flat_state, set_learning_rate
from shoal.training.options.options import (
    DEFAULT_METHOD,
    Options,
    StepOptions,
    accepted,
)
from shoal.training.options.points import needs_statistics, resolved
from shoal.training.options.settings import Settings
from shoal.training.step.drive import StepContext
from shoal.training.step.results import StepInfo

__all__ = ["Stepper"]

Loss = Callable[[Any, Any], Tensor]
"""From the outputs [B, ..., C] of one member and its targets to losses [B, ...] or their mean."""


class Stepper:
    """The training step of `fit`, for a loop of your own.

        stepper = shoal.Stepper(ensemble, n=len(data), method="kde", lr=1e-3)
        for batch in loader:
            info = stepper(batch)  # info.loss [M], info.ratio, ...

    Reinforcement learning, several losses or schedules of your own need another loop than that of
    `fit`. A step here does the same as a step of `fit`: with the same batches and settings, the
    members come out the same. On a GPU, steps of one shape are captured and replayed. A batch is
    checked as by `fit`. A pair of tensors on the GPU is checked until its shape is captured: then
    nothing waits for the device.

    Attributes:
        ensemble: the members, changed in place and left in training mode.
        step: number of finished steps.
        target_shape: shape of one data point's targets, as the first batch has them.
    """

    def __init__(
        self,
        ensemble: Ensemble,
        n: int,
        *,
        method: str | Method | Repulsion | Mapping[str, Any] = DEFAULT_METHOD,
        strength: float | None = None,
        likelihood: Likelihood | str | Mapping[str, Any] | None = None,
        prior: WeightPrior | FunctionalPrior | str | Mapping[str, Any] = "gaussian",
        optimizer: str | type[torch.optim.Optimizer] | Mapping[str, Any] = "adam",
        lr: float = 1e-3,
        seed: int = 0,
        device: torch.device | str | None = None,
        frozen: int = 0,
        inputs: Any = None,
        **more: Unpack[StepOptions],
    ) -> None:
        """Prepare the members.

        Args:
            ensemble: the members.
            n: number of data points N that the batches stand for; it scales prior and repulsion.
            method: as in `fit`; so are the arguments that are not described here.
            likelihood: as in `fit`; by default from the first batch.
            lr: learning rate of all steps that do not have their own.
            inputs: inputs to which methods such as 'forde' fit their axes, and to which points such
                as 'noise' fit their statistics.
            more: options of `fit` that one step depends on.
        """
        self._options = Options.of(locals() | accepted(Stepper, StepOptions, more))
        self._where, self._dtype = destination(ensemble, device, self._options.precision)
        if (points := positive("n", n)) < 1:
            raise ConfigError(f"n must be the number of data points, 1 or more, not {points:g}")
        self.n, self._inputs = n, inputs
        self.ensemble = ensemble.to(self._where, self._dtype).train()
        self.ensemble.use_output(self._options.outputs)
        self.step = 0
        self.target_shape: tuple[int, ...] | None = None
        self._mover: Mover | None = None
        self._shape = torch.Size()
        self._waiting: Mapping[str, Any] | None = None
        self._captured: dict[Any, CapturedMove] = {}
        self._checked: dict[Hashable, CapturedMove] = {}
        self._losses: dict[Any, Custom] = {}

    def __call__(
        self,
        batch: Any,
        *,
        lr: float | None = None,
        annealing: float = 1.0,
        strength: float | None = None,
        loss: Loss | None = None,
        own: bool = False,
    ) -> StepInfo:
        """Take one step with every member.

        Args:
            batch: (x, y), (x, y, weight), a dict with `labels`, or a batch object. A weight may
                be [B], or [M, B] for members that see different points of a common batch.
            lr: learning rate of this step and of later steps.
            annealing: factor of the driving force.
            strength: factor of the repulsive force in this step; None for that of the stepper.
                Steps with a strength of their own are not captured.
            loss: a loss in place of the likelihood for this step, as in `likelihoods.Custom`.
            own: every member has its own batch: inputs and targets are [M, B, ...]. Members are
                then compared by weights, by input gradients, or at `points` of the method.

        Returns:
            Measures of the step, on the device: `loss` [M], `drive`, `push`, `ratio`, ...
        """
        own, annealing = flag("own", own), not_negative("annealing", annealing)
        rate = None if lr is None else positive("lr", lr)
        known = self._known(batch, annealing, strength, loss, own)
        if known is not None and (info := self._replayed(known, batch, rate)) is not None:
            return info
        x, y = self._read(batch, own, loss)
        mover = self._mover or self._begin(x, y, own, loss)
        context = self._context(mover, loss, own, strength)
        if not context.posterior.likelihood.standardises:
            y = rounded(y, self._dtype)
        if rate is not None:
            set_learning_rate(mover.optimizer, rate)
        kind = None if strength is not None else (loss, own)
        with calculating_in(self._options.precision, self.ensemble), mover.memory.limited():
            info = self._move(mover, x, y, annealing, context, kind)
        self.step += 1
        if known is not None and _same_numbers(batch, x, y):
            case = (kind, annealing, _shapes(x), _shapes(y))
            if (captured := self._captured.get(case)) is not None:
                self._checked[known] = captured
        return info

    def _known(
        self, batch: Any, annealing: float, strength: float | None, loss: Loss | None, own: bool
    ) -> Hashable | None:
        """What the check of a pair of tensors on the device depends on; None for other batches."""
        pair = type(batch) in (tuple, list) and len(batch) == 2
        if not pair or strength is not None or not all(type(t) is Tensor for t in batch):
            return None
        (x, y), here = batch, self.ensemble.device
        if not self._on_gpu or x.device != here or y.device != here:
            return None
        return x.shape, x.dtype, y.shape, y.dtype, annealing, loss, own

    def _replayed(self, known: Hashable, batch: Any, rate: float | None) -> StepInfo | None:
        """A captured step with a batch like one that was checked; None if there is none."""
        captured = self._checked.get(known)
        if captured is None or captured.graph is None or self._mover is None:
            return None
        if rate is not None:
            set_learning_rate(self._mover.optimizer, rate)
        x, y = batch
        info = captured.replayed(x, y, self.step)
        self.step += 1
        return info

    def _context(
        self, mover: Mover, loss: Loss | None, own: bool, strength: float | None
    ) -> StepContext:
        """The context of all steps, with the changes of this one."""
        context = mover.context
        if own:
            self._check_own(mover)
            context = replace(context, own_inputs=True, own_targets=True)
        if loss is not None:
            kind = OwnLoss if own else Custom
            custom = self._losses.setdefault((loss, own), kind(loss))
            context = replace(context, posterior=replace(context.posterior, likelihood=custom))
        if strength is None:
            return context
        if context.repulsion is None:
            raise ConfigError("a plain ensemble has no repulsion; leave strength out")
        checked = not_negative("strength", strength)
        return replace(context, repulsion=replace(context.repulsion, strength=checked))

    def _read(self, batch: Any, own: bool, loss: Loss | None) -> tuple[Inputs, Targets]:
        raw = raw_batch(batch)
        members = self.ensemble.members - self._options.frozen
        weight, per_member = raw.weight, None
        shape = tuple(getattr(weight, "shape", ()))
        if (
            len(shape) == 2
            and shape == (members, len(raw.y))
            and shape != tuple(getattr(raw.y, "shape", ()))
        ):
            per_member, weight = torch.as_tensor(weight).to(self._where, self._dtype), None
        y = targets_of(raw.y, None, self._dtype, weight, raw.x)
        if self._mover is not None and loss is None and y.device.type == "cpu":
            self._check_targets(
                self._mover.likelihood, y, own
            )  # targets on a GPU are not waited for
        y = y.to(self._where)
        x = inputs_of(raw.x, self._dtype, self.ensemble.takes_whole, len(y)).to(self._where)
        if own and (len(x) != members or len(y) != members):
            raise DataError(
                f"with own=True inputs and targets are [{members}, B, ...], one batch per member, "
                f"not {tuple(x.shape)} and {tuple(y.shape)}"
            )
        if not own and len(x) != len(y):
            raise DataError(f"x has {len(x)} points but y has {len(y)}; each x needs its own y")
        if own and isinstance(y, Tensor) and y.is_floating_point() and y.ndim == 2:
            y = y.unsqueeze(-1)  # a column axis, so that members are not taken for data points
        if self.target_shape is None and (shape := target_shape(raw.y)) is not None:
            self.target_shape = shape[1:] if own else shape
        if per_member is not None:
            y = MemberWeighted.of_pair(y, per_member)
        return x, y

    @full_precision()
    def _begin(self, x: Inputs, y: Targets, own: bool, loss: Loss | None) -> Mover:
        """Make the mover from the first batch, which shows the units and the number of targets."""
        one = (x[0], y[0]) if own else (x, y)
        targets, _ = parted(one[1])
        options = self._options
        self.ensemble.keep_written(one[0])
        named = None if options.likelihood is None else Settings.resolve(options).likelihood
        self.ensemble.derivatives = None if named is None else named.derivatives_by
        with torch.no_grad():
            outputs = self.ensemble.without_side_effects()(one[0])
        if options.likelihood is None:
            known = Custom(loss) if loss is not None else default_for(targets, outputs.shape[-1])
            options = replace(options, likelihood=known)
        settings = Settings.resolve(options)
        likelihood, self._shape = settings.likelihood, outputs.shape[2:]
        if not likelihood.standardises:
            one = one[0], rounded(one[1], self._dtype)
            targets, _ = parted(one[1])
        self._check_targets(likelihood, y, own)
        sites = likelihood.objective(outputs, targets).shape[2:]
        seen = targets if isinstance(targets, Tensor) else None
        chosen = self._options.likelihood is not None
        samples = self._options.noise is not None
        view = View(self.ensemble, likelihood, chosen, one[0], seen, int(self.n), samples=samples)
        warn(view.sentences())
        # Weights of single members choose their points; they do not change what the data are.
        common = targets if isinstance(one[1], MemberWeighted) else one[1]
        likelihood = initialised_from(likelihood, common, sites)
        share = total_weight(likelihood, common, sites) / len(targets)
        repulsion = self._repulsion(settings, one[0])
        n = self.n * share
        mover = Mover(self.ensemble, settings, repulsion, likelihood, n, int(self.n), 0)
        with calculating_in(options.precision, self.ensemble):
            mover.memory.fit_cache(lambda: one[0])
            mover.memory.fit(mover.trial_context, one[0], common)
        self._mover = mover
        if self._waiting is not None:
            self._restore(mover, self._waiting)
        return mover

    def _check_targets(self, likelihood: Likelihood, y: Targets, own: bool) -> None:
        """Refuse targets that do not fit the outputs of the networks, as `fit` does."""
        targets, _ = parted(y)
        if own and isinstance(targets, Tensor):
            targets = targets.flatten(0, 1)
        *sites, width = self._shape
        likelihood.check(targets, width, *site_axes(torch.Size(sites)))

    def _repulsion(self, settings: Settings, first: Inputs) -> Repulsion | None:
        method, repulsion = settings.method, settings.method.repulsion
        if repulsion is None or nothing_to_prepare(repulsion):
            return repulsion
        fits = needs_data(repulsion.space) or needs_statistics(repulsion.points)
        if self._inputs is None and fits:
            raise ConfigError(
                f"'{method.name}' fits its axes or points to inputs; type Stepper(..., inputs=x)"
            )
        inputs = self._inputs
        x = first if inputs is None else inputs_of(inputs, self._dtype, self.ensemble.takes_whole)
        placed: Any = x.to(self._where)
        if isinstance(placed, Opaque):
            return repulsion
        rows = torch.zeros(len(placed), device=self._where)
        source = ArrayBatches(placed, rows, len(placed))
        method = resolved(method, self.ensemble, lambda: first)
        return prepared(method, source, None, self._dtype)[0]

    def _check_own(self, mover: Mover) -> None:
        if (what := mover.settings.needs_common_batches) is not None:
            raise ConfigError(f"{what} needs batches that members share; leave own=True out")
        if mover.settings.compares_outputs_here:
            raise ConfigError(
                "members with batches of their own share no inputs to compare outputs at; name "
                "points, as method={'name': 'f-kde', 'points': 'mixup'}, or give a common batch "
                "with weights [M, B]"
            )

    def _move(
        self, mover: Mover, x: Inputs, y: Targets, annealing: float, context: Any, kind: Any
    ) -> StepInfo:
        """Take the step; `kind` tells captured steps apart, and is None for one not captured."""
        rate = mover.optimizer.param_groups[0]["lr"]
        plain = isinstance(x, Tensor | Structured) and isinstance(rate, Tensor)
        captures = plain and mover.plan.graph and self._on_gpu
        if kind is None or not captures:
            return mover.move(x, y, annealing, self.step, context)
        case = (kind, annealing, _shapes(x), _shapes(y))
        if case not in self._captured:
            self._captured[case] = CapturedMove(
                lambda a, b, step: mover.move(a, b, annealing, step, context),
                x,
                y,
                mover.memory,
            )
        return self._captured[case](x, y, self.step)

    @property
    def _on_gpu(self) -> bool:
        return self._where.type == "cuda"

    @property
    def likelihood(self) -> Likelihood | None:
        """The likelihood with its learned numbers; None before the first step."""
        return None if self._mover is None else self._mover.likelihood

    def state_dict(self) -> dict[str, Any]:
        """All that later steps depend on: tensors by part and name, and plain values."""
        if self._mover is None:
            ensemble = {name: t.detach() for name, t in self.ensemble.state.items()}
            return {"step": 0, "tensors": {"ensemble": ensemble}, "optimizer": None}
        mover = self._mover
        plain = {"step": self.step, "n": mover.posterior.n}
        return {**plain, "tensors": mover.tensors(), "optimizer": flat_state(mover.optimizer)[1]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where `state_dict` was taken, with the same settings."""
        if not isinstance(state, Mapping) or not {"step", "tensors", "optimizer"} <= state.keys():
            came = describe_value(state)
            raise ConfigError(f"state must be what Stepper.state_dict() returned, not {came}")
        self.step = int(state["step"])
        self.ensemble.load_state(state["tensors"]["ensemble"])
        if state["optimizer"] is None:
            return
        if self._mover is None:
            self._waiting = state  # the optimiser is made at the first batch
        else:
            self._restore(self._mover, state)

    def _restore(self, mover: Mover, state: Mapping[str, Any]) -> None:
        mover.posterior = mover.for_targets(state["n"])
        mover.load_tensors(state["tensors"], state["optimizer"])
        self._waiting = None
        self._captured.clear()
        self._checked.clear()


@dataclass(frozen=True, repr=False)
class OwnLoss(Custom):
    """A loss for members that have targets of their own, [M, B, ...]."""

    def _each(self, outputs: Tensor, y: Any) -> Tensor:
        targets = y.original() if isinstance(y, Structured) else y
        return torch.vmap(self.loss)(outputs, targets)


def _shapes(value: Any) -> tuple:
    """Names, shapes and types of the tensors of a batch: what a captured step depends on."""
    parts = {"": value} if isinstance(value, Tensor) else value.tensors
    return tuple((name, tensor.shape, tensor.dtype) for name, tensor in parts.items())


def _same_numbers(batch: Any, x: Any, y: Any) -> bool:
    """Whether a pair of tensors became the batch without a conversion."""
    pairs = zip(batch, (x, y), strict=True)
    return all(
        type(made) is Tensor and made.data_ptr() == raw.data_ptr() and made.dtype == raw.dtype
        and made.numel() == raw.numel() and raw.is_contiguous()
        for raw, made in pairs
    )  # fmt: skip

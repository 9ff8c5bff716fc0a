"""One pass of the networks over a batch: outputs, and input gradients of all or some rows.

`TrackedInputs` records gradients at inputs or embeddings, `PassResult` holds the result of a pass,
and `random_rows` draws the batch fraction on which members are compared.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shoal.core.differentiate import refused_twice
from shoal.core.errors import DataError
from shoal.core.random import key, uniform
from shoal.core.structure import Inputs, Structured, parted, rows_of
from shoal.core.types import Tree
from shoal.data.batches.batch import Targets
from shoal.engine.derivatives.shared_statistics import RowRule, row_rule
from shoal.engine.members.member_runner import MemberInputs, MemberRunner, twice_differentiable
from shoal.engine.resources.plan import has_batch_norm, has_convolutions
from shoal.inference.ensemble import Ensemble
from shoal.inference.likelihoods import Likelihood
from shoal.inference.posterior import target_weights
from shoal.interaction.spaces import InputGradients, Space, innermost

__all__ = [
    "BatchRows",
    "PassContext",
    "PassResult",
    "TrackedInputs",
    "forward_with_gradients",
    "random_rows",
    "tracked_input",
]


@dataclass(frozen=True, kw_only=True, eq=False)
class PassContext:
    """How members run, and the randomness of a step.

    Attributes:
        mapping: the member runner.
        seed: seed of dropout and of all other draws of a step.
        step: training step, keys the draws together with the seed.
    """

    mapping: MemberRunner = MemberRunner()
    seed: int = 0
    step: int | Tensor = 0


@dataclass(frozen=True)
class TrackedInputs:
    """A batch for every member, with the tensors at which autograd records gradients.

    Attributes:
        x: inputs [M, B, ...]; tokens [B, ...] for all members.
        probes: tensors added to the embeddings of each architecture, for tokens.
        name: name of the tensor at which gradients are recorded, in a structure.
        own: every member has its own inputs [M, B, ...].
    """

    x: Inputs
    probes: list[Tree] | None = None
    name: str | None = None
    own: bool = True

    @classmethod
    def of(
        cls, ensemble: Ensemble, x: Inputs, name: str | None = None, own: bool = False
    ) -> "TrackedInputs":
        """Record gradients at real inputs, or at the first embedding of tokens.

        Args:
            ensemble: the members.
            x: inputs [B, ...].
            name: which input of a structure; None for the only real input, or the embedding.
            own: every member has its own inputs [M, B, ...].
        """
        one = x[0] if own else x
        tracked = tracked_input(one, name)
        if tracked is not None:
            name = tracked[0]
            if isinstance(x, Tensor):
                each = x if own else x.expand(ensemble.members, *x.shape)
                return cls(each.detach().requires_grad_())
            assert isinstance(x, Structured)
            whole = x if own else x.expand(ensemble.members)
            copies = whole.tensors[name].detach().requires_grad_()
            return cls(whole.replaced(name, copies), None, name)
        probes = []
        for group in ensemble.groups:
            embedding = group.embedded(one)
            if embedding is None:
                raise DataError(
                    "integer inputs have no gradient, and the network has no nn.Embedding as its "
                    "first layer; convert the inputs to float, or use a method such as 'f-kde'"
                )
            name, shape = embedding
            zeros = torch.zeros(group.members, *shape, device=x.device, dtype=ensemble.dtype)
            probes.append({name: zeros.requires_grad_()})
        shapes = {next(iter(probe.values())).shape[1:] for probe in probes}
        if len(shapes) > 1:
            raise DataError(
                "the architectures have embeddings of different shapes, so their input "
                "gradients cannot be compared; give the embeddings one size"
            )
        return cls(x, probes, own=own)

    @property
    def leaves(self) -> list[Tensor]:
        """Tensors at which gradients are recorded."""
        if self.probes is not None:
            return [t for p in self.probes for t in p.values()]
        if isinstance(self.x, Structured):
            return [self.x.tensors[self.name or ""]]
        assert isinstance(self.x, Tensor)
        return [self.x]

    def run(self, ensemble: Ensemble, context: PassContext) -> Tensor:
        """Outputs [M, B, C]."""
        with twice_differentiable(context.mapping, self.x.is_cuda) as mapping:
            return ensemble(self.x, mapping, self.own, context.seed, context.step, self.probes)

    def run_in(
        self, batch: MemberInputs, rule: RowRule | None, ensemble: Ensemble, context: PassContext
    ) -> tuple[Tensor, Tensor]:
        """Outputs for a whole batch, and for the rows whose gradients are recorded.

        Args:
            batch: the inputs.
            rule: how the rows run; None for batch normalisation by their own statistics, not the
                batch's. Tokens always do, since their gradients are recorded at the embeddings.
            ensemble: the members.
            context: how the members run.
        """
        seed, step = context.seed, context.step
        # Without convolutions and statistics there is nothing to share, and a separate batch needs
        # no second derivative.
        apart = not (has_convolutions(ensemble.groups) or has_batch_norm(ensemble.groups))
        apart = apart or self.probes is not None
        if rule is None or apart or not isinstance(self.x, Tensor):
            whole = ensemble(batch.x, context.mapping, batch.own, seed, step)
            return whole, self.run(ensemble.without_side_effects(), context)
        fast = twice_differentiable(context.mapping, self.x.is_cuda)
        with fast as mapping, row_rule(rule):
            whole, part = ensemble.forward_with_rows(batch, self.x, mapping, seed, step)
        return whole, part

    def gradients(self, scores: Tensor, live: bool) -> Tensor:
        """Gradient of each member's scores, summed over the batch [M, B, ...].

        Args:
            scores: [M, B]; scores of member i depend on inputs of member i alone.
            live: the gradients can be differentiated again.
        """
        leaves = self.leaves
        with refused_twice():
            by_leaf = torch.autograd.grad(
                scores.sum(), leaves, create_graph=live, retain_graph=live, allow_unused=True
            )
        gradients = [gradient for gradient in by_leaf if gradient is not None]
        if len(gradients) < len(leaves):
            raise DataError(
                "the outputs of the network have no gradient with respect to its inputs; "
                "use a method such as 'f-kde'"
            )
        return torch.cat(gradients) if len(gradients) > 1 else gradients[0]


class PassResult(NamedTuple):
    """Result of a forward pass over one batch.

    Attributes:
        inputs: the inputs, [B, ...] or [M, B, ...].
        outputs: [M, B, C].
        gradients: input gradients of each member's scores [M, B, ...], of all rows, some rows or
            points other than the batch; None if not computed.
        at_points: outputs at points other than the batch [M, P, C]; None if not computed.
    """

    inputs: Inputs
    outputs: Tensor
    gradients: Tensor | None = None
    at_points: Tensor | None = None

    def detached(self) -> "PassResult":
        """The same tensors, detached."""
        compared = [None if t is None else t.detach() for t in (self.gradients, self.at_points)]
        return PassResult(self.inputs.detach(), self.outputs.detach(), *compared)

    @classmethod
    def joined(cls, results: Sequence["PassResult"]) -> "PassResult":
        """The results of several member ranges as one."""

        def together(name: str) -> Tensor | None:
            tensors = [getattr(result, name) for result in results]
            return None if tensors[0] is None else torch.cat(tensors)

        outputs = torch.cat([result.outputs for result in results])
        return cls(results[0].inputs, outputs, together("gradients"), together("at_points"))


class BatchRows(NamedTuple):
    """Some rows of a batch.

    Attributes:
        batch: inputs of the members.
        rows: indices of the rows; a slice for the first rows.
    """

    batch: MemberInputs
    rows: Tensor | slice


def forward_with_gradients(
    ensemble: Ensemble,
    batch: tuple[Inputs, Targets],
    likelihood: Likelihood,
    space: Space,
    context: PassContext,
    *,
    live: bool,
    part: BatchRows | None = None,
    points: Inputs | None = None,
    own: bool = False,
) -> PassResult:
    """Outputs of every member, and input gradients of all rows, some rows or other points.

    Args:
        ensemble: the members.
        batch: inputs [B, ...] and targets.
        likelihood: gives the scores.
        space: space of the input gradients.
        context: how the members run.
        live: the gradients can be differentiated again.
        part: rows whose gradients are computed; None for all rows. With `points`, the rows whose
            targets give the scores.
        points: inputs whose gradients are computed instead; they do not enter the batch's
            statistics, nor the running ones.
        own: every member has its own batch [M, B, ...].
    """
    x, y = batch
    name = innermost(space).gradients_of
    if part is None:
        tracked = TrackedInputs.of(ensemble, x, name, own)
        shown, outputs = tracked.x, tracked.run(ensemble, context)
        scored = outputs
    elif points is not None:
        seed, step, shown = context.seed, context.step, part.batch.x
        outputs = ensemble(shown, context.mapping, part.batch.own, seed, step)
        tracked = TrackedInputs.of(ensemble, points, name)
        y = rows_of(parted(y)[0], part.rows, own)
        scored = tracked.run(ensemble.without_side_effects(), context)
        if scored.shape[2:] != outputs.shape[2:]:
            raise DataError(
                f"outputs at the points have shape {tuple(scored.shape[2:])}, at the batch "
                f"{tuple(outputs.shape[2:])}; input gradients need points of the batch's length"
            )
    else:
        tracked = TrackedInputs.of(ensemble, rows_of(x, part.rows, own), name, own)
        shown, y = part.batch.x, rows_of(y, part.rows, own)
        rule = _rule(innermost(space), part)
        outputs, scored = tracked.run_in(part.batch, rule, ensemble, context)
    scores = _scores(innermost(space).target, likelihood, scored, y)
    return PassResult(shown, outputs, tracked.gradients(scores, live))


def _rule(space: InputGradients, part: BatchRows) -> RowRule | None:
    """How the rows run beside their batch; None for their own statistics."""
    if space.own_statistics:
        return None
    return RowRule(space.coupled, leading=isinstance(part.rows, slice))


def random_rows(
    share: float, batch: int, seed: int, step: int | Tensor, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Random rows of a batch (at least two, if there are two), and the other rows."""
    count = min(max(math.ceil(share * batch), 2), batch)
    order = uniform(key(seed, "fraction", step, device), (batch,)).argsort(descending=True)
    return order[:count], order[count:]


def tracked_input(x: Inputs, name: str | None = None) -> tuple[str, Tensor] | None:
    """The real input whose gradients are compared, and its name; None for tokens.

    Args:
        x: inputs [B, ...].
        name: which tensor of a structure; None for the only real one.
    """
    if isinstance(x, Tensor):
        return ("x", x) if x.is_floating_point() else None
    if not isinstance(x, Structured):
        raise DataError(
            f"a {type(x.original()).__name__} has no input gradients to compare; "
            f"use a method such as 'f-kde'"
        )
    real = [key for key, t in x.tensors.items() if t.is_floating_point() and t.ndim > 1]
    if name is not None and name not in real:
        raise DataError(
            f"there is no real input '{name}'; choose from: {', '.join(real) or 'none'}"
        )
    if name is None and len(real) > 1:
        raise DataError(
            f"the network has the real inputs {', '.join(real)}; type "
            f"method={{'name': 'forde', 'gradients_of': '{real[0]}'}}"
        )
    chosen = name or (real[0] if real else None)
    return None if chosen is None else (chosen, x.tensors[chosen])


def _scores(target: str, likelihood: Likelihood, outputs: Tensor, y: Targets) -> Tensor:
    """The scores whose gradients are taken, for every member and data point [M, B].

    Scores of tokens or places are summed over those that count.
    """
    targets: Any = parted(y)[0]
    each: Any = likelihood.log_prob if target == "log-probability" else likelihood.score
    scores = each(outputs, targets)
    weight = target_weights(likelihood, y, scores.shape[1:])
    if weight is not None:
        scores = torch.where(weight != 0, scores, 0.0)
    return scores if scores.ndim == 2 else scores.flatten(2).sum(-1)

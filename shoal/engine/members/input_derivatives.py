"""Derivatives of the members' outputs by one of their inputs, joined to the outputs.

Every member sees its own copy of the input, so one backward pass gives the derivatives of all
members. The derivatives can be differentiated again, by the weights as by the input.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor

from shoal.core.errors import DataError
from shoal.core.opaque import Opaque, by_point
from shoal.core.structure import Inputs, Structured
from shoal.engine.members.member_runner import MemberInputs, MemberRunner, twice_differentiable

__all__ = ["InputDerivatives", "differentiated_input", "joined_outputs"]

Run = Callable[[Sequence[MemberInputs], MemberRunner], list[Tensor]]
"""Outputs [M, B, ..., C] of the members for their inputs."""


@dataclass(frozen=True)
class InputDerivatives:
    """What is differentiated by which input.

    Attributes:
        of: name of the input; None for the only real one.
        columns: from outputs [..., C] to the numbers that are differentiated [..., K].
        sign: factor of the derivatives.
        seen: of the last pass, the number of outputs C before the derivatives, that of columns K,
            and the shape of one row of the input.
    """

    of: str | None
    columns: Callable[[Tensor], Tensor]
    sign: float = 1.0
    seen: list[tuple[int, int, tuple[int, ...]]] = field(default_factory=list, compare=False)


def differentiated_input(x: Inputs, of: str | None = None) -> tuple[str, Tensor]:
    """Name and values of the real input by which outputs are differentiated.

    Args:
        x: inputs [B, ...]; the tensors of a batch object may have any number of rows.
        of: which input; None for the only real one.
    """
    if isinstance(x, Tensor):
        real = {"x": x} if x.is_floating_point() else {}
        of = None if of == "x" else of
    elif isinstance(x, Structured):
        real = {n: t for n, t in x.tensors.items() if t.is_floating_point() and t.ndim > 0}
    else:
        found = None if of is None else getattr(x.original(), of, None)
        real = {of or "": found} if isinstance(found, Tensor) and found.is_floating_point() else {}
    if of is None and len(real) == 1:
        return next(iter(real.items()))
    if of in real:
        return of, real[of]
    names = ", ".join(f"'{name}'" for name in real) or "none"
    what = f"the object {type(x.value).__name__}" if isinstance(x, Opaque) else "the inputs"
    wanted = "one of several real inputs must be named" if of is None else f"no real input '{of}'"
    raise DataError(f"{what} has real inputs: {names}; {wanted}; type derivatives_of='NAME'")


def joined_outputs(
    run: Run, shown: Sequence[MemberInputs], mapping: MemberRunner, members: int,
    wanted: InputDerivatives,
) -> list[Tensor]:  # fmt: skip
    """Outputs and their derivatives side by side [M, B, C + D K]; then outputs of other rows.

    Outputs are differentiated in sum over the batch, and over the sites of a data point. The
    derivatives of a data point by an input [*x] have the order [*x, K]. Data points of a batch
    object may have different numbers of rows: the derivatives then end in zeros.

    Args:
        run: the pass of the networks.
        shown: inputs of a batch, and of some of its rows.
        mapping: the member runner.
        members: number of members M.
        wanted: what is differentiated.
    """
    live, (x, own) = torch.is_grad_enabled(), shown[0]
    twice = twice_differentiable(mapping, x.is_cuda) if live else nullcontext(mapping)
    with torch.enable_grad(), twice as runner:
        seen, leaf = _watched(x, own, members, wanted.of)
        outputs, *others = run([MemberInputs(seen, True), *shown[1:]], runner)
        columns = wanted.columns(outputs)
        numbers = columns.unbind(-1)
        each = [_derivative(n, leaf, live, last=n is numbers[-1]) for n in numbers]
        derivatives = wanted.sign * torch.stack(each, -1)
    if isinstance(x, Opaque):
        derivatives = by_point(x.original(), derivatives, outputs.shape[1], 0.0, axis=1)
    lead, sites = outputs.shape[:-1], outputs.shape[2:-1]
    if derivatives.shape[2 : 2 + len(sites)] != sites:
        raise DataError(
            f"the network gives outputs at sites {tuple(sites)}, which are not the first axes of "
            f"the input {tuple(leaf.shape[2:])}; let the network return their sum"
        )
    rows = tuple(derivatives.shape[3 + len(sites) : -1])
    wanted.seen[:] = [(outputs.shape[-1], columns.shape[-1], rows)]
    outputs = torch.cat([outputs, derivatives.reshape(*lead, -1).to(outputs)], -1)
    return [outputs if live else outputs.detach(), *others]


def _watched(x: Inputs, own: bool, members: int, of: str | None) -> tuple[Inputs, Tensor]:
    """Inputs of every member, and the tensor among them at which gradients are taken."""
    name, tensor = differentiated_input(x, of)
    each = tensor if own else tensor.expand(members, *tensor.shape)
    # inputs that are tracked already, for another gradient, stay connected
    leaf = each if each.requires_grad else each.detach().requires_grad_()
    if isinstance(x, Tensor):
        return leaf, leaf
    if isinstance(x, Opaque):
        return Structured.of_object(x.original(), name, leaf), leaf
    whole = x if own else x.expand(members)
    return whole.replaced(name, leaf), leaf


def _derivative(numbers: Tensor, leaf: Tensor, live: bool, last: bool) -> Tensor:
    """Gradient of numbers [M, B, ...] in sum; those of member m depend on its own inputs alone."""
    (found,) = torch.autograd.grad(
        numbers.sum(), leaf, create_graph=live, retain_graph=live or not last, allow_unused=True
    )
    if found is None:
        raise DataError("the outputs of the network do not depend on the input of the derivatives")
    return found

"""Members of one architecture, with stacked tensors."""

from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from shoal.core.errors import DataError, ShoalError, first_line
from shoal.core.structure import Inputs, Structured
from shoal.core.tree import per_member
from shoal.core.types import Tree
from shoal.engine.members.input_derivatives import InputDerivatives, joined_outputs
from shoal.engine.members.layers import (
    first_called,
    install_dropout,
    install_embeddings,
    install_layers,
)
from shoal.engine.members.member_runner import (
    MemberInputs,
    MemberRunner,
    run_or_loop,
    without_vmap,
)
from shoal.engine.members.network_call import call_network, kind_of, names_of, set_output
from shoal.engine.members.precision import lowered, lowered_inputs
from shoal.engine.members.recurrent import install_recurrent
from shoal.engine.members.sharded_trunk import TrunkShards
from shoal.engine.members.stack import (
    detach_computed,
    evaluation_mode,
    filled,
    forget_computed,
    hollow,
    resting,
    stacked,
    written_buffers,
)

__all__ = ["Group"]

Embedded = tuple[str, torch.Size]
"""Probe of an embedding, and the shape of the embedding's output for a batch."""


@dataclass
class Group:
    """Members of one architecture.

    Attributes:
        prototype: an ordinary module without numbers; `Ensemble.member` returns filled copies.
        skeleton: the module that runs with the members' tensors; it has no numbers either.
        weights: private trained tensors [m, ...].
        buffers: private untrained tensors [m, ...]: running statistics, frozen weights that differ.
        shared: tensors [...] of all members, stored once. Those that require a gradient are
            trained, the others are frozen.
        keys: names of the dropout keys of the skeleton.
        in_evaluation: names of layers that stay in evaluation mode.
        initial: values of one network's buffers before training.
        prefix: prefix of the weights' names, unique among groups.
        compute: type of the networks' arithmetic; None for the type of the weights.
        shards: which rows of shared tensors are here, and not on other replicas; None for all rows.
        derivatives: derivatives by an input that are joined to the outputs; None for outputs alone.
    """

    prototype: nn.Module
    skeleton: nn.Module
    weights: Tree
    buffers: Tree
    shared: Tree
    keys: list[str]
    in_evaluation: frozenset[str] = frozenset()
    initial: Tree = field(default_factory=dict, repr=False)
    prefix: str = ""
    compute: torch.dtype | None = None
    shards: TrunkShards | None = None
    derivatives: InputDerivatives | None = None
    _proven: dict[tuple, MemberRunner] = field(default_factory=dict, repr=False)
    _embedded: dict[Any, Embedded | None] = field(default_factory=dict, repr=False)
    _seen: set[tuple[Any, Any]] = field(default_factory=set, repr=False)
    _whole: list[bool] = field(default_factory=list, repr=False)
    _lowered: dict[str, tuple[Tensor, int, Tensor]] = field(default_factory=dict, repr=False)

    @classmethod
    def of(cls, modules: Sequence[nn.Module], shared: Sequence[str] = ()) -> "Group":
        """Stack the tensors of equal architectures.

        Args:
            modules: one network per member.
            shared: names of tensors that members share, see `shoal.engine.members.stack`.
        """
        tensors = stacked(modules, shared)
        first = modules[0]
        computed = detach_computed(first)
        prototype, skeleton = hollow(first), hollow(first)
        forget_computed(skeleton, computed)
        install_layers(skeleton)
        install_recurrent(skeleton)
        install_embeddings(skeleton)
        names = dict(first.named_buffers())
        initial = {n: t[0].clone() for n, t in tensors.buffers.items() if n in names}
        keys = install_dropout(skeleton)
        return cls(prototype, skeleton, *tensors, keys, resting(first), initial)

    @property
    def members(self) -> int:
        """Number of members."""
        return len(next(iter(self.weights.values())))

    @property
    def trained_shared(self) -> Tree:
        """The shared tensors [...] that all members train together."""
        return {name: tensor for name, tensor in self.shared.items() if tensor.requires_grad}

    @property
    def head(self) -> list[str]:
        """Names of the weights of the last layer."""
        owner = list(self.weights)[-1].rpartition(".")[0]
        return [name for name in self.weights if name.rpartition(".")[0] == owner]

    @property
    def must_loop(self) -> bool:
        """Whether `vmap` failed on this network."""
        tried = self._proven.items()
        return any(case[0].kind == "vmap" and used.kind == "loop" for case, used in tried)

    def run(
        self,
        shown: Sequence[MemberInputs],
        mapping: MemberRunner,
        keys: Tensor | None,
        probe: Tree | None = None,
        alive: Tensor | None = None,
    ) -> list[Tensor]:
        """Outputs [m, B, C] for a batch, and for some of its rows if they are given.

        The first run checks that the member runner works for this network. With `derivatives`, the
        outputs for the batch end in them.

        Args:
            shown: inputs of a batch, and of some of its rows.
            mapping: the member runner.
            keys: dropout keys [m].
            probe: tensors added to the embeddings.
            alive: which members are finite [m]; the others run with weights of zero, so that they
                spoil no tensor that all members train. None runs all members as they are.
        """
        if self.derivatives is None:
            return self._run(shown, mapping, keys, probe, alive)
        members = self if torch.is_grad_enabled() else self._detached()

        def run(shown: Sequence[MemberInputs], mapping: MemberRunner) -> list[Tensor]:
            return members._run(shown, mapping, keys, probe, alive)

        return joined_outputs(run, shown, mapping, self.members, self.derivatives)

    def _detached(self) -> "Group":
        """The same members, whose passes keep nothing for gradients at the weights."""
        trees = ("weights", "buffers", "shared")
        return replace(
            self,
            **{name: {n: t.detach() for n, t in getattr(self, name).items()} for name in trees},
        )

    def _run(
        self,
        shown: Sequence[MemberInputs],
        mapping: MemberRunner,
        keys: Tensor | None,
        probe: Tree | None,
        alive: Tensor | None,
    ) -> list[Tensor]:
        """Outputs of the networks alone; see `run`."""
        shown = [MemberInputs(self.taken(x, own), own) for x, own in shown]
        weights = self.weights
        if alive is not None:
            weights = {n: torch.where(per_member(alive, t), t, 0.0) for n, t in weights.items()}
        state, shared = weights | self.buffers | (probe or {}), self.shared
        if self.compute is not None:
            state = lowered(self.skeleton, state, self.compute, apart=self.head)
            shared = self.shared_as_computed()
            how = self.skeleton, self.compute
            shown = [MemberInputs(_lowered(x, *how, own), own) for x, own in shown]
        if keys is not None:
            state = state | dict.fromkeys(self.keys, keys)
        own = tuple(inputs.own for inputs in shown)
        case = (mapping, self.skeleton.training, own, bool(probe), torch.is_grad_enabled())
        try:
            with self.passing(shared) as common:
                outputs = self._outputs(case, state, shown, common)
        except Exception as error:
            self._explain(error, shown[0])
            raise
        self._seen.add(kind_of(shown[0]))
        if self.compute is None:
            return list(outputs)
        return [each.to(next(iter(self.weights.values()))) for each in outputs]

    def _outputs(
        self, case: tuple, state: Tree, shown: Sequence[MemberInputs], shared: Tree
    ) -> Sequence[Tensor]:
        """Outputs by the member runner that works for this case."""
        if case in self._proven:
            return self._proven[case].outputs(self.skeleton, state, *shown, shared=shared)
        known = without_vmap(shared) if self.must_loop else case[0]
        outputs, used = run_or_loop(known, self.skeleton, state, *shown, shared=shared)
        self._proven[case] = used
        return outputs

    def passing(self, shared: Tree) -> AbstractContextManager[Tree]:
        """A forward pass: the shared tensors as networks take them."""
        return nullcontext(shared) if self.shards is None else self.shards.passing(shared)

    def as_computed(self, x: Inputs) -> Inputs:
        """Inputs [B, ...] in the type of the arithmetic."""
        x = self.taken(x)
        return x if self.compute is None else _lowered(x, self.skeleton, self.compute, False)

    def shared_as_computed(self) -> Tree:
        """The shared tensors in the type of the arithmetic; frozen ones are cast once."""
        tensors, dtype = {}, self.compute
        if dtype is None:
            return self.shared
        for name, tensor in self.shared.items():
            source, version, cast = self._lowered.get(name, (None, 0, tensor))
            if source is not tensor or version != tensor._version or tensor.requires_grad:
                cast = lowered(self.skeleton, {name: tensor}, dtype, own=False)[name]
                if not tensor.requires_grad:
                    self._lowered[name] = tensor, tensor._version, cast
            tensors[name] = cast
        return tensors

    def compute_in(self, dtype: torch.dtype | None) -> None:
        """Set the type of the network's arithmetic; None for the type of the weights."""
        if self.compute != dtype:
            self.compute = dtype
            self._proven.clear()
            self._lowered.clear()

    def train(self, mode: bool) -> None:
        """Set training or evaluation mode; layers in `in_evaluation` stay in evaluation mode."""
        self.skeleton.train(mode)
        for name in self.in_evaluation if mode else ():
            layer = self.skeleton.get_submodule(name)
            layer.training = False

    def to(self, device: torch.device | str | None, dtype: torch.dtype | None) -> None:
        """Move all tensors to a device or a floating point type, in place."""
        self.skeleton.__dict__.pop("_shoal_forward", None)
        for tree in (self.weights, self.buffers, self.shared, self.initial):
            for name, t in tree.items():
                kind = dtype if t.is_floating_point() else None
                tree[name] = t.detach().to(device, kind).requires_grad_(t.requires_grad)
        for layer in self.skeleton.modules():
            for name, t in layer._buffers.items():
                if t is not None and not t.is_meta:
                    layer._buffers[name] = t.to(device, dtype if t.is_floating_point() else None)

    def rearrange(self, shared: Collection[str], own: Collection[str]) -> None:
        """Share some private tensors, with the first member's values, and copy some shared ones."""
        for name in shared:
            tensor = (self.weights if name in self.weights else self.buffers).pop(name)
            self.shared[name] = tensor[0].detach().clone().requires_grad_(tensor.requires_grad)
        for name in own:
            tensor = self.shared.pop(name)
            copies = tensor.detach().expand(self.members, *tensor.shape).clone()
            tree = self.weights if tensor.requires_grad else self.buffers
            tree[name] = copies.requires_grad_(tensor.requires_grad)
        named = [*self.prototype.named_parameters(), *self.prototype.named_buffers()]
        for tree in (self.weights, self.buffers, self.shared):
            kept = {name: tree[name] for name, _ in named if name in tree}
            tree.clear()
            tree.update(kept)

    def keep_written(self, x: Inputs) -> None:
        """Give every member its own copy of shared buffers that a training pass writes to."""
        names = [n for n, _ in self.prototype.named_buffers() if n in self.shared]
        if not names:
            return
        one = {name: t[0].detach().clone() for name, t in (self.weights | self.buffers).items()}

        def call(shared: Tree) -> None:
            call_network(self.skeleton, shared | one, self.taken(x))

        training, generators = self.skeleton.training, [x.device] if x.is_cuda else []
        self.train(True)
        try:
            with torch.random.fork_rng(devices=generators):
                names = written_buffers(self.shared, names, call)
        except Exception:  # the first step reports the error with its reason
            names = []
        finally:
            self.train(training)
        self.rearrange((), names)

    def use_output(self, name: str | int | None) -> None:
        """Choose which of several outputs of the network is used."""
        set_output(self.skeleton, name)
        self._proven.clear()

    def takes_whole(self, x: Tensor) -> bool:
        """Whether the network takes integers [B, ...], for example in an embedding.

        One member tries integers, then real numbers. If both fail, the later run reports the error.
        """
        if not self._whole:
            few = x[:2].to(next(iter(self.weights.values())).device)
            if self._runs(few):
                self._whole.append(True)
            elif self._runs(self._real(few)):
                self._whole.append(False)
        return not self._whole or self._whole[0]

    def _runs(self, x: Tensor) -> bool:
        try:
            with torch.no_grad(), evaluation_mode(self.skeleton):
                call_network(self.skeleton, self.first_member(), x)
            return True
        except Exception:
            return False

    def first_member(self) -> Tree:
        """All tensors of the first member."""
        own = {name: t[0].detach() for name, t in (self.weights | self.buffers).items()}
        shared = self.shared if self.shards is None else self.shards.shown(self.shared)
        return shared | own

    def _real(self, x: Tensor) -> Tensor:
        return x.to(next(iter(self.weights.values())).dtype)

    def taken(self, x: Inputs, own: bool = False) -> Inputs:
        """The inputs; a tensor of integers becomes floats if the network needs floats."""
        if not isinstance(x, Tensor) or x.is_floating_point():
            return x
        if self.takes_whole(x[0] if own else x):
            return x
        return self._real(x)

    def _explain(self, error: BaseException, shown: MemberInputs) -> None:
        """Raise a clear error, if a network that ran before fails because of its inputs."""
        if isinstance(error, ShoalError):
            error = error.__cause__ or error
        if not self._seen or isinstance(error, ShoalError) or "memory" in str(error):
            return
        (shape, dtype), reason = kind_of(shown), first_line(error)
        known = sorted({tuple(seen) for seen, _ in self._seen})
        if tuple(shape) not in known:
            raise DataError(
                f"the network does not take inputs of shape {tuple(shape)}; it took "
                f"{known[0] if len(known) == 1 else known} before: {reason}"
            ) from error
        if (shape, dtype) not in self._seen or isinstance(error, IndexError):
            raise DataError(
                f"the network does not take these inputs of type {names_of(dtype)}: {reason}"
            ) from error
        alone = len(shown.x[0] if shown.own else shown.x) == 1
        if alone and self.skeleton.training and isinstance(error, ValueError):
            raise DataError(
                f"this network cannot train on a batch of one data point ({reason}); "
                f"give the loader drop_last=True or another batch_size"
            ) from error

    def embedded(self, x: Inputs) -> Embedded | None:
        """The first embedding of tokens [B, ...]; None without an embedding."""
        kind, _ = kind_of(MemberInputs(x, False))
        if (len(x), kind) not in self._embedded:
            self._embedded[len(x), kind] = first_called(self.skeleton, self.first_member(), x)
        return self._embedded[len(x), kind]

    def slice_members(self, start: int, stop: int) -> "Group":
        """Some of the members, on the same memory."""
        weights = {n: t.detach()[start:stop].requires_grad_() for n, t in self.weights.items()}
        buffers = {n: t[start:stop] for n, t in self.buffers.items()}
        return replace(self, weights=weights, buffers=buffers)

    def choose(self, members: Tensor, device: torch.device) -> "Group":
        """Copies of the members with these numbers [m], on a device."""
        trees = self.weights, self.buffers
        weights, buffers = (
            {name: t.detach()[members.to(t.device)].to(device) for name, t in tree.items()}
            for tree in trees
        )
        weights = {name: tensor.requires_grad_() for name, tensor in weights.items()}
        return replace(self, weights=weights, buffers=buffers)

    def member(self, index: int) -> nn.Module:
        """An ordinary module with the tensors of one member."""
        own = {name: stacked[index] for name, stacked in (self.weights | self.buffers).items()}
        tensors = {name: t.detach().clone() for name, t in (self.shared | own).items()}
        module = filled(self.prototype, tensors)
        set_output(module, self.skeleton.__dict__.get("_shoal_output"))
        return module.eval()


def _lowered(x: Inputs, module: nn.Module, dtype: torch.dtype, own: bool) -> Inputs:
    if isinstance(x, Structured):
        return x.map(lambda tensor: lowered_inputs(tensor, module, dtype, own))
    return lowered_inputs(x, module, dtype, own) if isinstance(x, Tensor) else x

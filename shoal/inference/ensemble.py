"""The ensemble: M members of one or several architectures, their tensors stacked."""

from collections.abc import Iterable, Sequence
from typing import Self

import numpy as np
import torch
from torch import Tensor, nn

from shoal.core.errors import ConfigError, DataError
from shoal.core.structure import Inputs
from shoal.core.types import Tree
from shoal.core.values import describe_value
from shoal.engine.members.group import Group
from shoal.engine.members.layers import dropout_keys
from shoal.engine.members.member_runner import MemberInputs, MemberRunner
from shoal.engine.members.network_call import required_inputs
from shoal.engine.processes.launch import own_members
from shoal.engine.resources.offload import Offload
from shoal.engine.resources.plan import default_runner
from shoal.inference.adopted import adopted_groups
from shoal.inference.initialise import Build, build_members, drawn, spread
from shoal.inference.offloaded import copied_to_device, parts_on_device, store_buffers
from shoal.inference.stored_tensors import StoredTensors
from shoal.inference.unrolled import UnrolledEnsemble

__all__ = ["Ensemble", "Group"]


class Ensemble(StoredTensors):
    """M networks that train and predict together, with the interface of one torch module.

    >>> ensemble = Ensemble.init(lambda: nn.Linear(3, 2), members=4, seed=0)
    >>> ensemble(torch.zeros(5, 3)).shape
    torch.Size([4, 5, 2])
    >>> ensemble
    Ensemble(4 x Linear, 8 in each member, float32 on cpu)
    >>> optimizer = torch.optim.Adam(ensemble.parameters())

    Attributes:
        groups: one group per architecture.
        builds: the factory of each group; None if unknown.
        alive: which members are finite [M]; diverged members are left out everywhere.
        seed: seed of the members' initial weights; None if unknown.
        offload: where members live that visit the device in blocks; None for members on the device.
        made: the members that exist on this process until `fit` fills in the others; None for all.
    """

    offload: Offload | None = None
    made: slice | None = None

    def __init__(self, groups: Sequence[Group], builds: Sequence[Build | None] = ()) -> None:
        self.groups = list(groups)
        self.builds = list(builds) or [None] * len(self.groups)
        self.alive = torch.ones(sum(group.members for group in groups), dtype=torch.bool)
        self.first = 0
        self.seed: int | None = None
        if len(self.groups) > 1:
            for index, group in enumerate(self.groups):
                group.prefix = f"group{index}."
        self.train(False)

    @classmethod
    def init(
        cls,
        build: Build | Sequence[tuple[Build, int]],
        members: int | None = None,
        seed: int = 0,
        shared: Sequence[str] = (),
        divided: bool | str = False,
    ) -> "Ensemble":
        """An ensemble of new members, each drawn from its own seed.

        Frozen tensors that are equal in all networks are stored once.

        Args:
            build: makes one network; or a list of (build, count) for mixed architectures.
            members: ensemble size; leave it out for a list.
            seed: fixes the members; member i does not depend on the ensemble size.
            shared: names of more tensors to store once, such as `("trunk.*",)`; members train them
                together. They begin with the first member's values.
            divided: with several processes, draw only the members that this process will train;
                `fit` fills in the others. A text is the `mesh` of `fit`, such as "2x2".
        """
        if isinstance(shared, str):
            raise ConfigError(f"shared must be a list of names; type shared=({shared!r},)")
        pairs = [(build, members)] if callable(build) else list(build)
        if not callable(build) and members is not None:
            raise ConfigError(
                "a list of (build, count) pairs already has the counts; leave members out"
            )
        counts = [_count(count) for _, count in pairs]
        if not pairs:
            raise ConfigError("an ensemble needs at least one member, not an empty list")
        layout = divided if isinstance(divided, str) else None
        own = own_members(sum(counts), layout) if divided else None
        groups, first = [], 0
        for (make, _), count in zip(pairs, counts, strict=True):
            here = drawn(range(first, first + count), own)
            group = Group.of(build_members(make, here, seed), shared)
            whole = own is None
            groups.append(group if whole else spread(group, [i - first for i in here], count))
            first += count
        ensemble = cls(groups, [make for make, _ in pairs])
        ensemble.seed, ensemble.made = seed, own
        return ensemble

    @classmethod
    def of(cls, networks: Iterable[nn.Module]) -> "Ensemble":
        """An ensemble of trained networks, in the given order; the networks stay untouched.

        The members are copies, with their running statistics. Parameters of a network that is
        frozen as a whole count as trained. Members of one architecture stay together: if networks
        of several architectures alternate, a warning gives the new order.

        >>> Ensemble.of([nn.Linear(3, 2), nn.Linear(3, 2)])
        Ensemble(2 x Linear, 8 in each member, float32 on cpu)
        """
        groups, finite = adopted_groups(networks)
        ensemble = cls(groups)
        ensemble.alive = finite
        return ensemble

    @property
    def members(self) -> int:
        """M."""
        return len(self.alive)

    @property
    def weights(self) -> Tree:
        """Private trained tensors [M, ...] by name; each of several groups has a prefix."""
        return self._collect("weights")

    @property
    def buffers(self) -> Tree:
        """Tensors [M, ...] that members store but do not train."""
        return self._collect("buffers")

    @property
    def shared(self) -> Tree:
        """Tensors [...] that are the same for all members, stored once."""
        return self._collect("shared")

    @property
    def trained_shared(self) -> Tree:
        """The shared tensors that all members train together."""
        return self._collect("trained_shared")

    @property
    def spans(self) -> list[slice]:
        """Which members each tensor of `weights` belongs to."""
        spans, first = [], 0
        for group in self.groups:
            spans += [slice(first, first + group.members)] * len(group.weights)
            first += group.members
        return spans

    @property
    def heads(self) -> dict[str, slice]:
        """Names of the weights of each architecture's last layer, with their members."""
        spans = dict(zip(self.weights, self.spans, strict=True))
        names = [f"{group.prefix}{name}" for group in self.groups for name in group.head]
        return {name: spans[name] for name in names}

    def takes_whole(self, x: Tensor) -> bool:
        """Whether the networks take integers [B, ...]; otherwise integers become floats."""
        return any(group.takes_whole(x) for group in self.groups)

    def takes_inputs(self, count: int) -> bool:
        """Whether the networks need this number of inputs, so that a tuple is not a pair (x, y)."""
        return count > 1 and all(required_inputs(g.prototype) == count for g in self.groups)

    def use_output(self, name: str | int | None) -> None:
        """Choose which of several outputs of the networks is used; None for the default."""
        for group in self.groups:
            group.use_output(name)

    def train(self, mode: bool = True) -> Self:
        """Set training mode (batch statistics and dropout on) or evaluation mode."""
        self.training = mode
        for group in self.groups:
            group.train(mode)
        return self

    def __call__(
        self,
        x: Inputs,
        mapping: MemberRunner | None = None,
        own_inputs: bool = False,
        seed: int = 0,
        step: int | Tensor = 0,
        probes: Sequence[Tree] | None = None,
    ) -> Tensor:
        """Outputs of every member [M, B, C]; with tokens or places [M, B, ..., C].

        Args:
            x: inputs [B, ...] for all members, or [M, B, ...] with `own_inputs`: a tensor, or
                `Structured` inputs.
            mapping: the member runner; None for the default of the networks on their device.
            own_inputs: every member has its own inputs.
            seed: seed of the dropout masks in training.
            step: training step, keys the dropout masks.
            probes: tensors added to the embeddings, one per architecture.
        """
        runner = mapping or default_runner(self.groups, self.device)
        return self._run([MemberInputs(x, own_inputs)], runner, seed, step, probes)[0]

    def forward_with_rows(
        self,
        batch: MemberInputs,
        part: Tensor,
        mapping: MemberRunner,
        seed: int = 0,
        step: int | Tensor = 0,
    ) -> list[Tensor]:
        """Outputs for a batch, and for some of its rows [M, P, ...] with the batch's statistics.

        The other arguments are those of a call.
        """
        return self._run([batch, MemberInputs(part, True)], mapping, seed, step, None)

    def _run(
        self,
        shown: list[MemberInputs],
        mapping: MemberRunner,
        seed: int,
        step: int | Tensor,
        probes: Sequence[Tree] | None,
    ) -> list[Tensor]:
        if self.offload is not None and torch.is_grad_enabled():
            return copied_to_device(self)._run(shown, mapping, seed, step, probes)
        if self.offload is not None:
            return self._run_in_blocks(shown, mapping, seed, step)
        keys, several = self._dropout_keys(seed, step), len(self.groups) > 1
        outputs, first = [], 0
        for index, group in enumerate(self.groups):
            mine = slice(first, first + group.members)
            inputs = [MemberInputs(x[mine] if own and several else x, own) for x, own in shown]
            own_keys = None if keys is None else keys[mine]
            probe = None if probes is None else probes[index]
            trains_shared = torch.is_grad_enabled() and group.trained_shared
            alive = self.alive[mine] if trains_shared else None
            outputs.append(group.run(inputs, mapping, own_keys, probe, alive))
            first += group.members
        if any(out[0].shape[1:] != outputs[0][0].shape[1:] for out in outputs):
            shapes = [tuple(out[0].shape[1:]) for out in outputs]
            raise DataError(f"all architectures must give the same outputs [B, C], not {shapes}")
        return [torch.cat(each) for each in zip(*outputs, strict=True)] if several else outputs[0]

    def _run_in_blocks(
        self, shown: list[MemberInputs], mapping: MemberRunner, seed: int, step: int | Tensor
    ) -> list[Tensor]:
        outputs = []
        for part in parts_on_device(self):
            first = part.first - self.first
            mine = slice(first, first + part.members)
            inputs = [MemberInputs(x[mine] if own else x, own) for x, own in shown]
            outputs.append(part._run(inputs, mapping, seed, step, None))
            if self.training:
                store_buffers(self, part)
        return [torch.cat(each) for each in zip(*outputs, strict=True)]

    def _dropout_keys(self, seed: int, step: int | Tensor) -> Tensor | None:
        if not any(group.keys for group in self.groups):
            return None
        own = torch.arange(self.first, self.first + self.members, device=self.device)
        return dropout_keys(seed, step, own)

    def member(self, index: int) -> nn.Module:
        """Member `index` as an ordinary module, a copy in evaluation mode."""
        if not 0 <= index < self.members:
            raise IndexError(f"members are numbered 0 to {self.members - 1}, not {index}")
        for group in self.groups:
            if index < group.members:
                return group.member(index)
            index -= group.members
        raise AssertionError

    def as_module(self, merge: bool = False) -> UnrolledEnsemble:
        """All members as one ordinary module, a copy that `torch.export` takes.

        Its call takes the arguments of one network and returns outputs [M, B, C].

        >>> module = Ensemble.init(lambda: nn.Linear(3, 2), members=4).as_module()
        >>> module(torch.zeros(5, 3)).shape, type(module.members[0]).__name__
        (torch.Size([4, 5, 2]), 'Linear')

        Args:
            merge: multiply adapters into the weights of their layers; each member then has a
                network of its own.
        """
        return UnrolledEnsemble(self.groups, merge=merge)

    def slice_members(self, start: int, stop: int) -> "Ensemble":
        """Members `start` to `stop` as an ensemble of its own, on the same memory."""
        groups, builds, first = [], [], 0
        for group, build in zip(self.groups, self.builds, strict=True):
            low, high = max(start - first, 0), min(stop - first, group.members)
            if low < high:
                groups.append(group.slice_members(low, high))
                builds.append(build)
            first += group.members
        part = Ensemble.__new__(Ensemble)
        part.groups, part.builds, part.training = groups, builds, self.training
        part.alive, part.first = self.alive[start:stop], self.first + start
        part.seed, part.offload = self.seed, self.offload
        return part

    def without_side_effects(self) -> "Ensemble":
        """The same members with copied running statistics, so a pass changes nothing."""
        aside = self.slice_members(0, self.members)
        for group, own in zip(aside.groups, self.groups, strict=True):
            group.weights = own.weights  # the leaves that collect gradients
            group.buffers = {name: tensor.clone() for name, tensor in group.buffers.items()}
        return aside

    @property
    def compute(self) -> torch.dtype | None:
        """Type of the networks' arithmetic; None for the type of the weights."""
        return self.groups[0].compute

    def compute_in(self, dtype: torch.dtype | None) -> "Ensemble":
        """Set the type of the networks' arithmetic; None for the type of the weights."""
        for group in self.groups:
            group.compute_in(dtype)
        return self

    def keep_written(self, x: Inputs) -> None:
        """Give members their own copies of shared buffers that a training pass writes to."""
        for group in self.groups:
            group.keep_written(x)

    def _collect(self, kind: str) -> Tree:
        return {
            f"{group.prefix}{name}": tensor
            for group in self.groups
            for name, tensor in getattr(group, kind).items()
        }


def _count(count: object) -> int:
    whole = isinstance(count, (int, np.integer)) and not isinstance(count, bool)
    found = int(count) if whole else 0  # pyright: ignore[reportArgumentType]
    if found < 1:
        raise ConfigError(f"an ensemble needs at least one member, not {describe_value(count)}")
    if found >= 2**63:
        raise ConfigError(
            f"an ensemble of {describe_value(count)} members does not fit into any memory"
        )
    return found

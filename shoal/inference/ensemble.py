"""The ensemble: M members of one or several architectures, their tensors stacked."""

import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Self, TypeGuard

import numpy as np
import torch
from torch import Tensor, nn

from shoal.core.errors import ConfigError, DataError, ShoalWarning
from shoal.core.files import read_tensors, write_tensors
from shoal.core.structure import Inputs
from shoal.core.types import Tree
from shoal.core.values import came
from shoal.engine.group import Group
from shoal.engine.layers import dropout_keys
from shoal.engine.member_runner import MemberInputs, MemberRunner
from shoal.engine.network_call import required_inputs
from shoal.inference.adopted import adopted_groups, as_saved
from shoal.inference.initialise import Build, build_members
from shoal.inference.module_like import ModuleLike

__all__ = ["Ensemble", "Group"]


class Ensemble(ModuleLike):
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
    """

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
        cls, build: Build | Sequence[tuple[Build, int]], members: int | None = None, seed: int = 0
    ) -> "Ensemble":
        """An ensemble of new members, each drawn from its own seed.

        Args:
            build: makes one network; or a list of (build, count) for mixed architectures.
            members: ensemble size; leave it out for a list.
            seed: fixes the members; member i does not depend on the ensemble size.
        """
        pairs = [(build, members)] if callable(build) else list(build)
        if not callable(build) and members is not None:
            raise ConfigError(
                "a list of (build, count) pairs already has the counts; leave members out"
            )
        groups, first = [], 0
        for make, count in pairs:
            if not _is_count(count):
                raise ConfigError(f"an ensemble needs at least one member, not {came(count)}")
            groups.append(Group.of(build_members(make, range(first, first + count), seed)))
            first += count
        if not groups:
            raise ConfigError("an ensemble needs at least one member, not an empty list")
        ensemble = cls(groups, [make for make, _ in pairs])
        ensemble.seed = seed
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
        """Trainable tensors [M, ...] by parameter name; each of several groups has a prefix."""
        return self._collect("weights")

    @property
    def buffers(self) -> Tree:
        """Tensors that members store but do not train."""
        return self._collect("buffers")

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

    @property
    def state(self) -> Tree:
        """All tensors to save."""
        weights = {f"weights/{name}": tensor for name, tensor in self.weights.items()}
        buffers = {f"buffers/{name}": tensor for name, tensor in self.buffers.items()}
        return {"alive": self.alive, **weights, **buffers}

    @property
    def device(self) -> torch.device:
        """Device of the members."""
        return self.alive.device

    @property
    def dtype(self) -> torch.dtype:
        """Type of the weights."""
        return next(iter(self.weights.values())).dtype

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
            group.skeleton.train(mode)
        return self

    def __call__(
        self,
        x: Inputs,
        mapping: MemberRunner = MemberRunner(),  # noqa: B008
        own_inputs: bool = False,
        seed: int = 0,
        step: int | Tensor = 0,
        probes: Sequence[Tree] | None = None,
    ) -> Tensor:
        """Outputs of every member [M, B, C]; with tokens or places [M, B, ..., C].

        Args:
            x: inputs [B, ...] for all members, or [M, B, ...] with `own_inputs`: a tensor, or
                `Structured` inputs.
            mapping: the member runner.
            own_inputs: every member has its own inputs.
            seed: seed of the dropout masks in training.
            step: training step, keys the dropout masks.
            probes: tensors added to the embeddings, one per architecture.
        """
        return self._run([MemberInputs(x, own_inputs)], mapping, seed, step, probes)[0]

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
        keys, several = self._dropout_keys(seed, step), len(self.groups) > 1
        outputs, first = [], 0
        for index, group in enumerate(self.groups):
            mine = slice(first, first + group.members)
            inputs = [MemberInputs(x[mine] if own and several else x, own) for x, own in shown]
            own_keys = None if keys is None else keys[mine]
            probe = None if probes is None else probes[index]
            outputs.append(group.run(inputs, mapping, own_keys, probe))
            first += group.members
        if any(out[0].shape[1:] != outputs[0][0].shape[1:] for out in outputs):
            shapes = [tuple(out[0].shape[1:]) for out in outputs]
            raise DataError(f"all architectures must give the same outputs [B, C], not {shapes}")
        return [torch.cat(each) for each in zip(*outputs, strict=True)] if several else outputs[0]

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
        part.seed = self.seed
        return part

    def aside(self) -> "Ensemble":
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
            if group.compute != dtype:
                group.compute = dtype
                group._proven.clear()
        return self

    def load_state(self, state: Tree) -> "Ensemble":
        """Copy the tensors of `state` into the ensemble, in place."""
        mine = self.state
        if mine.keys() != state.keys():
            names = sorted(mine.keys() ^ state.keys())
            raise ConfigError(f"the saved ensemble has another architecture; {names[0]} differs")
        with torch.no_grad():
            for name, tensor in mine.items():
                if tensor.shape != state[name].shape:
                    raise ConfigError(
                        f"the saved ensemble has {name} of shape {tuple(state[name].shape)}, "
                        f"this one {tuple(tensor.shape)}"
                    )
                tensor.copy_(state[name])
        return self

    def save(self, path: str | Path) -> None:
        """Write all tensors to one safetensors file."""
        write_tensors(Path(path), {name: t.detach() for name, t in self.state.items()})

    @classmethod
    def load(cls, path: str | Path, build: Build | Sequence[tuple[Build, int]]) -> "Ensemble":
        """Read what `save` wrote; `build` makes the networks that the tensors belong to."""
        return cls.from_state(read_tensors(Path(path)), build)

    @classmethod
    def from_state(cls, state: Tree, build: Build | Sequence[tuple[Build, int]]) -> "Ensemble":
        """An ensemble of the networks that `build` makes, with the tensors of `state`."""
        members = len(state["alive"]) if callable(build) and "alive" in state else None
        with warnings.catch_warnings():
            # The factory's initial weights do not matter: all are replaced.
            warnings.simplefilter("ignore", ShoalWarning)
            ensemble = cls.init(as_saved(build, state), members)
        ensemble.builds = [build] if callable(build) else [make for make, _ in build]
        kinds = {t.dtype for name, t in state.items() if name.startswith("weights/")}
        if strange := [kind for kind in kinds if not kind.is_floating_point]:
            raise ConfigError(
                f"the saved weights have type {strange[0]}, not a real floating point type"
            )
        if len(kinds) == 1:
            ensemble.to(dtype=kinds.pop())
        return ensemble.load_state(state)

    def _collect(self, kind: str) -> Tree:
        return {
            f"{group.prefix}{name}": tensor
            for group in self.groups
            for name, tensor in getattr(group, kind).items()
        }


def _is_count(count: object) -> TypeGuard[int]:
    return isinstance(count, (int, np.integer)) and not isinstance(count, bool) and bool(count >= 1)

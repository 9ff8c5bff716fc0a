"""The ensemble: M members of one or several architectures, their tensors stacked."""

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TypeGuard

import numpy as np
import torch
from torch import Tensor, nn

from shoal.core.errors import ConfigError, DataError, ShoalWarning
from shoal.core.files import read_tensors, write_tensors
from shoal.core.types import Tree
from shoal.core.values import came
from shoal.inference import dropout
from shoal.inference.group import Group
from shoal.inference.initialise import Build, build_members
from shoal.inference.mapping import Mapping, Shown

__all__ = ["Ensemble", "Group"]


class Ensemble:
    """M networks that train and predict together.

    >>> ensemble = Ensemble.init(lambda: nn.Linear(3, 2), members=4, seed=0)
    >>> ensemble(torch.zeros(5, 3)).shape
    torch.Size([4, 5, 2])

    Attributes:
        groups: one for each architecture.
        builds: what made each of them, as far as it is known.
        alive: which members have stayed finite [M]; the others are left out of everything.
        seed: what the members were drawn from, when it is known.
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
        """Members drawn from seeds of their own.

        Args:
            build: makes one network, or a list of (build, count) for mixed architectures.
            members: how many; not given for a list.
            seed: the same seed makes the same members, whatever their number.
        """
        pairs = [(build, members)] if callable(build) else list(build)
        if not callable(build) and members is not None:
            raise ConfigError("with a list of (build, count) pairs the counts say how many members")
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

    @property
    def members(self) -> int:
        """M."""
        return len(self.alive)

    @property
    def weights(self) -> Tree:
        """Trainable tensors [M, ...] by parameter name; several groups are told apart by prefix."""
        return self._collect("weights")

    @property
    def buffers(self) -> Tree:
        """Tensors that are carried but not trained."""
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
        """Names of the weights of each architecture's last layer, and whose they are."""
        spans = dict(zip(self.weights, self.spans, strict=True))
        names = [f"{group.prefix}{name}" for group in self.groups for name in group.head]
        return {name: spans[name] for name in names}

    @property
    def state(self) -> Tree:
        """All that has to be saved."""
        weights = {f"weights/{name}": tensor for name, tensor in self.weights.items()}
        buffers = {f"buffers/{name}": tensor for name, tensor in self.buffers.items()}
        return {"alive": self.alive, **weights, **buffers}

    @property
    def device(self) -> torch.device:
        """Where the members live."""
        return self.alive.device

    @property
    def dtype(self) -> torch.dtype:
        """Type of the weights."""
        return next(iter(self.weights.values())).dtype

    def takes_whole(self, x: Tensor) -> bool:
        """Whether whole numbers [B, ...] are inputs as they are; else they mean real ones."""
        return any(group.takes_whole(x) for group in self.groups)

    def train(self, mode: bool = True) -> "Ensemble":
        """Batch statistics and dropout on or off."""
        self.training = mode
        for group in self.groups:
            group.skeleton.train(mode)
        return self

    def __call__(
        self,
        x: Tensor,
        mapping: Mapping = Mapping(),  # noqa: B008
        own_inputs: bool = False,
        seed: int = 0,
        step: int | Tensor = 0,
        probes: Sequence[Tree] | None = None,
    ) -> Tensor:
        """Outputs of every member [M, B, C].

        Args:
            x: inputs [B, ...] for all, or [M, B, ...] with `own_inputs`.
            mapping: how the members run.
            own_inputs: every member has inputs of its own.
            seed: of the dropout masks in training.
            step: of the dropout masks in training.
            probes: for each architecture, what is added to its embeddings.
        """
        return self._run([Shown(x, own_inputs)], mapping, seed, step, probes)[0]

    def with_part(
        self, batch: Shown, part: Tensor, mapping: Mapping, seed: int = 0, step: int | Tensor = 0
    ) -> list[Tensor]:
        """Outputs for a batch and, normalised as the batch is, for a part of it [M, P, ...].

        The other arguments are those of a call.
        """
        return self._run([batch, Shown(part, True)], mapping, seed, step, None)

    def _run(
        self,
        shown: list[Shown],
        mapping: Mapping,
        seed: int,
        step: int | Tensor,
        probes: Sequence[Tree] | None,
    ) -> list[Tensor]:
        keys, several = self._dropout_keys(seed, step), len(self.groups) > 1
        outputs, first = [], 0
        for index, group in enumerate(self.groups):
            mine = slice(first, first + group.members)
            inputs = [Shown(x[mine] if own and several else x, own) for x, own in shown]
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
        return dropout.keys(seed, step, own)

    def member(self, index: int) -> nn.Module:
        """Member `index` as an ordinary module, a copy in evaluation mode."""
        if not 0 <= index < self.members:
            raise IndexError(f"there are members 0 to {self.members - 1}, but no {index}")
        for group in self.groups:
            if index < group.members:
                return group.member(index)
            index -= group.members
        raise AssertionError

    def part(self, start: int, stop: int) -> "Ensemble":
        """Members `start` to `stop` as an ensemble of its own, on the same memory."""
        groups, builds, first = [], [], 0
        for group, build in zip(self.groups, self.builds, strict=True):
            low, high = max(start - first, 0), min(stop - first, group.members)
            if low < high:
                groups.append(group.part(low, high))
                builds.append(build)
            first += group.members
        part = Ensemble.__new__(Ensemble)
        part.groups, part.builds, part.training = groups, builds, self.training
        part.alive, part.first = self.alive[start:stop], self.first + start
        part.seed = self.seed
        return part

    def aside(self) -> "Ensemble":
        """The same members with running statistics of their own, so that a look leaves no trace."""
        aside = self.part(0, self.members)
        for group, own in zip(aside.groups, self.groups, strict=True):
            group.weights = own.weights  # the leaves that gradients come back to
            group.buffers = {name: tensor.clone() for name, tensor in group.buffers.items()}
        return aside

    def to(
        self, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> "Ensemble":
        """Move the members to a device or a floating point type, in place."""
        for group in self.groups:
            for tree in (group.weights, group.buffers):
                for name, t in tree.items():
                    kind = dtype if t.is_floating_point() else None
                    tree[name] = t.detach().to(device, kind).requires_grad_(t.requires_grad)
            group.skeleton.to(device, dtype)
            group.prototype.to(device, dtype)
        self.alive = self.alive.to(device)
        return self

    @property
    def compute(self) -> torch.dtype | None:
        """Type the networks calculate in, when it is not that of the weights."""
        return self.groups[0].compute

    def compute_in(self, dtype: torch.dtype | None) -> "Ensemble":
        """Calculate the networks in another type than that of the weights; None undoes it."""
        for group in self.groups:
            if group.compute != dtype:
                group.compute = dtype
                group._proven.clear()
        return self

    def load_state(self, state: Tree) -> "Ensemble":
        """Take over the tensors of `state`, in place."""
        mine = self.state
        if mine.keys() != state.keys():
            names = sorted(mine.keys() ^ state.keys())
            raise ConfigError(f"the saved ensemble is of another architecture; {names[0]} differs")
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
            # How the factory draws does not matter: everything it drew is replaced.
            warnings.simplefilter("ignore", ShoalWarning)
            ensemble = cls.init(build, members)
        kinds = {t.dtype for name, t in state.items() if name.startswith("weights/")}
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
    whole = isinstance(count, int | np.integer) and not isinstance(count, bool)
    return whole and bool(count >= 1)  # pyright: ignore[reportOperatorIssue]

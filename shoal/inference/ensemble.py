"""The ensemble: M members of one or several architectures, their tensors stacked.

An ensemble has the interface of `nn.Module`. A parameter is one tensor [M, ...] for all members,
named like the parameter of one network. A torch optimiser and the user's own loop work as with a
module.

An ensemble saves and loads all its tensors by kind and name: `weights/NAME` and `buffers/NAME` for
private tensors [M, ...], `shared/NAME` for tensors [...] that all members share, and `alive`, which
marks the finite members.

Members of an offloaded ensemble live on the host and visit the device in blocks. Their weights and
buffers are tensors of the host, or of files. Everything else is on the device: `alive`, tensors
that all members share, and what the networks hold themselves.
"""

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, Self, overload

import numpy as np
import torch
from torch import Tensor, nn

from shoal.core.arguments import flag, list_of, text, whole, whole_64_bits, whole_or_zero
from shoal.core.devices import usable_device
from shoal.core.display.notebook import facts_html
from shoal.core.errors import ConfigError, DataError, OutOfRange, ShoalWarning
from shoal.core.storage.disk import checked_path
from shoal.core.storage.files import read_tensors, write_tensors
from shoal.core.structure import Inputs
from shoal.core.tree import spaced
from shoal.core.types import Tree
from shoal.core.values import describe_value
from shoal.engine.members.forward_pass import forward_outputs
from shoal.engine.members.group import Group
from shoal.engine.members.input_derivatives import InputDerivatives
from shoal.engine.members.layers import dropout_keys
from shoal.engine.members.member_runner import MemberInputs, MemberRunner
from shoal.engine.members.network_call import required_inputs
from shoal.engine.processes.groups import own_members
from shoal.engine.resources.offload import Offload
from shoal.engine.resources.plan import default_runner
from shoal.inference.members import Build, adopted_groups, as_saved, build_members, drawn, spread
from shoal.inference.unrolled import UnrolledEnsemble

__all__ = [
    "Ensemble",
    "Group",
    "IncompatibleKeys",
    "copied_to_device",
    "host_blocks",
    "load_to_device",
    "move_to_host",
    "part_of",
    "parts_on_device",
    "store_buffers",
    "tensors_of",
]

FINITE = "ensemble.alive"
"""Name of the tensor in a state dict that marks the finite members."""


MANY = 128
"""Most members in one pass without gradients, unless a runner is named: memory of one pass."""


class IncompatibleKeys(NamedTuple):
    """Names that `load_state_dict` did not find, and names that it did not use."""

    missing_keys: list[str]
    unexpected_keys: list[str]


class Ensemble:
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

    builds: list[Build | None]
    offload: Offload | None = None
    made: slice | None = None

    def __init__(self, groups: Sequence[Group], builds: Sequence[Build | None] = ()) -> None:
        self.groups = list(groups)
        self.builds = list(builds) or [None] * len(self.groups)
        where = next(iter(self.groups[0].weights.values())).device if self.groups else None
        members = sum(group.members for group in groups)
        self.alive = torch.ones(members, dtype=torch.bool, device=where)
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
    ) -> Self:
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
        shared, seed = list_of(text)("shared", shared), whole_64_bits("seed", seed)
        pairs = [(build, members)] if callable(build) else _pairs(build)
        if not callable(build) and members is not None:
            raise ConfigError(
                "a list of (build, count) pairs already has the counts; leave members out"
            )
        counts = [_count(count) for _, count in pairs]
        layout = divided if isinstance(divided, str) else None
        divided = divided if layout is not None else flag("divided", divided)
        made = own_members(sum(counts), layout) if divided else None
        groups, first = [], 0
        for (make, _), count in zip(pairs, counts, strict=True):
            indices = drawn(range(first, first + count), made)
            group = Group.of(build_members(make, indices, seed), shared)
            if made is not None:
                group = spread(group, [i - first for i in indices], count)
            groups.append(group)
            first += count
        ensemble = cls(groups, [make for make, _ in pairs])
        ensemble.seed, ensemble.made = seed, made
        return ensemble

    @classmethod
    def of(cls, networks: Iterable[nn.Module]) -> Self:
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
    def device(self) -> torch.device:
        """Device of the members."""
        return self.alive.device

    @property
    def dtype(self) -> torch.dtype:
        """Type of the weights."""
        return next(iter(self.weights.values())).dtype

    @property
    def spans(self) -> list[slice]:
        """Which members each tensor of `weights` belongs to."""
        spans, first = [], 0
        for group in self.groups:
            spans += [slice(first, first + group.members)] * len(group.weights)
            first += group.members
        return spans

    @property
    def member_spans(self) -> dict[str, slice]:
        """Which members each tensor of `changing_state` with a row per member belongs to."""
        spans, first = {"alive": slice(0, self.members)}, 0
        for group in self.groups:
            mine = slice(first, first + group.members)
            spans |= {f"weights/{group.prefix}{name}": mine for name in group.weights}
            spans |= {f"buffers/{group.prefix}{name}": mine for name in group.buffers}
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

    @property
    def derivatives(self) -> InputDerivatives | None:
        """Derivatives by an input that outputs end in; None for outputs alone."""
        return self.groups[0].derivatives

    @derivatives.setter
    def derivatives(self, wanted: InputDerivatives | None) -> None:
        for group in self.groups:
            group.derivatives = wanted

    def train(self, mode: bool = True) -> Self:
        """Set training mode (batch statistics and dropout on) or evaluation mode."""
        self.training = flag("mode", mode)
        for group in self.groups:
            group.train(mode)
        return self

    @property
    def rests(self) -> bool:
        """Whether all layers are in evaluation mode, also where ensembles share a skeleton."""
        return not (self.training or any(_trains(group.skeleton) for group in self.groups))

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
        if mapping is None and not own_inputs and probes is None:
            outputs = self._forward_alone(x)
            if outputs is not None:
                return outputs
        runner = mapping or default_runner(self.groups, self.device)
        if mapping is None and self.members > MANY and not torch.is_grad_enabled():
            runner = replace(runner, chunk=MANY)
        return self._run([MemberInputs(x, own_inputs)], runner, seed, step, probes)[0]

    def _forward_alone(self, x: Inputs) -> Tensor | None:
        """Outputs on a CPU without gradients; None where the usual pass is better."""
        plain = self.device.type == "cpu" and self.offload is None and self.rests
        if not plain or torch.is_grad_enabled():
            return None
        outputs: list[Tensor] = []
        for group in self.groups:
            found = forward_outputs(group, x)
            if found is None or (outputs and found.shape[1:] != outputs[0].shape[1:]):
                return None
            outputs.append(found)
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

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
            inputs = [_inputs_of(each, mine) if several else each for each in shown]
            member_keys = None if keys is None else keys[mine]
            probe = None if probes is None else probes[index]
            trains_shared = torch.is_grad_enabled() and group.trained_shared
            alive = self.alive[mine] if trains_shared else None
            outputs.append(group.run(inputs, mapping, member_keys, probe, alive))
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
            inputs = [_inputs_of(each, mine) for each in shown]
            outputs.append(part._run(inputs, mapping, seed, step, None))
            if self.training:
                store_buffers(self, part)
        return [torch.cat(each) for each in zip(*outputs, strict=True)]

    def _dropout_keys(self, seed: int, step: int | Tensor) -> Tensor | None:
        if not any(group.keys for group in self.groups):
            return None
        indices = torch.arange(self.first, self.first + self.members, device=self.device)
        return dropout_keys(seed, step, indices)

    def member(self, index: int) -> nn.Module:
        """Member `index` as an ordinary module, a copy in evaluation mode."""
        index = whole_64_bits("the number of a member", index)
        if not 0 <= index < self.members:
            raise OutOfRange(f"members are numbered 0 to {self.members - 1}, not {index}")
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
        start, stop = whole_or_zero("start", start), whole_or_zero("stop", stop)
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

    def spaced(self, most: int) -> "Ensemble":
        """At most so many members, evenly spaced; a copy, or the ensemble itself if it has fewer.

        >>> Ensemble.init(lambda: nn.Linear(3, 2), members=9).spaced(3).members
        3
        """
        if self.members <= whole("most", most):
            return self
        chosen = torch.tensor(spaced(self.members, most))
        groups, builds, first = [], [], 0
        for group, build in zip(self.groups, self.builds, strict=True):
            inside = (chosen >= first) & (chosen < first + group.members)
            if inside.any():
                groups.append(group.choose(chosen[inside] - first, self.device))
                builds.append(build)
            first += group.members
        part = self.slice_members(0, most)
        part.groups, part.builds, part.offload = groups, builds, None
        part.alive, part.first = self.alive[chosen.to(self.device)], 0
        return part

    def repeated(self, count: int, weights: Tree) -> "Ensemble":
        """An ensemble of count M members with these weights [count M, ...].

        Member k M + i of each architecture has the running statistics of its member i, and those
        weights of member i that are not given.
        """

        def repeat(tensor: Tensor) -> Tensor:
            return tensor.detach().repeat(count, *(1,) * (tensor.ndim - 1))

        whole = self.slice_members(0, self.members)
        for group, original in zip(whole.groups, self.groups, strict=True):
            group.weights = {}
            for name, tensor in original.weights.items():
                given = weights.get(f"{group.prefix}{name}")
                kept = repeat(tensor) if given is None else given.to(self.device, copy=True)
                group.weights[name] = kept.requires_grad_()
            group.buffers = {name: repeat(tensor) for name, tensor in original.buffers.items()}
        whole.alive = self.alive.repeat(count)
        whole.first, whole.offload = 0, None
        return whole

    def without_side_effects(self) -> "Ensemble":
        """The same members with copied running statistics, so a pass changes nothing."""
        twin = self.slice_members(0, self.members)
        for group, original in zip(twin.groups, self.groups, strict=True):
            group.weights = original.weights  # the leaves that collect gradients
            group.buffers = {name: tensor.clone() for name, tensor in group.buffers.items()}
        return twin

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

    def __len__(self) -> int:
        return self.members

    def __iter__(self) -> Iterator[nn.Module]:
        return map(self.member, range(self.members))

    @overload
    def __getitem__(self, index: int) -> nn.Module: ...

    @overload
    def __getitem__(self, index: slice) -> "Ensemble": ...

    def __getitem__(self, index: int | slice) -> "nn.Module | Ensemble":
        """A copy of one member as an ordinary module; or a range of members on the same memory."""
        if isinstance(index, slice):
            start, stop, step = index.indices(self.members)
            if step != 1 or start >= stop:
                raise OutOfRange("a range of members has step 1 and at least one member")
            return self.slice_members(start, stop)
        index = whole_64_bits("the number of a member", index)
        return self.member(index + self.members if index < 0 else index)

    def named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Names and tensors of all trained parameters: [M, ...], or [...] for shared ones."""
        return iter((self.weights | self.trained_shared).items())

    def parameters(self) -> Iterator[Tensor]:
        """Tensors of all trained parameters, for a torch optimiser."""
        return (tensor for _, tensor in self.named_parameters())

    def named_buffers(self) -> Iterator[tuple[str, Tensor]]:
        """Names and tensors [M, ...] that members store but do not train."""
        return iter(self.buffers.items())

    def state_dict(self) -> Tree:
        """All tensors by their name in one network, and which members are finite."""
        return {
            **{name: tensor.detach() for name, tensor in (self.weights | self.shared).items()},
            **self.buffers,
            FINITE: self.alive,
        }

    def load_state_dict(self, state: Mapping[str, Tensor], strict: bool = True) -> IncompatibleKeys:
        """Copy the tensors of a `state_dict` into the ensemble, in place.

        Args:
            state: tensors by name.
            strict: refuse missing and unexpected names.
        """
        if not isinstance(state, Mapping) or not all(map(torch.is_tensor, state.values())):
            raise ConfigError(f"state must be tensors by name, not {describe_value(state)}")
        mine, strict = self.state_dict(), flag("strict", strict)
        keys = IncompatibleKeys(
            [name for name in mine if name not in state and name != FINITE],
            [name for name in state if name not in mine],
        )
        if strict and any(keys):
            raise ConfigError(
                f"the state dict has another architecture: missing {keys.missing_keys}, unexpected "
                f"{keys.unexpected_keys}; type strict=False to load the names that fit"
            )
        shared = {name: tensor for name, tensor in mine.items() if name in state}
        for name, tensor in shared.items():
            if tensor.shape != state[name].shape:
                raise ConfigError(
                    f"{name} has shape {tuple(state[name].shape)} in the state dict, but "
                    f"{tuple(tensor.shape)} in this ensemble"
                )
        with torch.no_grad():
            for name, tensor in shared.items():
                tensor.copy_(state[name])
        return keys

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients of all parameters."""
        for tensor in self.parameters():
            if set_to_none:
                tensor.grad = None
            elif tensor.grad is not None:
                tensor.grad.zero_()

    def eval(self) -> Self:
        """Set evaluation mode, as `train(False)`."""
        return self.train(False)

    def to(
        self,
        device: torch.device | str | int | torch.dtype | None = None,
        dtype: torch.dtype | None = None,
    ) -> Self:
        """Move the members to a device or a floating point type, in place, in either order."""
        if isinstance(device, torch.dtype):
            device, dtype = None, device
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            came = dtype if isinstance(dtype, torch.dtype) else describe_value(dtype)
            raise ConfigError(
                f"members need a floating point type such as torch.float64, not {came}"
            )
        if device is not None:  # shapes without numbers are allowed here
            device = torch.device("meta") if str(device) == "meta" else usable_device(device)
        if self.offload is not None:
            self.offload.flush()
        for group in self.groups:
            group.to(device, dtype)
        self.alive, self.offload = self.alive.to(device), None
        return self

    def cpu(self) -> Self:
        """Move the members to the CPU, in place."""
        return self.to("cpu")

    def cuda(self, device: int | None = None) -> Self:
        """Move the members to a GPU, in place."""
        return self.to("cuda" if device is None else f"cuda:{device}")

    @property
    def state(self) -> Tree:
        """All tensors to save."""
        return self.changing_state | self.frozen_state

    @property
    def changing_state(self) -> Tree:
        """The tensors that training may change."""
        weights = {f"weights/{name}": tensor for name, tensor in self.weights.items()}
        buffers = {f"buffers/{name}": tensor for name, tensor in self.buffers.items()}
        shared = {f"shared/{name}": tensor for name, tensor in self.trained_shared.items()}
        return {"alive": self.alive, **weights, **buffers, **shared}

    @property
    def frozen_state(self) -> Tree:
        """The frozen shared tensors, which a run stores once."""
        shared = self.shared.items()
        return {f"shared/{name}": tensor for name, tensor in shared if not tensor.requires_grad}

    def arrange_like(self, state: Iterable[str]) -> None:
        """Share the tensors that a saved ensemble shares, and no others.

        Args:
            state: names of the saved tensors.
        """
        names = set(state)
        for group in self.groups:
            stacked = group.weights | group.buffers
            shared = [n for n in stacked if f"shared/{group.prefix}{n}" in names]
            private = [
                n
                for n in group.shared
                if f"shared/{group.prefix}{n}" not in names
                and {f"{kind}/{group.prefix}{n}" for kind in ("weights", "buffers")} & names
            ]
            group.rearrange(shared, private)

    def load_state(self, state: Tree) -> Self:
        """Copy the tensors of `state` into the ensemble, in place.

        Frozen shared tensors may be missing, as in a checkpoint; they keep their values.
        """
        mine = self.changing_state | {n: t for n, t in self.frozen_state.items() if n in state}
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
        write_tensors(
            checked_path(path, "path"), {name: t.detach() for name, t in self.state.items()}
        )

    @classmethod
    def load(cls, path: str | Path, build: Build | Sequence[tuple[Build, int]]) -> Self:
        """Read what `save` wrote; `build` makes the networks that the tensors belong to."""
        return cls.from_state(read_tensors(checked_path(path, "path")), build)

    @classmethod
    def from_state(
        cls,
        state: Tree,
        build: Build | Sequence[tuple[Build, int]],
        frozen: Iterable[str] = (),
    ) -> Self:
        """An ensemble of the networks that `build` makes, with the tensors of `state`.

        Parameters are trained where those of `state` are, whatever `build` freezes.

        Args:
            state: the saved tensors.
            build: makes the networks.
            frozen: names of shared tensors in `state` that are not trained.
        """
        build = build if callable(build) else _pairs(build)
        members = len(state["alive"]) if callable(build) and "alive" in state else None
        with warnings.catch_warnings():
            # The factory's initial weights do not matter: all are replaced.
            warnings.simplefilter("ignore", ShoalWarning)
            ensemble = cls.init(as_saved(build, state, frozen), members)
        ensemble.builds = [build] if callable(build) else [make for make, _ in build]
        kinds = {t.dtype for name, t in state.items() if name.startswith("weights/")}
        if strange := [kind for kind in kinds if not kind.is_floating_point]:
            raise ConfigError(
                f"the saved weights have type {strange[0]}, not a real floating point type"
            )
        if len(kinds) == 1:
            ensemble.to(kinds.pop())
        ensemble.arrange_like(state)
        return ensemble.load_state(state)

    def _collect(self, kind: str) -> Tree:
        return {
            f"{group.prefix}{name}": tensor
            for group in self.groups
            for name, tensor in getattr(group, kind).items()
        }

    def _facts(self) -> dict[str, object]:
        kinds = {type(group.prototype).__name__: group for group in self.groups}
        total = sum(tensor.numel() for tensor in self.weights.values())
        each = total // self.members
        lost = self.members - int(self.alive.sum())
        common = sum(tensor.numel() for tensor in self.shared.values())
        return {
            "members": self.members,
            "network": " and ".join(kinds),
            "weights": f"{each:,} in each member" if len(self.groups) == 1 else f"{total:,} in all",
            "shared": f"{common:,} shared by all" if common else None,
            "device": str(self.device),
            "type": str(self.dtype).removeprefix("torch."),
            "diverged": lost or None,
        }

    def __repr__(self) -> str:
        facts = self._facts()
        held = ", ".join(str(facts[key]) for key in ("weights", "shared") if facts[key])
        return (
            f"Ensemble({self.members} x {facts['network']}, {held}, "
            f"{facts['type']} on {facts['device']})"
        )

    def _repr_html_(self) -> str:
        return facts_html("Ensemble", self._facts())


def _trains(layer: nn.Module | None) -> bool:
    """Whether a part of a network is in training mode; `modules()` takes ten times as long."""
    return layer is not None and (layer.training or any(map(_trains, layer._modules.values())))


def _pairs(build: Any) -> list[tuple[Build, int]]:
    """The pairs (build, count) of mixed architectures."""
    pairs: list[Any] = list(build) if isinstance(build, list | tuple) else [None]
    if not pairs:
        raise ConfigError("an ensemble needs at least one member, not an empty list")
    if all(
        isinstance(pair, list | tuple) and len(pair) == 2 and callable(pair[0]) for pair in pairs
    ):
        return [(make, count) for make, count in pairs]
    raise ConfigError(
        f"build must be a function that makes a network, or a list of (build, count) pairs, "
        f"not {describe_value(build)}"
    )


def _count(count: object) -> int:
    whole = isinstance(count, (int, np.integer)) and not isinstance(count, bool)
    members = int(count) if whole else 0  # pyright: ignore[reportArgumentType]
    if members < 1:
        raise ConfigError(f"an ensemble needs at least one member, not {describe_value(count)}")
    if members >= 2**63:
        raise ConfigError(
            f"an ensemble of {describe_value(count)} members does not fit into any memory"
        )
    return members


def _inputs_of(inputs: MemberInputs, members: slice) -> MemberInputs:
    """What these members see of inputs for all members."""
    return MemberInputs(inputs.x[members], True) if inputs.own else inputs


def move_to_host(ensemble: Ensemble, offload: Offload, dtype: torch.dtype) -> None:
    """Give an ensemble's members to the host, in place; one tensor exists twice at a time."""
    for group in ensemble.groups:
        trees = group.weights, group.buffers
        on_device = [dict(tree) for tree in trees]
        for tree in trees:
            tree.clear()
        group.to(offload.device, dtype)  # what members share, and what the networks hold
        for tree, tensors in zip(trees, on_device, strict=True):
            for name in list(tensors):
                tensor = tensors.pop(name)
                kind = dtype if tensor.is_floating_point() else None
                copy = offload.stored(tensor, kind)
                tree[name] = copy.requires_grad_(tensor.requires_grad)
    ensemble.alive = ensemble.alive.to(offload.device)
    ensemble.offload = offload


def load_to_device(ensemble: Ensemble) -> None:
    """Make an offloaded ensemble an ordinary one of the host, in place and without copies."""
    if ensemble.offload is not None:
        ensemble.to("cpu")


def host_blocks(ensemble: Ensemble) -> list[Ensemble]:
    """The members in blocks of one architecture each, still on the host."""
    assert ensemble.offload is not None
    blocks, first = [], 0
    for group in ensemble.groups:
        last, size = first + group.members, ensemble.offload.block
        starts = range(first, last, size)
        blocks += [ensemble.slice_members(start, min(start + size, last)) for start in starts]
        first = last
    return blocks


def tensors_of(block: Ensemble) -> list[Tensor]:
    """The private tensors of a block of one architecture."""
    group = block.groups[0]
    return [*group.weights.values(), *group.buffers.values()]


def part_of(block: Ensemble, copies: Sequence[Tensor]) -> Ensemble:
    """The block on the device, with copies of its tensors in the order of `tensors_of`."""
    part, group = block.slice_members(0, block.members), block.groups[0]
    tensors = iter(copies)
    weights = {name: next(tensors).requires_grad_() for name in group.weights}
    buffers = {name: next(tensors) for name in group.buffers}
    part.groups = [replace(group, weights=weights, buffers=buffers)]
    part.alive, part.offload = block.alive, None
    return part


def parts_on_device(ensemble: Ensemble, skip: int = 0) -> Iterator[Ensemble]:
    """The members block by block on the device; a part is valid until the next one.

    Args:
        ensemble: the members; if they are on the device already, they are one part.
        skip: number of blocks to leave out, from the first.
    """
    if ensemble.offload is None:
        yield ensemble
        return
    blocks = host_blocks(ensemble)[skip:]
    visits = ensemble.offload.visit([tensors_of(block) for block in blocks])
    for block, copies in zip(blocks, visits, strict=True):
        yield part_of(block, copies)


def store_buffers(ensemble: Ensemble, part: Ensemble) -> None:
    """Copy the running statistics of a part to their place on the host."""
    assert ensemble.offload is not None
    first = part.first - ensemble.first
    block = ensemble.slice_members(first, first + part.members)
    for name, tensor in block.groups[0].buffers.items():
        ensemble.offload.store(tensor, part.groups[0].buffers[name])


def copied_to_device(ensemble: Ensemble) -> Ensemble:
    """All members on the device, for gradients that flow back to the tensors of the host."""
    assert ensemble.offload is not None
    ensemble.offload.flush()
    device, whole = ensemble.offload.device, ensemble.slice_members(0, ensemble.members)
    whole.groups = [
        replace(
            group,
            weights={name: tensor.to(device) for name, tensor in group.weights.items()},
            buffers={name: tensor.to(device) for name, tensor in group.buffers.items()},
        )
        for group in ensemble.groups
    ]
    whole.alive, whole.offload = ensemble.alive, None
    return whole

"""The interface of `nn.Module` for an ensemble; its parameters are those of all members.

A parameter is one tensor [M, ...] for all members, named like the parameter of one network. A torch
optimiser and the user's own loop work as with a module.
"""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, NamedTuple, Self, overload

import torch
from torch import Tensor, nn

from shoal.core.display.notebook import facts_html
from shoal.core.errors import ConfigError
from shoal.core.types import Tree
from shoal.engine.members.group import Group
from shoal.engine.resources.offload import Offload

if TYPE_CHECKING:
    from shoal.inference.ensemble import Ensemble

__all__ = ["IncompatibleKeys", "ModuleLike"]

FINITE = "ensemble.alive"
"""Name of the tensor in a state dict that marks the finite members."""


class IncompatibleKeys(NamedTuple):
    """Names that `load_state_dict` did not find, and names that it did not use."""

    missing_keys: list[str]
    unexpected_keys: list[str]


class ModuleLike:
    """Base class of an ensemble: the interface of a module and of a sequence of members.

    Attributes:
        groups: one group per architecture.
        alive: which members are finite [M].
    """

    groups: list[Group]
    alive: Tensor
    offload: Offload | None

    if TYPE_CHECKING:  # defined by `Ensemble`

        @property
        def members(self) -> int: ...

        @property
        def weights(self) -> Tree: ...

        @property
        def buffers(self) -> Tree: ...

        @property
        def shared(self) -> Tree: ...

        @property
        def trained_shared(self) -> Tree: ...

        @property
        def device(self) -> torch.device: ...

        @property
        def dtype(self) -> torch.dtype: ...

        def train(self, mode: bool = True) -> Self: ...

        def member(self, index: int) -> nn.Module: ...

        def slice_members(self, start: int, stop: int) -> "Ensemble": ...

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
                raise IndexError("a range of members has step 1 and at least one member")
            return self.slice_members(start, stop)
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
        mine = self.state_dict()
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
        if dtype is not None and not dtype.is_floating_point:
            raise ConfigError(f"members need a floating point type, not {dtype}")
        device = f"cuda:{device}" if isinstance(device, int) else device
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

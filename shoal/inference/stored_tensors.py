"""What an ensemble saves and loads: all its tensors, by kind and name.

The names are `weights/NAME` and `buffers/NAME` for private tensors [M, ...], `shared/NAME` for
tensors [...] that all members share, and `alive`, which marks the finite members.
"""

import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Self

import torch

from shoal.core.errors import ConfigError, ShoalWarning
from shoal.core.storage.files import read_tensors, write_tensors
from shoal.core.types import Tree
from shoal.inference.adopted import as_saved
from shoal.inference.initialise import Build
from shoal.inference.module_like import ModuleLike

__all__ = ["StoredTensors"]

_PRIVATE = ("weights", "buffers")


class StoredTensors(ModuleLike):
    """Base class of an ensemble: its tensors as one tree, and files of them."""

    if TYPE_CHECKING:  # defined by `Ensemble`
        builds: list[Build | None]

        @classmethod
        def init(
            cls, build: Build | Sequence[tuple[Build, int]], members: int | None = None
        ) -> Self: ...

    @property
    def device(self) -> torch.device:
        """Device of the members."""
        return self.alive.device

    @property
    def dtype(self) -> torch.dtype:
        """Type of the weights."""
        return next(iter(self.weights.values())).dtype

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
            own = [n for n in group.shared if f"shared/{group.prefix}{n}" not in names]
            private = group.weights | group.buffers
            shared = [n for n in private if f"shared/{group.prefix}{n}" in names]
            own = [n for n in own if {f"{k}/{group.prefix}{n}" for k in _PRIVATE} & names]
            group.rearrange(shared, own)

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
        write_tensors(Path(path), {name: t.detach() for name, t in self.state.items()})

    @classmethod
    def load(cls, path: str | Path, build: Build | Sequence[tuple[Build, int]]) -> Self:
        """Read what `save` wrote; `build` makes the networks that the tensors belong to."""
        return cls.from_state(read_tensors(Path(path)), build)

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

"""Members of one architecture, their tensors stacked."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from shoal.core.errors import ConfigError
from shoal.core.types import Tree
from shoal.inference.dropout import install_dropout
from shoal.inference.embeddings import first_called, install_embeddings
from shoal.inference.linear import install_linear
from shoal.inference.mapping import Mapping, Shown, mapped_or_looped
from shoal.inference.precision import lowered, lowered_inputs

__all__ = ["Group"]

Embedded = tuple[str, torch.Size]
"""Probe of an embedding, and the shape of what it gives for a batch."""


@dataclass
class Group:
    """Members of one architecture.

    Attributes:
        prototype: an ordinary module, whose copies `Ensemble.member` hands out.
        skeleton: the module that runs with the members' tensors in place of its own.
        weights: trainable tensors [m, ...].
        buffers: everything else the members carry [m, ...]: running statistics, frozen weights.
        keys: names of the dropout keys of the skeleton.
        prefix: tells the weights of several groups apart.
        compute: type the networks calculate in, when it is not that of the weights.
    """

    prototype: nn.Module
    skeleton: nn.Module
    weights: Tree
    buffers: Tree
    keys: list[str]
    prefix: str = ""
    compute: torch.dtype | None = None
    _proven: dict[tuple, Mapping] = field(default_factory=dict, repr=False)
    _embedded: dict[torch.Size, Embedded | None] = field(default_factory=dict, repr=False)

    @classmethod
    def of(cls, modules: Sequence[nn.Module]) -> "Group":
        """Stack the tensors of equal architectures."""
        parameters = [dict(module.named_parameters()) for module in modules]
        buffers = [dict(module.named_buffers()) for module in modules]
        trained = [name for name, p in parameters[0].items() if p.requires_grad]
        frozen = [name for name in parameters[0] if name not in trained]
        if not trained:
            raise ConfigError("every parameter of the network is frozen: nothing can be trained")
        weights = {name: _stack(parameters, name).requires_grad_() for name in trained}
        rest = {name: _stack(parameters, name) for name in frozen}
        rest |= {name: _stack(buffers, name) for name in buffers[0]}
        prototype = modules[0]
        skeleton = copy.deepcopy(prototype)
        install_linear(skeleton)
        install_embeddings(skeleton)
        return cls(prototype, skeleton, weights, rest, install_dropout(skeleton))

    @property
    def members(self) -> int:
        """How many."""
        return len(next(iter(self.weights.values())))

    @property
    def head(self) -> list[str]:
        """Names of the weights of the last layer."""
        owner = list(self.weights)[-1].rpartition(".")[0]
        return [name for name in self.weights if name.rpartition(".")[0] == owner]

    @property
    def must_loop(self) -> bool:
        """`vmap` was tried on this network and could not batch it."""
        tried = self._proven.items()
        return any(case[0].kind == "vmap" and used.kind == "loop" for case, used in tried)

    def run(
        self,
        shown: Sequence[Shown],
        mapping: Mapping,
        keys: Tensor | None,
        probe: Tree | None = None,
    ) -> list[Tensor]:
        """Outputs [m, B, C] for a batch, and for a part of it if that is shown as well.

        The first run finds out whether the mapping works for this network.
        """
        state = self.weights | self.buffers | (probe or {})
        if self.compute is not None:
            state = lowered(self.skeleton, state, self.compute)
            shown = [Shown(lowered_inputs(x, self.compute, own), own) for x, own in shown]
        if keys is not None:
            state = state | dict.fromkeys(self.keys, keys)
        own = tuple(inputs.own for inputs in shown)
        case = (mapping, self.skeleton.training, own, bool(probe), torch.is_grad_enabled())
        if case in self._proven:
            outputs = self._proven[case].outputs(self.skeleton, state, *shown)
        else:
            known = Mapping("loop") if self.must_loop else mapping
            outputs, used = mapped_or_looped(known, self.skeleton, state, *shown)
            self._proven[case] = used
        if self.compute is None:
            return list(outputs)
        return [each.to(next(iter(self.weights.values()))) for each in outputs]

    def embedded(self, x: Tensor) -> Embedded | None:
        """The embedding that tokens [B, ...] go through first; None when there is none."""
        if x.shape not in self._embedded:
            one = {name: t[0].detach() for name, t in (self.weights | self.buffers).items()}
            self._embedded[x.shape] = first_called(self.skeleton, one, x)
        return self._embedded[x.shape]

    def part(self, start: int, stop: int) -> "Group":
        """Some of the members, on the same memory."""
        weights = {n: t.detach()[start:stop].requires_grad_() for n, t in self.weights.items()}
        buffers = {n: t[start:stop] for n, t in self.buffers.items()}
        return replace(self, weights=weights, buffers=buffers)

    def member(self, index: int) -> nn.Module:
        """An ordinary module with the tensors of one member."""
        module = copy.deepcopy(self.prototype)
        tensors = dict(module.named_parameters()) | dict(module.named_buffers())
        with torch.no_grad():
            for name, stacked in (self.weights | self.buffers).items():
                tensors[name].data = stacked[index].detach().clone()
        return module.eval()


def _stack(members: Sequence[dict], name: str) -> Tensor:
    return torch.stack([tensors[name].detach() for tensors in members])

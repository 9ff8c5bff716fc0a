"""Members of one architecture, with stacked tensors."""

import copy
import functools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from shoal.core.errors import ConfigError, DataError, ShoalError
from shoal.core.opaque import Opaque
from shoal.core.structure import Inputs, Structured
from shoal.core.types import Tree
from shoal.engine.layers import first_called, install_dropout, install_embeddings, install_linear
from shoal.engine.member_runner import MemberInputs, MemberRunner, first_line, run_or_loop
from shoal.engine.network_call import call_network, set_output
from shoal.engine.precision import lowered, lowered_inputs

__all__ = ["Group"]

Embedded = tuple[str, torch.Size]
"""Probe of an embedding, and the shape of the embedding's output for a batch."""


@dataclass
class Group:
    """Members of one architecture.

    Attributes:
        prototype: an ordinary module; `Ensemble.member` returns copies of it.
        skeleton: the module that runs with the members' tensors instead of its own.
        weights: trainable tensors [m, ...].
        buffers: all other tensors [m, ...]: running statistics, weights that are not trained.
        keys: names of the dropout keys of the skeleton.
        prefix: prefix of the weights' names, unique among groups.
        compute: type of the networks' arithmetic; None for the type of the weights.
    """

    prototype: nn.Module
    skeleton: nn.Module
    weights: Tree
    buffers: Tree
    keys: list[str]
    prefix: str = ""
    compute: torch.dtype | None = None
    _proven: dict[tuple, MemberRunner] = field(default_factory=dict, repr=False)
    _embedded: dict[Any, Embedded | None] = field(default_factory=dict, repr=False)
    _seen: set[tuple[Any, Any]] = field(default_factory=set, repr=False)
    _whole: list[bool] = field(default_factory=list, repr=False)

    @classmethod
    def of(cls, modules: Sequence[nn.Module]) -> "Group":
        """Stack the tensors of equal architectures."""
        parameters = [dict(module.named_parameters()) for module in modules]
        buffers = [dict(module.named_buffers()) for module in modules]
        trained = [name for name, p in parameters[0].items() if p.requires_grad]
        frozen = [name for name in parameters[0] if name not in trained]
        if not trained:
            raise ConfigError("every parameter of the network is frozen, so nothing can be trained")
        weights = {name: _stack(parameters, name).requires_grad_() for name in trained}
        rest = {name: _stack(parameters, name) for name in frozen}
        rest |= {name: _stack(buffers, name) for name in buffers[0]}
        prototype = modules[0]
        computed = _computed(prototype)
        skeleton = _copied(prototype)
        _forget(skeleton, computed)
        install_linear(skeleton)
        install_embeddings(skeleton)
        return cls(prototype, skeleton, weights, rest, install_dropout(skeleton))

    @property
    def members(self) -> int:
        """Number of members."""
        return len(next(iter(self.weights.values())))

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
    ) -> list[Tensor]:
        """Outputs [m, B, C] for a batch, and for some of its rows if they are given.

        The first run checks that the member runner works for this network.
        """
        shown = [MemberInputs(self.taken(x, own), own) for x, own in shown]
        state = self.weights | self.buffers | (probe or {})
        if self.compute is not None:
            state = lowered(self.skeleton, state, self.compute)
            shown = [MemberInputs(_lowered(x, self.compute, own), own) for x, own in shown]
        if keys is not None:
            state = state | dict.fromkeys(self.keys, keys)
        own = tuple(inputs.own for inputs in shown)
        case = (mapping, self.skeleton.training, own, bool(probe), torch.is_grad_enabled())
        try:
            if case in self._proven:
                outputs = self._proven[case].outputs(self.skeleton, state, *shown)
            else:
                known = MemberRunner("loop") if self.must_loop else mapping
                outputs, used = run_or_loop(known, self.skeleton, state, *shown)
                self._proven[case] = used
        except Exception as error:
            self._explain(error, shown[0])
            raise
        self._seen.add(_kind(shown[0]))
        if self.compute is None:
            return list(outputs)
        return [each.to(next(iter(self.weights.values()))) for each in outputs]

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
        one = {name: t[0].detach() for name, t in (self.weights | self.buffers).items()}
        training = self.skeleton.training
        try:
            with torch.no_grad():
                call_network(self.skeleton.eval(), one, x)
            return True
        except Exception:
            return False
        finally:
            self.skeleton.train(training)

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
        (shape, dtype), reason = _kind(shown), first_line(error)
        known = sorted({tuple(seen) for seen, _ in self._seen})
        if tuple(shape) not in known:
            raise DataError(
                f"the network does not take inputs of shape {tuple(shape)}; it took "
                f"{known[0] if len(known) == 1 else known} before: {reason}"
            ) from error
        if (shape, dtype) not in self._seen or isinstance(error, IndexError):
            raise DataError(
                f"the network does not take these inputs of type {_name(dtype)}: {reason}"
            ) from error
        alone = len(shown.x[0] if shown.own else shown.x) == 1
        if alone and self.skeleton.training and isinstance(error, ValueError):
            raise DataError(
                f"this network cannot train on a batch of one data point ({reason}); "
                f"give the loader drop_last=True or another batch_size"
            ) from error

    def embedded(self, x: Inputs) -> Embedded | None:
        """The first embedding of tokens [B, ...]; None without an embedding."""
        kind, _ = _kind(MemberInputs(x, False))
        if (len(x), kind) not in self._embedded:
            one = {name: t[0].detach() for name, t in (self.weights | self.buffers).items()}
            self._embedded[len(x), kind] = first_called(self.skeleton, one, x)
        return self._embedded[len(x), kind]

    def slice_members(self, start: int, stop: int) -> "Group":
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
        set_output(module, self.skeleton.__dict__.get("_shoal_output"))
        return module.eval()


def _lowered(x: Inputs, dtype: torch.dtype, own: bool) -> Inputs:
    if isinstance(x, Structured):
        return x.map(lambda tensor: lowered_inputs(tensor, dtype, own))
    return lowered_inputs(x, dtype, own) if isinstance(x, Tensor) else x


def _stack(members: Sequence[dict], name: str) -> Tensor:
    return torch.stack([tensors[name].detach() for tensors in members])


def _kind(shown: MemberInputs) -> tuple[Any, Any]:
    """Shape and type of one input; for a structure, of each of its tensors."""
    x, own = shown
    if isinstance(x, Tensor):
        return x.shape[1 + own :], x.dtype
    if isinstance(x, Opaque):
        return (type(x.value).__name__,), None
    parts = x.tensors.items()
    return tuple((n, *t.shape[1 + own :]) for n, t in parts), tuple(t.dtype for _, t in parts)


def _name(dtype: Any) -> str:
    kinds = dtype if isinstance(dtype, tuple) else (dtype,)
    return ", ".join(str(kind).removeprefix("torch.") for kind in kinds)


def _computed(module: nn.Module) -> list[tuple[str, str]]:
    """Layers and names of tensors that a hook computes from parameters before every call.

    `torch.nn.utils.weight_norm` and pruning use such hooks. The tensors computed so far are
    detached, since they could not be copied otherwise.
    """
    found = []
    for owner, layer in module.named_modules():
        hooks = layer._forward_pre_hooks.values()
        known = {getattr(hook, "name", getattr(hook, "_tensor_name", None)) for hook in hooks}
        for name, value in list(vars(layer).items()):
            if not isinstance(value, Tensor):
                continue
            if name in known:
                found.append((owner, name))
                vars(layer)[name] = value.detach()
            elif value.grad_fn is not None:
                raise ConfigError(
                    f"the network computed '{name}' from its weights in its constructor, so "
                    f"training would not change it; compute it in forward"
                )
    return found


def _forget(module: nn.Module, computed: list[tuple[str, str]]) -> None:
    """Remove `vmap` tensors from the module, which could not be copied otherwise."""
    for owner, name in computed:
        layer = module.get_submodule(owner)
        vars(layer).pop(name)
        layer.register_forward_hook(functools.partial(_drop, name), always_call=True)


def _drop(name: str, layer: nn.Module, *_: object) -> None:
    vars(layer).pop(name, None)


def _copied(module: nn.Module) -> nn.Module:
    try:
        return copy.deepcopy(module)
    except Exception as error:
        raise ConfigError(
            f"the network cannot be copied by copy.deepcopy, as members need: {first_line(error)}"
        ) from error

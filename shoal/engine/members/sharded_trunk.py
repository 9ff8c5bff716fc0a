r"""A trunk in shards: replicas hold rows of the tensors that members share, and gather one layer.

A layer is gathered before it is used and freed after it, in the forward and in the backward pass.
The gradient of a trained layer is summed over the replicas, and each keeps its own rows:

$$ held = \frac{trunk}{P} + two \; layers, \quad P \; replicas. $$

This is fully sharded data parallelism (FSDP, Zhao et al. 2023, arXiv 2304.11277). It gathers
tensors, not modules (Zhang et al. 2024, arXiv 2411.00284). `fully_shard` of torch has hooks at the
inputs of modules. If members have inputs of their own under `vmap`, as behind adapters, its hooks
free no layer before the end of the backward pass. It also needs a backward pass that fills `.grad`.

Networks see `ShardedTensor`s. The first torch function that takes one gathers its whole layer.
Autograd would keep gathered tensors for the backward pass, so a hook stores their places instead.
The order of layers repeats, so that the next layer arrives while this one is computed.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only

from shoal.core.types import Tree
from shoal.engine.derivatives.replicas import current_division
from shoal.engine.functorch import Operation
from shoal.engine.processes.mesh import Arrival, Mesh

__all__ = ["ShardedTensor", "TrunkPass", "TrunkShards", "WholeFirst", "with_whole_tensors"]


class TrunkShards:
    """Which rows of the shared tensors of one architecture this process holds.

    Attributes:
        mesh: the processes.
        shapes: shape of each tensor that is divided; the others are whole on every process.
        layers: names of the divided tensors of each layer.
        following: the layer after a layer, in the forward and in the backward pass.
    """

    def __init__(self, mesh: Mesh, shapes: Mapping[str, torch.Size]) -> None:
        self.mesh, self.shapes = mesh, dict(shapes)
        self.layers: dict[str, list[str]] = {}
        for name in shapes:
            self.layers.setdefault(_layer(name), []).append(name)
        self.following: dict[tuple[bool, str], str] = {}

    @classmethod
    def of(cls, mesh: Mesh, shared: Tree) -> "TrunkShards":
        """Divide the matrices among shared tensors; vectors are small and stay whole."""
        return cls(mesh, {name: t.shape for name, t in shared.items() if _is_divided(t, mesh)})

    def rows(self, name: str) -> slice:
        """Rows of a tensor that this process holds."""
        return self.mesh.shard_rows(self.shapes[name][0])

    def own(self, name: str, whole: Tensor) -> Tensor:
        """A copy of the own rows."""
        return whole.detach()[self.rows(name)].clone().requires_grad_(whole.requires_grad)

    def whole(self, name: str, own: Tensor) -> Tensor:
        """The whole tensor, detached, or the whole of something with a tensor's shape."""
        return self.mesh.gather_shards(own, self.shapes[name][0], "whole trunk").wait()

    def shown(self, shared: Tree) -> Tree:
        """The shared tensors as networks see them, for passes without a graph."""
        return TrunkPass(self, shared).shown(shared)

    @contextmanager
    def passing(self, shared: Tree) -> Iterator[Tree]:
        """A forward pass: the shared tensors as networks see them."""
        trunk = TrunkPass(self, shared)
        try:
            with saved_tensors_hooks(trunk.pack, trunk.unpack):
                yield trunk.shown(shared)
        finally:
            trunk.free()


class TrunkPass:
    """One forward pass through a trunk in shards, and its backward pass.

    Attributes:
        shards: the division.
        own: own rows of the divided tensors.
    """

    def __init__(self, shards: TrunkShards, shared: Tree) -> None:
        self.shards, self.own = shards, {name: shared[name] for name in shards.shapes}
        self._held: dict[tuple[str, bool], Tensor] = {}
        self._names: dict[int, str] = {}
        self._coming: dict[str, list[Arrival]] = {}
        self._last: tuple[bool, str | None] = False, None

    def shown(self, shared: Tree) -> Tree:
        """The shared tensors as networks see them."""
        return shared | {name: ShardedTensor.of(name, self) for name in self.own}

    def whole(self, names: list[str], back: bool = False) -> Tree:
        """These tensors, with a graph in a forward pass; layers of others are freed."""
        layers = dict.fromkeys(_layer(name) for name in names)
        keys = {name: (name, self._is_live(name, back)) for name in names}
        for key in [key for key in self._held if _layer(key[0]) not in layers]:
            del self._names[_memory(self._held.pop(key))]
        for name in names:
            if keys[name] not in self._held:
                self._gather(_layer(name), back)
        return {name: self._held[keys[name]] for name in names}

    def _is_live(self, name: str, back: bool) -> bool:
        return not back and torch.is_grad_enabled() and self.own[name].requires_grad

    def _gather(self, layer: str, back: bool) -> None:
        here = self._coming.pop(layer, None) or self._start(layer)
        following, (direction, last) = self.shards.following, self._last
        if last is not None and direction == back:
            following[back, last] = layer
        self._last = back, layer
        after = following.get((back, layer))
        if after is not None and after not in self._coming:
            self._coming[after] = self._start(after)
        for name, arrival in zip(self.shards.layers[layer], here, strict=True):
            live = self._is_live(name, back)
            whole: Any = arrival.wait()
            if live:
                whole = _Whole.apply(self.own[name], arrival, self.shards, name)
            self._held[name, live] = whole
            self._names[_memory(whole)] = name

    def _start(self, layer: str) -> list[Arrival]:
        names, mesh, shapes = self.shards.layers[layer], self.shards.mesh, self.shards.shapes
        return [mesh.gather_shards(self.own[name], shapes[name][0]) for name in names]

    def free(self) -> None:
        """Free what the forward pass has gathered; tensors under way arrive first."""
        for arrivals in self._coming.values():
            for arrival in arrivals:
                arrival.wait()
        self._held, self._names, self._coming = {}, {}, {}
        self._last = True, None

    def pack(self, tensor: Tensor) -> "Tensor | _Place":
        """What autograd keeps: of a gathered tensor its place alone."""
        name = self._names.get(_memory(tensor))
        if name is None or tensor.dtype != self.own[name].dtype:
            return tensor.detach()  # an output that holds its own graph would never be deleted
        return _Place(name, tensor.shape, tensor.stride(), tensor.storage_offset())

    def unpack(self, kept: "Tensor | _Place") -> Tensor:
        """The tensor that autograd kept; gathered once more if only its place was kept."""
        if isinstance(kept, Tensor):
            return kept
        with _outside(), torch.no_grad():
            whole = self.whole([kept.name], back=True)[kept.name]
            return whole.as_strided(kept.shape, kept.stride, kept.offset)


class _Place(NamedTuple):
    """A view of a gathered tensor."""

    name: str
    shape: torch.Size
    stride: tuple[int, ...]
    offset: Any


class _Whole(Operation):
    """A tensor of all replicas; each keeps its rows of the gradient, summed over the replicas.

    Replicas that repeat the batch have equal gradients, and need no sum.
    """

    @staticmethod
    def forward(ctx: Any, own: Tensor, arrival: Arrival, shards: TrunkShards, name: str) -> Tensor:
        ctx.shards, ctx.name, ctx.summed = shards, name, current_division() is not None
        return arrival.wait()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple:  # pyright: ignore
        if ctx.summed:
            return ctx.shards.mesh.sum_shards(gradient), None, None, None
        return gradient[ctx.shards.rows(ctx.name)].contiguous(), None, None, None


class ShardedTensor(Tensor):
    """A tensor of which this process holds some rows; torch functions see the whole tensor.

    Attributes:
        called: its name among the shared tensors.
        trunk: the pass that it belongs to.
    """

    called: str
    trunk: TrunkPass

    @staticmethod
    def of(name: str, trunk: TrunkPass) -> "ShardedTensor":
        """The tensor of this name in a pass."""
        own, shape = trunk.own[name], trunk.shards.shapes[name]
        made: Any = Tensor._make_wrapper_subclass(  # pyright: ignore[reportAttributeAccessIssue]
            ShardedTensor, shape, dtype=own.dtype, device=own.device,
            requires_grad=own.requires_grad,
        )  # fmt: skip
        made.called, made.trunk = name, trunk
        return made

    @classmethod
    def __torch_function__(
        cls, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        """Answer questions about shape and type; call other functions with whole tensors."""
        if func in _QUESTIONS:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        return with_whole_tensors(func, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        """Refuse what did not pass through a torch function: there is no whole tensor here."""
        if func is torch.ops.aten.detach.default:
            return args[0]
        raise RuntimeError(f"{func} cannot take a tensor in shards; leave trunk='sharded' out")


_GETTERS = ("shape", "dtype", "device", "ndim", "layout", "requires_grad", "is_leaf", "grad_fn",
            "is_cuda", "is_meta", "is_sparse", "is_nested", "_version", "grad")  # fmt: skip
_QUESTIONS = {getattr(Tensor, name).__get__ for name in _GETTERS} | {
    Tensor.size, Tensor.dim, Tensor.numel, Tensor.nelement, Tensor.element_size, Tensor.__len__,
    Tensor.is_floating_point, Tensor.is_complex, Tensor.__hash__, torch.is_floating_point,
    torch.is_complex, torch.numel,
}  # fmt: skip


def with_whole_tensors(func: Callable, args: tuple, kwargs: Mapping[str, Any]) -> Any:
    """The function, called with the whole of every tensor in shards."""
    sharded = [
        leaf for leaf in tree_leaves((args, dict(kwargs))) if isinstance(leaf, ShardedTensor)
    ]
    if not sharded or func in _QUESTIONS:
        return func(*args, **kwargs)
    trunk = sharded[0].trunk
    with _outside():
        wholes = trunk.whole([tensor.called for tensor in sharded])
    args, kwargs = tree_map_only(ShardedTensor, lambda t: wholes[t.called], (args, dict(kwargs)))
    return func(*args, **kwargs)


class WholeFirst(TorchFunctionMode):
    """A block whose torch functions take whole tensors before any mode around the block."""

    def __torch_function__(
        self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        """Call the function with whole tensors."""
        return with_whole_tensors(func, args, kwargs or {})


@contextmanager
def _outside() -> Iterator[None]:
    """Messages between processes know neither members nor modes of torch functions."""
    with torch._C.DisableTorchFunction(), temporarily_clear_interpreter_stack():
        yield


def _layer(name: str) -> str:
    return name.rpartition(".")[0]


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _is_divided(tensor: Tensor, mesh: Mesh) -> bool:
    """Whether a tensor is a matrix with rows for every replica."""
    if tensor.ndim < 2 or not tensor.is_floating_point():
        return False
    return (mesh.grid[1] - 1) * -(-len(tensor) // mesh.grid[1]) < len(tensor)

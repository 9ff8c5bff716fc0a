"""The trunk of a network: what depends on inputs and frozen shared tensors alone.

`divide` follows a network by `torch.export` and cuts the recorded graph in two: the trunk, which
turns inputs into features, and the rest, which turns features into outputs. Features of a data
point never change in training, so `fit(cache=True)` computes them once for all epochs.

`vmap` and loops of members need no such graph: they compute the trunk once per batch anyway.
"""

import operator
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node

from shoal.core.errors import ConfigError, first_line
from shoal.core.structure import Inputs, Structured
from shoal.engine.members.group import Group
from shoal.engine.members.layers import member_linear
from shoal.engine.members.network_call import member_call, set_output
from shoal.engine.members.stack import filled

__all__ = ["Trunk", "divide"]


@dataclass(frozen=True)
class Trunk:
    """The part of a network that no member changes.

    Attributes:
        graph: computes the features of `size` data points, from frozen tensors and inputs.
        names: names of the frozen tensors that the graph takes.
        size: number of data points of one call.
        group: the members, with the rest of the network; their tensors are those of the whole.
    """

    graph: GraphModule
    names: list[str]
    size: int
    group: Group

    @torch.no_grad()
    def features(self, group: Group, x: Inputs) -> tuple[Tensor, ...]:
        """Features [B, ...] of a batch, in the type of the group's arithmetic."""
        shared = group.shared_as_computed()
        tensors = [shared[name] for name in self.names]
        parts = []
        for start in range(0, len(x), self.size):
            rows = _rows(group.as_computed(x[start : start + self.size]), self.size)
            parts.append(self.graph(*tensors, *_leaves(rows)))
        return tuple(torch.cat(column)[: len(x)] for column in zip(*parts, strict=True))


def divide(group: Group, x: Inputs, sizes: Sequence[int]) -> Trunk:
    """Cut a network where its first private tensor acts.

    Args:
        group: the members, in training mode.
        x: some inputs, to follow the network on.
        sizes: numbers of data points of the batches to come.
    """
    # A network may compute with its batch size, so every size is followed; the one more shows
    # which features have one row per data point.
    cuts = {size: _Cut(group, _rows(x, size)) for size in {*sizes, max(sizes) + 1}}
    first, other = cuts[max(sizes)], cuts[max(sizes) + 1]
    for a, b in zip(first.shapes, other.shapes, strict=True):
        if not a or a[0] != max(sizes) or b != (a[0] + 1, *a[1:]):
            raise ConfigError(
                "the features that members share do not have one row per data point, so they "
                "cannot be cached; leave cache out"
            )
    graph, names = first.trunk()
    if not names:
        raise ConfigError(
            "nothing can be cached, since private or trained tensors act on the inputs directly; "
            "leave cache out"
        )
    rest = _Rest({size: cuts[size] for size in sizes})
    set_output(rest, group.skeleton.__dict__.get("_shoal_output"))
    behind = replace(
        group, prototype=rest, skeleton=rest, in_evaluation=frozenset(),
        shared={name: t for name, t in group.shared.items() if name in rest.names},
        keys=[key for key in group.keys if key in rest.names],
        _proven={}, _embedded={}, _seen=set(), _whole=[], _lowered={},
    )  # fmt: skip
    return Trunk(graph, names, max(sizes), behind)


def _rows(x: Inputs, count: int) -> Inputs:
    """Some inputs, repeated or cut to this number."""
    return x if len(x) == count else x[torch.arange(count, device=x.device) % len(x)]


class _Cut:
    """A recorded network, and which of its values are features.

    Attributes:
        program: the network as `torch.export` recorded it.
        sources: the tensor's name behind each of the graph's first inputs.
        kinds: what each value depends on.
        frontier: features that the rest of the network reads, in order.
    """

    def __init__(self, group: Group, x: Inputs) -> None:
        self.program = _followed(group, x)
        signature = self.program.graph_signature
        names = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}
        self.nodes: list[Node] = list(self.program.graph_module.graph.nodes)
        self.sources = {
            node: names[node.name].removeprefix("module.")
            for node in self.nodes
            if node.name in names
        }
        frozen = {name for name, t in group.shared.items() if not t.requires_grad}
        self.kinds = _kinds(self.nodes, self.sources, frozen)
        self.frontier = [node for node in self.nodes if self._is_read(node)]

    def _is_read(self, node: Node) -> bool:
        return self.kinds[node] == FEATURE and any(
            self.kinds[user] == PRIVATE for user in node.users
        )

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """Shapes of the features."""
        return [tuple(node.meta["val"].shape) for node in self.frontier]

    def trunk(self) -> tuple[GraphModule, list[str]]:
        """The graph from frozen tensors and inputs to the features, and names of the tensors."""
        graph, made = Graph(), {}
        for node in self.nodes:
            if self.kinds[node] != PRIVATE:
                made[node] = graph.node_copy(node, lambda old: made[old])
        graph.output(tuple(made[node] for node in self.frontier))
        graph.eliminate_dead_code()
        names = []
        for node in self.sources:
            if node in made and made[node].users:
                names.append(self.sources[node])
            elif node in made:
                graph.erase_node(made[node])
        return GraphModule(self.program.graph_module, graph), names

    def rest(self) -> tuple[GraphModule, list[str]]:
        """The graph from tensors and features to the outputs, and names of the tensors."""
        graph, made, needed = Graph(), {}, self._needed()
        tensors = [node for node in self.sources if node in needed]
        for node in tensors:
            made[node] = graph.placeholder(node.name)
        for node in self.frontier:
            made[node] = graph.placeholder(f"feature_{node.name}")
        for node in self.nodes:
            if node.op == "output":
                graph.output(made[node.args[0][0]])  # pyright: ignore
            elif node in needed and node not in made:
                copy = made[node] = graph.node_copy(node, lambda old: made[old])
                if node.target is torch.ops.aten.linear.default:
                    copy.target = member_linear
        return GraphModule(self.program.graph_module, graph), [self.sources[n] for n in tensors]

    def _needed(self) -> set[Node]:
        """The nodes that compute the outputs, given the features."""
        needed: set[Node] = set()
        for node in reversed(self.nodes):
            wanted = node.op == "output" or (_writes(node) and self.kinds[node] == PRIVATE)
            if (wanted or node in needed) and node not in self.frontier:
                needed.update([node, *node.all_input_nodes])
        return needed - set(self.frontier)


def _followed(group: Group, x: Inputs) -> Any:
    """The network of the first member, recorded on a batch."""
    first = {name: tensor.detach().clone() for name, tensor in group.first_member().items()}
    keys = {n: torch.zeros((), dtype=torch.int64, device=x.device) for n in group.keys}
    x = group.taken(x)
    module = _Called(filled(group.skeleton, first | keys), x)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the recorder, about its own future
            return torch.export.export(module, (tuple(_leaves(x)),), strict=False)
    except Exception as error:
        raise ConfigError(
            f"the network cannot be followed to cache what members share: {first_line(error)}; "
            f"leave cache out"
        ) from error


class _Called(nn.Module):
    """A network as a function of its input tensors."""

    def __init__(self, module: nn.Module, like: Inputs) -> None:
        super().__init__()
        self.module, self.like = module, like

    def forward(self, leaves: Sequence[Tensor]) -> Tensor:
        x: Any = leaves[0]
        if isinstance(self.like, Structured):
            x = Structured(dict(zip(self.like.tensors, leaves, strict=True)), self.like.form)
        return member_call(self.module, x)


def _leaves(x: Inputs) -> list[Tensor]:
    if isinstance(x, Tensor):
        return [x]
    if isinstance(x, Structured):
        return list(x.tensors.values())
    raise ConfigError(
        f"a batch object of type {type(x.original()).__name__} cannot be cached; leave cache out"
    )


CONSTANT, FEATURE, PRIVATE = 0, 1, 2
"""What a value depends on: frozen tensors alone; inputs too; private or trained tensors too."""

_RANDOM = ("rand", "dropout", "bernoulli", "normal", "multinomial", "poisson", "rrelu")


def _kinds(nodes: list[Node], sources: dict[Node, str], frozen: set[str]) -> dict[Node, int]:
    kinds: dict[Node, int] = {}
    for node in nodes:
        if node.op == "placeholder":
            own = CONSTANT if sources.get(node) in frozen else PRIVATE
            kinds[node] = own if node in sources else FEATURE
        elif node.op == "output" or _is_random(node):
            kinds[node] = PRIVATE
        else:
            kinds[node] = max([kinds[each] for each in node.all_input_nodes], default=CONSTANT)
            if _writes(node) and kinds[node] == PRIVATE:
                kinds[node.all_input_nodes[0]] = PRIVATE
    return kinds


def _is_random(node: Node) -> bool:
    name = str(node.target)
    if "dropout" in name and node.args[-1] is False:
        return False
    if "attention" in name:
        dropout: Any = node.kwargs.get("dropout_p") or (node.args[4:5] or (0,))[0]
        return bool(dropout)
    return any(word in name for word in _RANDOM) and "normalize" not in name and "_norm" not in name


def _writes(node: Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return bool(schema is not None and schema.is_mutable)


class _Rest(nn.Module):
    """The part of a network behind its features, with the parameters' names of the whole.

    Attributes:
        names: names of the tensors that it uses.
    """

    def __init__(self, cuts: Mapping[int, _Cut]) -> None:
        super().__init__()
        rests = {size: cut.rest() for size, cut in cuts.items()}
        self.names = next(iter(rests.values()))[1]
        self.__dict__["_graphs"] = {size: graph for size, (graph, _) in rests.items()}
        program = next(iter(cuts.values())).program
        tensors = dict(program.named_parameters()) | dict(program.named_buffers())
        for name in self.names:
            _place(self, name, tensors[f"module.{name}"])

    def forward(self, *features: Tensor) -> Tensor:
        """Outputs from features."""
        tensors = (operator.attrgetter(name)(self) for name in self.names)
        return self.__dict__["_graphs"][len(features[0])](*tensors, *features)


def _place(module: nn.Module, name: str, tensor: Tensor) -> None:
    """Register a parameter or buffer under a dotted name."""
    *owners, last = name.split(".")
    for owner in owners:
        if owner not in module._modules:
            module.add_module(owner, nn.Module())
        module = module.get_submodule(owner)
    if isinstance(tensor, nn.Parameter):
        blank = torch.empty_like(tensor, device="meta")
        module.register_parameter(last, nn.Parameter(blank, requires_grad=tensor.requires_grad))
    else:
        module.register_buffer(last, torch.empty_like(tensor, device="meta"))

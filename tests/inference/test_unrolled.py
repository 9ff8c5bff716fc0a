"""An ensemble as one ordinary module: equal outputs, shared tensors once, computed once."""

import torch
from torch import nn

from shoal.inference import adapters
from shoal.inference.ensemble import Ensemble
from shoal.inference.unrolled import UnrolledEnsemble


class Trunk(nn.Module):
    """A trunk with a buffer, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(5, 16)
        self.register_buffer("shift", torch.randn(16))
        self.head = nn.Linear(16, 3)

    def forward(self, x):
        return self.head(torch.relu(self.trunk(x) + self.shift))


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(3, 2), nn.Linear(4, 2)

    def forward(self, left, right):
        return {"logits": self.left(left) + self.right(right)}


def convolutional() -> nn.Module:
    layers = [nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 3)]
    return nn.Sequential(*layers)


def exported(module, *inputs):
    batch = torch.export.Dim("batch")
    shapes = {"positional": tuple({0: batch} for _ in inputs)}
    return torch.export.export(module, inputs, dynamic_shapes=shapes)


def count(program, word):
    return sum(word in str(n.target) for n in program.graph.nodes if n.op == "call_function")


def test_the_module_gives_the_outputs_of_the_ensemble():
    mixed = Ensemble.init(
        [(convolutional, 2), (lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 3)), 1)]
    )
    x = torch.randn(6, 1, 8, 8)
    module = mixed.as_module()
    assert len(module.members) == 3 and not module.training
    torch.testing.assert_close(module(x), mixed(x))
    assert {p.data_ptr() for p in module.parameters()}.isdisjoint(
        t.data_ptr() for t in mixed.weights.values()
    )


def test_a_network_of_several_inputs_is_called_as_itself():
    ensemble = Ensemble.init(Pair, members=2)
    left, right = torch.randn(5, 3), torch.randn(5, 4)
    module = ensemble.as_module()
    expected = torch.stack([ensemble.member(i)(left, right)["logits"] for i in range(2)])
    torch.testing.assert_close(module(left, right), expected)
    torch.testing.assert_close(module(left=left, right=right), expected)


def test_a_shared_trunk_is_held_once_and_computed_once():
    ensemble = Ensemble.init(adapters.last_layer(Trunk()), members=4)
    module, x = ensemble.as_module(), torch.randn(6, 5)
    torch.testing.assert_close(module(x), ensemble(x))
    assert len(list(module.parameters())) == 2 + 4 * 2
    program = exported(module, x)
    assert count(program, "linear") == 1 + 4
    more = torch.randn(9, 5)
    torch.testing.assert_close(program.module()(more), ensemble(more))


def test_the_trunk_stays_one_after_a_move():
    module = Ensemble.init(adapters.last_layer(Trunk()), members=3).as_module().double()
    first, second, *_ = module.members
    assert (
        first.trunk.weight is second.trunk.weight
        and module(torch.ones(2, 5).double()).shape[0] == 3
    )


def test_a_graph_of_convolutions_keeps_the_batch_free():
    ensemble = Ensemble.init(convolutional, members=3)
    program = exported(ensemble.as_module(), torch.randn(4, 1, 8, 8))
    for size in (1, 7):
        x = torch.randn(size, 1, 8, 8)
        torch.testing.assert_close(program.module()(x), ensemble(x))


def test_adapters_are_merged_into_their_layers():
    encoder = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    network = nn.Sequential(encoder, nn.Flatten(), nn.Linear(24, 3))
    x = torch.randn(5, 3, 8)
    for build in (adapters.lora(network, rank=2), adapters.scale(network)):
        ensemble = Ensemble.init(build, members=3)
        module = ensemble.as_module(merge=True)
        names = [name for name, _ in module.named_parameters()]
        assert not any(word in name for name in names for word in ("lora", "scale", "parametriz"))
        assert isinstance(module.members[0][0].linear1, nn.Linear)
        torch.testing.assert_close(module(x), ensemble(x), rtol=1e-5, atol=1e-5)


def test_some_members_alone():
    ensemble = Ensemble.init(lambda: nn.Linear(3, 2), members=4)
    x = torch.randn(5, 3)
    torch.testing.assert_close(UnrolledEnsemble(ensemble.groups, [3, 1])(x), ensemble(x)[[1, 3]])


def test_a_private_step_that_writes_into_the_trunk_is_not_shared():
    class Writes(Trunk):
        def forward(self, x):
            features = self.trunk(x)
            features += self.head.weight.sum()
            return self.head(features)

    ensemble = Ensemble.init(adapters.last_layer(Writes()), members=3)
    x = torch.randn(4, 5)
    expected = torch.stack([ensemble.member(i)(x) for i in range(3)])
    torch.testing.assert_close(ensemble.as_module()(x), expected)

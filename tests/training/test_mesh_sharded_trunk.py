"""A shared trunk in shards trains as one process does, and takes the memory of its shards."""

import json
import warnings

import pytest
import sharded_trunk_cases as cases
import torch
from mesh_cases import members, together, vectors
from sharded_trunk_cases import Tall, result
from torch import nn

import shoal
from shoal.core.errors import ConfigError
from shoal.core.storage.files import read_tensors
from shoal.engine.members.sharded_trunk import ShardedTensor, TrunkShards, WholeFirst
from shoal.engine.processes.mesh import Mesh
from shoal.training.members.shards import check_trunk
from shoal.training.options.noise import add_shared_noise
from shoal.training.options.options import Options

pytestmark = pytest.mark.usefixtures("warm")

FEW = ("frozen", "trained", "trained, svgd", "trained, forde", "noise", "adapters", "convolutions")


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """Every case on two replicas; runs that stop here, and runs that one process stopped."""
    out = tmp_path_factory.mktemp("pair")
    for name in cases.RESUMED:
        cases.stopped(name, out / f"from one {name}")
    return together(2, out, "1x2", *cases.CASES, script=cases.__file__)


@pytest.fixture(scope="module")
def square(tmp_path_factory):
    """Some cases with 3 + 2 members, two replicas each."""
    return together(4, tmp_path_factory.mktemp("square"), "2x2", *FEW, script=cases.__file__)


@pytest.fixture(scope="module")
def row(tmp_path_factory):
    """Some cases on four replicas: 5 rows cannot be divided, 7 rows are 2 + 2 + 2 + 1."""
    return together(4, tmp_path_factory.mktemp("row"), "1x4", *FEW, script=cases.__file__)


@pytest.fixture(scope="module")
def alone():
    """The result of one process, computed once a case."""
    known = {}

    def get(name):
        if name not in known:
            known[name] = result(cases.trained(name))
        return known[name]

    return get


def check_same(out, name, expected, processes):
    for rank in range(processes):
        found = read_tensors(out / f"{name}-{rank}.safetensors")
        assert found.keys() == expected.keys()
        for key, tensor in expected.items():
            torch.testing.assert_close(found[key], tensor, rtol=0, atol=1e-12, equal_nan=True)


@pytest.mark.parametrize("name", cases.CASES)
def test_two_replicas_train_as_one_process(pair, alone, name):
    tensors, rows = alone(name)
    check_same(pair, name, tensors, 2)
    found = json.loads((pair / f"{name}-1.json").read_text())
    assert found["received"]["trunk"] > 0
    assert [row["loss"] for row in found["rows"]] == pytest.approx(
        [row["loss"] for row in rows], rel=1e-5
    )


@pytest.mark.nightly
@pytest.mark.parametrize("name", FEW)
def test_members_and_replicas_train_as_one_process(square, alone, name):
    check_same(square, name, alone(name)[0], 4)


@pytest.mark.nightly
@pytest.mark.parametrize("name", FEW)
def test_four_replicas_train_as_one_process(row, alone, name):
    check_same(row, name, alone(name)[0], 4)


@pytest.mark.parametrize("name", cases.RESUMED)
def test_one_process_goes_on_with_a_trunk_in_shards(pair, alone, name):
    found, _ = result(cases.resumed(name, pair / f"for one {name}"))
    for key, tensor in alone(name)[0].items():
        torch.testing.assert_close(found[key], tensor, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", cases.RESUMED)
def test_a_trunk_in_shards_goes_on_with_a_run_of_one_process(pair, alone, name):
    check_same(pair, f"from one {name}", alone(name)[0], 2)


def test_a_folder_holds_the_whole_trunk(pair):
    build = {"frozen": lambda: cases.Deep(frozen=True), "trained": cases.Deep}
    for name in cases.RESUMED:
        run = shoal.load(pair / f"for one {name}", build=build[name])
        assert run.ensemble.shared["trunk.0.weight"].shape == (5, 6)


@pytest.mark.parametrize(
    "processes, fixture", [(2, "pair"), pytest.param(4, "row", marks=pytest.mark.nightly)]
)
def test_a_process_holds_its_shards_and_two_layers(request, processes, fixture):
    out = request.getfixturevalue(fixture)
    layer = Tall.WIDTH**2 * 8
    for rank in range(processes):
        found = json.loads((out / f"memory-{rank}.json").read_text())
        assert found["shard"] == layer // processes
        # The layer in use and the next one; the network library may keep the last one for a moment.
        assert 2 * layer <= found["peak"] <= 3 * layer < Tall.LAYERS * layer


class Fake(Mesh):
    """A mesh of two replicas whose other half is here."""

    def __init__(self, place=0):
        super().__init__(3, (1, 2), place, (None, None, None))
        self.wholes = {}

    def gather_shards(self, own, total, kind="trunk"):
        whole = self.wholes[own.data_ptr()]
        return type("Here", (), {"wait": lambda _: whole.clone(), "_buffer": whole})()


def passing(tensor):
    """A pass that shows this tensor, as the first of two replicas has it."""
    mesh = Fake()
    shards = TrunkShards(mesh, {"layer.weight": tensor.shape})
    own = shards.own("layer.weight", tensor)
    mesh.wholes[own.data_ptr()] = tensor
    return shards.passing({"layer.weight": own})


def test_a_tensor_in_shards_knows_its_shape_and_gives_whole_results():
    weight = torch.randn(4, 3)
    with passing(weight) as shared:
        tensor = shared["layer.weight"]
        assert isinstance(tensor, ShardedTensor)
        assert tensor.shape == (4, 3) and len(tensor) == 4 and tensor.dtype == weight.dtype
        torch.testing.assert_close(nn.functional.linear(torch.ones(2, 3), tensor),
                                   weight.sum(1).expand(2, 4))  # fmt: skip
        torch.testing.assert_close(torch.cat([tensor, tensor]), weight.repeat(2, 1))
        torch.testing.assert_close(tensor.T, weight.T)


def test_a_mode_around_a_block_sees_whole_tensors():
    class Seen(torch.overrides.TorchFunctionMode):
        kinds: list

        def __torch_function__(self, func, types, args=(), kwargs=None):
            if func is nn.functional.linear:
                self.kinds = [type(arg) for arg in args]
            return func(*args, **(kwargs or {}))

    with passing(torch.randn(4, 3)) as shared, Seen() as seen, WholeFirst():
        nn.functional.linear(torch.ones(2, 3), shared["layer.weight"])
    assert seen.kinds == [torch.Tensor, torch.Tensor]


def test_an_operation_below_torch_functions_is_refused():
    with (
        passing(torch.randn(4, 3)) as shared,
        torch._C.DisableTorchFunction(),
        pytest.raises(RuntimeError, match="trunk"),
    ):
        torch.sin(shared["layer.weight"])


def test_shards_get_their_part_of_the_noise_of_the_whole():
    whole = [torch.zeros(3, 5), torch.zeros(7, 3)]

    def noisy(tensors, shares=None):
        for tensor in tensors:
            tensor.grad = torch.zeros_like(tensor)
        optimizer = torch.optim.SGD(tensors, lr=0.1)
        add_shared_noise(tensors, 2, optimizer, 0.5, 0, 3, shares)
        return [tensor.grad for tensor in tensors]

    first, second = noisy(whole)
    parts = noisy([torch.zeros(1, 5), torch.zeros(3, 3)], [(15, 5), (21, 12)])
    assert torch.equal(parts[0], first[1:2]) and torch.equal(parts[1], second[4:7])


def refused(mesh, ensemble, **options):
    with pytest.raises(ConfigError) as refusal:
        check_trunk(mesh, ensemble, Options(trunk="sharded", **options))
    return str(refusal.value)


def test_a_trunk_that_cannot_be_in_shards_is_refused():
    deep = cases.deep()
    assert "mesh=" in refused(None, deep)
    assert "no matrix" in refused(Fake(), members())
    pair = [(cases.Deep, 2), (Tall, 2)]
    assert "one architecture" in refused(Fake(), members(pair, shared=("trunk.*",)))
    assert "cache" in refused(Fake(), deep, cache=True)
    assert "memory" in refused(Fake(), deep, memory="1GiB")
    check_trunk(Fake(), deep, Options(trunk="sharded"))
    with pytest.raises(ConfigError, match="sharded"):
        Options(trunk="halved")


def test_one_process_has_nothing_to_divide():
    with warnings.catch_warnings(), pytest.raises(ConfigError, match="mesh="):
        warnings.simplefilter("error")
        shoal.fit(cases.deep(), vectors(), steps=1, trunk="sharded", progress=False)

"""Several processes train one ensemble exactly as one process does (gloo, real processes)."""

import json
import math

import mesh_cases
import pytest
import torch
from mesh_cases import predicted_bytes, received_bytes, started, together

import shoal
from shoal.core.errors import ConfigError
from shoal.core.storage.files import read_tensors
from shoal.engine.processes.groups import layout_of, shares
from shoal.engine.processes.mesh import Mesh

pytestmark = pytest.mark.usefixtures("warm")


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """Every case in two processes, with 4 + 3 members; and runs to resume."""
    out = tmp_path_factory.mktemp("two")
    for name in mesh_cases.RESUMED:
        mesh_cases.stopped(name, out / f"from one {name}")
    return together(2, out)


@pytest.fixture(scope="module")
def four(tmp_path_factory):
    """The methods in four processes, with 2 + 2 + 2 + 1 members."""
    names = [*mesh_cases.METHODS, "frozen, svgd", "mixed architectures", "diverged"]
    return together(4, tmp_path_factory.mktemp("four"), "-", *names)


DIVIDED = ("ensemble", "kde", "svgd", "f-kde", "f-svgd", "forde", "batch norm", "batch norm, loop",
           "batch norm, forde", "batch norm, forde, loop", "dropout", "dropout, f-svgd",
           "dropout, forde", "normalised images", "normalised images, forde", "learned noise",
           "shared trunk, svgd", "function-space prior", "diverged", "frozen", "frozen, forde",
           "mixed architectures", "fraction", "validation")  # fmt: skip
REPEATED = ("sequence first", "own buffer", "mixed rows", "adversarial", "points", "chunks",
            "augmentation by member", "batch norm, fraction", "own batches",
            "own batches, f-kde", "folds", "placebo, f-kde")  # fmt: skip


@pytest.fixture(scope="module")
def grid(tmp_path_factory):
    """Two processes along members, each with a replica that runs the other half of the batch."""
    return together(4, tmp_path_factory.mktemp("grid"), "2x2", *DIVIDED, *REPEATED)


@pytest.fixture(scope="module")
def alone():
    """The result of one process, computed once a case."""
    known = {}

    def get(name):
        if name not in known:
            known[name] = mesh_cases.result(mesh_cases.trained(name))
        return known[name]

    return get


def flat(row):
    """A history row without lists."""
    losses = {f"member {i}": loss for i, loss in enumerate(row["member_loss"])}
    losses |= {f"validation {name}": value for name, value in row.get("validation", {}).items()}
    losses |= {f"fold {i}": loss for i, loss in enumerate(row.get("member_validation", []))}
    nested = "member_loss", "validation", "member_validation"
    row = {k: v for k, v in row.items() if k not in nested} | losses
    return {key: math.nan if value is None else value for key, value in row.items()}


def check_same(out, name, expected, processes):
    tensors, rows = expected
    for rank in range(processes):
        found = read_tensors(out / f"{name}-{rank}.safetensors")
        assert found.keys() == tensors.keys()
        for key, tensor in tensors.items():
            torch.testing.assert_close(found[key], tensor, rtol=0, atol=1e-12, equal_nan=True)
        history = json.loads((out / f"{name}-{rank}.json").read_text())["rows"]
        assert len(history) == len(rows)
        for mine, row in zip(history, rows, strict=True):
            assert flat(mine) == pytest.approx(flat(row), rel=1e-5, abs=1e-8, nan_ok=True)


@pytest.mark.parametrize("name", mesh_cases.CASES)
def test_two_processes_train_as_one(two, alone, name):
    check_same(two, name, alone(name), 2)


@pytest.mark.nightly
@pytest.mark.parametrize(
    "name", [*mesh_cases.METHODS, "frozen, svgd", "mixed architectures", "diverged"]
)
def test_four_processes_train_as_one(four, alone, name):
    check_same(four, name, alone(name), 4)


@pytest.mark.parametrize("name", [*DIVIDED, *REPEATED])
def test_replicas_train_as_one(grid, alone, name):
    check_same(grid, name, alone(name), 4)
    received = json.loads((grid / f"{name}-0.json").read_text())["received"]
    assert ("batch" in received) == (name in DIVIDED)
    assert ("statistics" in received) == (name in DIVIDED and "norm" in name)


@pytest.mark.parametrize("rank, members", [(0, 4), (3, 3)])
def test_replicas_receive_the_sums_of_normalised_layers(grid, rank, members):
    received = json.loads((grid / f"batch norm-{rank}.json").read_text())["received"]
    sums = 2 * (2 * 5 + 1)  # of five channels and a count, forward and backward
    assert received["statistics"] == mesh_cases.STEPS * members * sums * 8


def test_a_lost_process_stops_the_others_with_one_sentence(tmp_path):
    assert started(2, tmp_path, "killed").returncode != 0
    lost = json.loads((tmp_path / "lost.json").read_text())
    assert lost["status"] == 75 and "resume=True" in lost["said"] and "\n" not in lost["said"]


def test_torchrun_restarts_a_run_that_lost_a_process(tmp_path, alone):
    for attempt in range(3):
        out = tmp_path / str(attempt)
        out.mkdir()
        done = started(2, out, "killed", restarts=1)
        if "ProcessLookupError" not in done.stderr:
            break  # or torchrun fell over a process that ended when it was to be ended
    assert done.returncode == 0, done.stderr[-3000:]
    tensors, _ = alone("f-svgd")
    for rank in range(2):
        for key, found in read_tensors(out / f"f-svgd-{rank}.safetensors").items():
            torch.testing.assert_close(found, tensors[key], rtol=0, atol=1e-10)


@pytest.mark.parametrize("name", mesh_cases.RESUMED)
def test_a_signal_at_one_process_stops_all_and_the_run_goes_on(two, alone, name):
    check_same(two, f"here {name}", alone(name), 2)


@pytest.mark.parametrize("name", mesh_cases.RESUMED)
def test_one_process_goes_on_with_a_run_of_two(two, alone, name):
    run = mesh_cases.resumed(name, two / f"for one {name}")
    tensors, _ = alone(name)
    for key, tensor in mesh_cases.result(run)[0].items():
        torch.testing.assert_close(tensor, tensors[key], rtol=0, atol=1e-10)


@pytest.mark.parametrize("name", mesh_cases.RESUMED)
def test_two_processes_go_on_with_a_run_of_one(two, alone, name):
    check_same(two, f"from one {name}", alone(name), 2)


@pytest.mark.parametrize("where", ["here", "from one"])
def test_the_first_process_logs_every_epoch_once(two, alone, where):
    _, rows = alone("learned noise")
    lines = (two / f"{where} learned noise" / "logs" / "history.csv").read_text().splitlines()
    assert [line.split(",")[0] for line in lines] == ["step", *(str(row["step"]) for row in rows)]


def test_a_folder_of_several_processes_loads_like_any_other(two, alone):
    name = "learned noise"
    run = shoal.load(two / f"here {name}", build=mesh_cases._regressor)
    tensors, rows = alone(name)
    assert len(run.history) == len(rows)
    for key, tensor in run.ensemble.state.items():
        torch.testing.assert_close(tensor.double(), tensors[key], rtol=0, atol=1e-10)
    snapshots = sorted(path.name for path in (two / f"here {name}" / "trajectory").iterdir())
    assert snapshots == [f"epoch-{epoch:06d}.safetensors" for epoch in (0, 1, 2)]


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("name", mesh_cases.TRAFFIC)
def test_the_bytes_of_a_step_are_those_predicted(two, name, rank):
    assert received_bytes(two, name, rank) == predicted_bytes(name, 2, rank)


def test_shares_are_consecutive_and_differ_by_one_at_most():
    for total in range(1, 12):
        for parts in range(1, total + 1):
            found = shares(total, parts)
            assert [i for each in found for i in range(total)[each]] == list(range(total))
            sizes = [each.stop - each.start for each in found]
            assert max(sizes) - min(sizes) <= 1 and sizes == sorted(sizes, reverse=True)


@pytest.mark.parametrize("typed", ["2", "x", "2x2x1", "axb", "0x2", "-1x2"])
def test_a_mesh_that_is_no_grid_is_refused(typed):
    with pytest.raises(ConfigError, match="members x data"):
        layout_of(typed, 4, 2)


def test_a_mesh_of_another_size_says_what_to_type():
    with pytest.raises(ConfigError, match="--nproc-per-node=4"):
        layout_of("2x2", 4, 2)
    with pytest.raises(ConfigError, match="at most 2"):
        layout_of("4x1", 2, 4)


def test_one_process_has_no_mesh():
    assert Mesh.current(5) is None
    with pytest.raises(ConfigError, match="torchrun"):
        Mesh.current(5, "2x1")

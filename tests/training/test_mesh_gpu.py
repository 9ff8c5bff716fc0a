"""Two processes share one GPU (by gloo, since NCCL wants a GPU each) and train as one process does.

Every exchange of a mesh and of a trunk in shards then carries tensors of the device.
"""

import sys
from pathlib import Path

import mesh_cases
import pytest
import sharded_trunk_cases
import torch
from mesh_cases import together
from triton_ready import needs_gpu

from shoal.core.storage.files import read_tensors, write_tensors

MEMBERS = ("ensemble", "kde", "svgd", "f-kde", "forde", "own batches, f-kde", "batch norm")
TRUNK = ("trained", "trained, svgd", "adapters", "convolutions")


@pytest.fixture(scope="module")
def one_gpu(tmp_path_factory):
    """Every case in two processes on one device."""
    return together(2, tmp_path_factory.mktemp("gpu"), script=__file__)


@needs_gpu
@pytest.mark.parametrize("case", [*(("2x1", n) for n in MEMBERS), *(("1x2", n) for n in TRUNK)])
def test_two_processes_on_one_gpu_train_as_one_process(one_gpu, case):
    cases = mesh_cases if case[0] == "2x1" else sharded_trunk_cases
    expected = cases.result(cases.trained(case[1], device="cuda"))[0]
    for rank in range(2):
        found = read_tensors(one_gpu / f"{'-'.join(case)}-{rank}.safetensors")
        assert found.keys() == expected.keys()
        torch.testing.assert_close(
            found, {name: tensor.cpu() for name, tensor in expected.items()}, rtol=1e-8, atol=1e-10
        )


def main(out):
    """Train every case on the device, and write what came of it."""
    torch.distributed.init_process_group("gloo")
    rank, device = torch.distributed.get_rank(), "cuda:0" if torch.cuda.is_available() else "cpu"
    for name in MEMBERS:
        run = mesh_cases.trained(name, "2x1", device=device)
        write(Path(out) / f"2x1-{name}-{rank}.safetensors", mesh_cases.result(run)[0])
    for name in TRUNK:
        run = sharded_trunk_cases.trained(name, mesh="1x2", trunk="sharded", device=device)
        write(Path(out) / f"1x2-{name}-{rank}.safetensors", sharded_trunk_cases.result(run)[0])
    torch.distributed.destroy_process_group()


def write(path, tensors):
    write_tensors(path, {name: tensor.cpu() for name, tensor in tensors.items()})


if __name__ == "__main__":
    main(*sys.argv[1:])

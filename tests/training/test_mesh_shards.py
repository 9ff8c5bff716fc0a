"""Runs on several processes write shards, and go on with any other number of processes."""

import json
import sys
from pathlib import Path

import pytest
import torch
from lost_processes import on

import shoal
from shoal.core.storage.checkpoints import steps
from shoal.training.folder.run import RunFolder

pytestmark = pytest.mark.usefixtures("warm")

WORKER = Path(__file__).with_name("shards_worker.py")
STEPS = 6

sys.path.append(str(WORKER.parent))
from shards_worker import CASES, train  # noqa: E402


def format_of(folder):
    newest = folder / "checkpoints" / f"step-{steps(folder / 'checkpoints')[-1]:09d}"
    return json.loads((newest / "manifest.json").read_text())["format"]


@pytest.mark.parametrize(
    ("case", "worlds"),
    [
        ("plain", (4, 2)),
        ("data", (2, 4)),
        *(
            pytest.param(case, worlds, marks=pytest.mark.nightly)
            for case, worlds in [
                ("plain", (2, 1)),
                ("plain", (1, 2)),
                ("mixed", (2, 3)),
                ("frozen", (3, 2)),
            ]
        ),
    ],
    ids=str,
)
def test_a_run_goes_on_with_another_number_of_processes(case, worlds, tmp_path):
    whole, folder = tmp_path / "whole", tmp_path / "run"
    train(case, whole, STEPS)
    for world, last in zip(worlds, (3, STEPS), strict=True):
        on(world, case, folder, last)
        assert steps(folder / "checkpoints")[-1] == last
        assert format_of(folder) == (3 if world > 1 else 2)
    one, other = (RunFolder(path).checkpoint() for path in (whole, folder))
    assert {part: set(tree) for part, tree in one.parts.items()} == {
        part: set(tree) for part, tree in other.parts.items()
    }
    for part in ("ensemble", "optimizer", "tracker"):
        for name, tensor in one.parts[part].items():
            found = other.parts[part][name]
            assert found.shape == tensor.shape and found.dtype == tensor.dtype, name
            tolerance = 1e-10 if tensor.dtype == torch.float64 else 1e-5
            torch.testing.assert_close(found, tensor, rtol=tolerance, atol=tolerance, msg=name)
    build = CASES[case][0]()
    assert shoal.load(folder, build).ensemble.members == shoal.load(whole, build).ensemble.members

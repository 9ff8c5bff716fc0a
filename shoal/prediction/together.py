"""Prediction by several processes: each runs its members, and the first gathers the outputs."""

import os
from typing import Any

import torch
from torch import Tensor

from shoal.engine.processes.mesh import Mesh
from shoal.prediction.predict import OutputBatches, OutputStore, collected, predict, training_of
from shoal.prediction.prediction_file import checked_out
from shoal.prediction.predictive import Predictive

__all__ = ["predict_together"]

_BATCH = 1024


def predict_together(
    run: Any,
    x: Any,
    *,
    device: str | torch.device | None = None,
    out: str | os.PathLike[str] | None = None,
) -> Predictive | None:
    """Predict with the members of a run, divided over the processes of the process group.

    All processes call this function with the same inputs. One process predicts as `predict` does.

    Args:
        run: the run, with all members.
        x: inputs as `predict` takes them.
        device: device of this process; None for the ensemble's device.
        out: file for the outputs, which the first process writes batch by batch.

    Returns:
        The prediction on the first process, and None on the others.
    """
    ensemble = run.ensemble
    mesh = Mesh.current(ensemble.members, device=device or ensemble.device)
    if mesh is None:
        return predict(run, x, batch_size=_BATCH, device=device, out=out)
    if mesh.place[1] > 0:
        return None  # more processes than members: another process has the same members
    own = ensemble.slice_members(mesh.own.start, mesh.own.stop)
    batches = _DividedBatches(mesh, own, x, _BATCH, device, False, *training_of(run))
    if mesh.first:
        path = None if out is None else checked_out(out)
        return collected(batches, ensemble.alive, run.likelihood, path=path)
    batches.into(_Nowhere())
    return None


class _DividedBatches(OutputBatches):
    """Outputs of all members on the first process; other processes send theirs."""

    def __init__(self, mesh: Mesh, *settings: Any) -> None:
        super().__init__(*settings)
        self.mesh = mesh

    def into(self, store: OutputStore) -> Tensor:
        finite = super().into(_Joined(self.mesh, store))
        return _joined(self.mesh, finite.cpu().to(torch.uint8)).bool()


class _Joined:
    """A store that adds the outputs of the other processes to those of this process."""

    def __init__(self, mesh: Mesh, store: OutputStore) -> None:
        self.mesh, self.store = mesh, store

    def add(self, outputs: Tensor) -> None:
        self.store.add(_joined(self.mesh, outputs.cpu()))


class _Nowhere:
    """A store that keeps nothing."""

    def add(self, outputs: Tensor) -> None:
        pass


def _joined(mesh: Mesh, own: Tensor) -> Tensor:
    """Rows of all members on the first process; other processes send theirs and keep them."""
    if not mesh.first:
        mesh.send(own)
        return own
    others = [
        mesh.receive(own.new_empty(shard.stop - shard.start, *own.shape[1:]), row)
        for row, shard in enumerate(mesh.shards)
        if row > 0
    ]
    return torch.cat([own, *others])

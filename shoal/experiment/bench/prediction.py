"""Speed of predictions: `predict`, and a plain loop over modules, for the networks of the bench."""

from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field, replace
from types import SimpleNamespace

import torch
from torch import Tensor

from shoal.engine.members.network_call import selected_output
from shoal.engine.members.precision import calculating_in
from shoal.experiment.bench.battery import LOOP, Case, Row, measure
from shoal.experiment.bench.measure import Work
from shoal.inference.likelihoods import Categorical
from shoal.prediction.predict import predict

__all__ = ["LoopPrediction", "PredictionWork", "measure_predictions"]


class PredictionWork:
    """`predict` for batches of the case's inputs; one step is one batch."""

    def __init__(self, case: Case) -> None:
        self.case, self.x = case, case.data()[0]
        self.run = SimpleNamespace(
            ensemble=case.make(), likelihood=Categorical(), config={"precision": case.precision}
        )

    def __call__(self, steps: int) -> None:
        """Predict more batches."""
        _in_turns(steps, self.x, self.case.batch_size, self.outputs)

    def outputs(self, x: Tensor) -> Tensor:
        """Outputs of all members [M, B, C] on the host."""
        return predict(self.run, x, batch_size=self.case.batch_size).members


class LoopPrediction:
    """The same members as ordinary modules, one after another, batch by batch."""

    def __init__(self, case: Case) -> None:
        self.case, self.x = case, case.data()[0]
        self.ensemble = case.make().to("cpu")
        self.modules = [self.ensemble.member(i).to(case.device) for i in range(case.members)]

    def __call__(self, steps: int) -> None:
        """Predict more batches."""
        _in_turns(steps, self.x, self.case.batch_size, self.outputs)

    def outputs(self, x: Tensor) -> Tensor:
        """Outputs of all members [M, B, C] on the host."""
        with torch.no_grad(), calculating_in(self.case.precision, self.ensemble):
            outputs = [self._batch(batch) for batch in x.split(self.case.batch_size)]
        return torch.cat(outputs, dim=1)

    def _batch(self, x: Tensor) -> Tensor:
        low = self.case.precision == "bfloat16"
        with torch.autocast(self.case.device.type, torch.bfloat16) if low else nullcontext():
            outputs = [selected_output(module, module(x)) for module in self.modules]
        stacked = torch.stack(outputs)
        return (stacked.float() if low else stacked).cpu()


def _in_turns(steps: int, x: Tensor, size: int, predicted: Callable[[Tensor], Tensor]) -> None:
    """Predict this number of batches by calls for all inputs, and a last call for some."""
    while steps > 0:
        batches = min(steps, len(x) // size)
        predicted(x[: batches * size])
        steps -= batches


@dataclass(frozen=True)
class _Entry:
    """One row of a table of predictions.

    Attributes:
        case: the network and its sizes.
        what: "shoal" or the module loop.
        made: the work, once it is built.
    """

    case: Case
    what: str = "shoal"
    made: list[PredictionWork | LoopPrediction] = field(default_factory=list)

    @property
    def label(self) -> str:
        """A label for tables."""
        return f"{self.case.network.name}, {self.what} predicts, {self.case.precision}"

    def build(self, stack: ExitStack) -> Work:
        """The work, before warm-up."""
        self.made.append((PredictionWork if self.what == "shoal" else LoopPrediction)(self.case))
        return self.made[0]

    def row(self) -> Row:
        """The columns that are known before the run."""
        case = self.case
        return {
            "model": case.network.name,
            "what": self.what,
            "members": case.members,
            "batch_size": case.batch_size,
            "weights": case.weights,
            "precision": case.precision,
            "device": str(case.device),
        }


def measure_predictions(
    case: Case, seconds: float, say: Callable[[str], None] = lambda line: None
) -> list[Row]:
    """A row for `predict` and one for the module loop, timed in turns.

    A row has milliseconds per batch, data points per second, and memory on a GPU. The row of
    `predict` has its largest deviation from the loop, relative to the largest output.
    """
    if case.device.type == "cpu" and case.precision == "bfloat16":
        case = replace(case, precision="float32")  # as `predict` computes on a CPU
    entries = [_Entry(case, LOOP), _Entry(case)]
    rows = measure(entries, seconds, say)
    for row in rows:
        if "ms" in row:
            row["points_per_second"] = 1e3 * case.batch_size / row["ms"]
    if all("ms" in row for row in rows):
        x = case.data()[0][: case.batch_size]
        wanted, predicted = (entry.made[0].outputs(x) for entry in entries)
        rows[1]["deviation"] = float((predicted - wanted).abs().max() / wanted.abs().max())
    return rows

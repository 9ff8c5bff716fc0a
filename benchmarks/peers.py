"""One training epoch of the same perceptrons, by other libraries' own functions and by Shoal.

    pip install --no-deps posteriors torchensemble uqdeepnn bayestorch
    python benchmarks/peers.py --device cpu -o docs/benchmarks/peers-cpu.json

A library that cannot be imported is left out, with the reason. Every library gets data in the form
of its own examples, and every epoch starts with untrained networks. Plain ensembles are trained
with Adam, Stein variational gradient descent with plain gradient steps.
"""

import contextlib
import importlib
import io
import logging
import math
import statistics
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from common import finish, options, parser, say, title
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from shoal.core.display.text import table
from shoal.experiment.bench.battery import random_data, reason
from shoal.experiment.bench.networks import perceptron
from shoal.inference.ensemble import Ensemble
from shoal.training.fit import fit

LR = 1e-3
ADAM, SVGD, SGD = "ensemble, Adam", "SVGD", "ensemble, SGD"


@dataclass(frozen=True)
class Task:
    """What every library trains.

    Attributes:
        members: M.
        batch_size: B.
        x: inputs [N, 784] on the device.
        y: labels [N] on the device.
    """

    members: int
    batch_size: int
    x: Tensor
    y: Tensor

    def build(self) -> nn.Module:
        """One network."""
        return perceptron().blueprint().to(self.x.device)

    def loader(self) -> DataLoader:
        """The data in the form that most libraries need."""
        return DataLoader(TensorDataset(self.x, self.y), self.batch_size, shuffle=True)


Epoch = Callable[[Task], None]


def shoal_epoch(method: str, optimizer: str) -> Epoch:
    """One epoch by `shoal.fit`."""

    def run(task: Task) -> None:
        fit(
            Ensemble.init(perceptron().blueprint, task.members), (task.x, task.y), method=method,
            optimizer=optimizer, lr=LR, epochs=1, batch_size=task.batch_size,
            device=task.x.device, progress=False,
        )  # fmt: skip

    return run


def torchensemble_voting(task: Task) -> None:
    """`VotingClassifier.fit`."""
    voting = importlib.import_module("torchensemble").VotingClassifier
    logging.getLogger().disabled = True
    model = voting(estimator=task.build(), n_estimators=task.members, cuda=task.x.is_cuda)
    model.set_optimizer("Adam", lr=LR)
    model.fit(task.loader(), epochs=1, log_interval=10**9, save_model=False)


def uqdeepnn_ensemble(task: Task) -> None:
    """`DeepEnsembleClassifier.fit`."""
    ensembles = importlib.import_module("deepuq.methods.ensembles")
    model = ensembles.DeepEnsembleClassifier([task.build() for _ in range(task.members)])
    model.fit(task.loader(), epochs=1, lr=LR)


def uqdeepnn_svgd(task: Task) -> None:
    """`SVGDWrapper.fit`."""
    svgd = importlib.import_module("deepuq.methods.svgd")
    wrapper = svgd.SVGDWrapper(task.build, n_particles=task.members, lr=LR)
    wrapper.fit(task.loader(), n_epochs=1, loss_fn=F.cross_entropy)


def bayestorch_svgd(task: Task) -> None:
    """The preconditioner `SVGD`, as in its documentation."""
    optim = importlib.import_module("bayestorch.optim")
    models = nn.ModuleList([task.build() for _ in range(task.members)])
    preconditioner = optim.SVGD(models.parameters(), _kernel, task.members)
    optimizer = torch.optim.SGD(models.parameters(), lr=LR)
    for x, y in task.loader():
        optimizer.zero_grad()
        sum(F.cross_entropy(model(x), y) for model in models).backward()
        preconditioner.step()
        optimizer.step()


def _kernel(a: Tensor, b: Tensor) -> Tensor:
    squares = torch.cdist(a, b) ** 2
    return torch.exp(-squares * math.log(len(a)) / squares.detach().median())


def posteriors_optim(task: Task) -> None:
    """`posteriors.optim`, one member after another."""
    posteriors = importlib.import_module("posteriors")
    for _ in range(task.members):
        model = task.build()
        transform = posteriors.optim.build(_loss(model), torch.optim.Adam, lr=LR)
        state = transform.init(dict(model.named_parameters()))
        for batch in task.loader():
            state, _ = transform.update(state, batch)


def posteriors_vmapped(task: Task) -> None:
    """`posteriors.sgmcmc.sgld` without noise, all members together by `torch.func.vmap`."""
    posteriors = importlib.import_module("posteriors")
    models = [task.build() for _ in range(task.members)]
    loss = _loss(models[0])

    def log_posterior(parameters: dict, batch: Any) -> tuple[Tensor, Tensor]:
        value, aux = loss(parameters, batch)
        return -value, aux

    transform = posteriors.sgmcmc.sgld.build(log_posterior, lr=LR, temperature=0.0)
    parameters, _ = torch.func.stack_module_state(models)
    state = torch.vmap(transform.init)({n: p.detach() for n, p in parameters.items()})
    update = torch.vmap(transform.update, in_dims=(0, None), randomness="different")
    for batch in task.loader():
        state, _ = update(state, batch)


def _loss(model: nn.Module) -> Callable[[dict, Any], tuple[Tensor, Tensor]]:
    def loss(parameters: dict, batch: Any) -> tuple[Tensor, Tensor]:
        x, y = batch
        outputs = torch.func.functional_call(model, parameters, (x,))
        return F.cross_entropy(outputs, y), torch.tensor([])

    return loss


RACES: dict[str, dict[str, Epoch]] = {
    ADAM: {
        "shoal": shoal_epoch("ensemble", "adam"),
        "torchensemble, VotingClassifier": torchensemble_voting,
        "uqdeepnn, DeepEnsembleClassifier": uqdeepnn_ensemble,
        "posteriors, optim": posteriors_optim,
    },
    SGD: {
        "shoal": shoal_epoch("ensemble", "sgd"),
        "posteriors, sgld without noise, vmapped": posteriors_vmapped,
    },
    SVGD: {
        "shoal": shoal_epoch("svgd", "sgd"),
        "uqdeepnn, SVGDWrapper": uqdeepnn_svgd,
        "bayestorch, SVGD": bayestorch_svgd,
    },
}


def main() -> None:
    """Time every library that can run."""
    made = parser("One training epoch of the same ensemble, by other libraries and by Shoal.")
    made.add_argument("--members", type=int, default=20)
    made.add_argument("--batch-size", type=int, default=128)
    made.add_argument("--points", type=int, help="data points per epoch (12,800; quick: 4 batches)")
    made.add_argument("--rounds", type=int, help="(3; quick: 1)")
    found = options(made)
    points = found.points or (4 * found.batch_size if found.quick else 12_800)
    x, y = random_data((784,), points, str(found.device), torch.float32)
    task = Task(found.members, found.batch_size, x, y)
    rounds = found.rounds or (1 if found.quick else 3)
    value = title(found.device)
    value["settings"] = {
        "members": task.members, "batch_size": task.batch_size, "points": points, "lr": LR,
        "rounds": rounds,
    }  # fmt: skip
    value["epochs"] = [row for name in RACES for row in race(name, task, rounds)]
    finish(value, as_text(value), found.out)


def race(name: str, task: Task, rounds: int) -> list[dict[str, Any]]:
    """Seconds per epoch of each library, timed in turns."""
    rows: list[dict[str, Any]] = [{"what": name, "library": who} for who in RACES[name]]
    for row in rows:
        row |= warm(RACES[name][row["library"]], task)
    for _ in range(rounds):
        for row in rows:
            if "error" not in row:
                row["rounds_s"].append(seconds(RACES[name][row["library"]], task))
    ours = rows[0]["rounds_s"]
    for row in rows:
        if "error" not in row:
            row["seconds"] = statistics.median(row["rounds_s"])
            pairs = zip(row["rounds_s"], ours, strict=True)
            row["shoal_is_faster_by"] = statistics.median(theirs / mine for theirs, mine in pairs)
        say(f"{name}: {row['library']}: {row.get('seconds', row.get('error'))}")
    return rows


def warm(epoch: Epoch, task: Task) -> dict[str, Any]:
    """A short epoch, to test that the library works here."""
    few = 2 * task.batch_size
    short = Task(task.members, task.batch_size, task.x[:few], task.y[:few])
    try:
        seconds(epoch, short)
    except Exception as error:
        return {"error": reason(error)}
    return {"rounds_s": []}


def seconds(epoch: Epoch, task: Task) -> float:
    """Seconds of one epoch; its output is discarded."""
    _wait(task)
    start = time.perf_counter()
    with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        epoch(task)
    _wait(task)
    return time.perf_counter() - start


def _wait(task: Task) -> None:
    if task.x.is_cuda:
        torch.cuda.synchronize()


def as_text(value: dict[str, Any]) -> str:
    """The result as text."""
    rows = value["epochs"]
    lines = [
        [f"{row['what']}: {row['library']}", f"{row['seconds']:.3g}",
         f"{row['shoal_is_faster_by']:.3g}"]
        for row in rows if "error" not in row
    ]  # fmt: skip
    skipped = [f"{row['library']} left out: {row['error']}" for row in rows if "error" in row]
    return "\n".join([table(lines, ["", "seconds per epoch", "Shoal is faster by"]), *skipped])


if __name__ == "__main__":
    main()

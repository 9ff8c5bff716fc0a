"""The cost of second derivatives: steps of FoRDE and of the plain ensemble, in several ways.

    python benchmarks/second_order.py --device cuda -o second-order.json

ResNet18 with the CIFAR stem, M = 10, batch size 128, bfloat16. Every way runs by itself. A failure
is recorded with its reason and does not stop the others. After `--seconds` no new way starts.
"""

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from attempts import Battery, captured, profile, timed
from common import finish, options, parser, title
from forde_step import (
    backward_pass,
    cotangents,
    forward_with_gradients,
    member_inputs,
    plain_gradients,
)
from torch import Tensor
from whole_graph import WholeGraph

from shoal.engine.derivatives import fast_second_order
from shoal.engine.members.member_runner import MemberRunner
from shoal.experiment.bench.battery import Case, EnsembleSteps
from shoal.experiment.bench.networks import Network
from shoal.interaction.methods import METHODS
from shoal.models.resnet import ResNet18

Step = Callable[[], list[Tensor]]


@dataclass(frozen=True)
class Way:
    """One way to compute a step.

    Attributes:
        name: name in the result.
        kind: "plain", "exact" (whole batch), "fraction" (0.25 of it) or "fraction, no norm".
        second: "torch", "single" (each layer by itself), "fused" or "whole" (one compiled graph).
        streams: number of members that run at the same time.
        graph: the step is replayed as a CUDA graph.
        compiled: networks with a first derivative only go through `torch.compile`.
        search: the library searches for its fastest convolution.
    """

    name: str
    kind: str
    second: str = "fused"
    streams: int = 4
    graph: bool = True
    compiled: bool = False
    search: bool = False


WAYS = [
    Way("plain, graph", "plain"),
    Way("plain, graph, searched", "plain", search=True),
    Way("plain without norm, graph", "plain, no norm"),
    Way("exact, fused, graph", "exact"),
    Way("exact, fused, graph, searched", "exact", search=True),
    Way("exact, fused, graph, 1 stream", "exact", streams=1),
    Way("exact, fused, graph, 10 streams", "exact", streams=10),
    Way("exact, single layers, graph", "exact", second="single"),
    Way("exact, fused, eager", "exact", graph=False),
    Way("fraction, fused, graph", "fraction"),
    Way("fraction, fused, graph, 10 streams", "fraction", streams=10),
    Way("fraction without norm, graph", "fraction, no norm"),
    Way("plain, eager", "plain", streams=1, graph=False),
    Way("exact, plain double backward, eager", "exact", second="torch", streams=1, graph=False),
    Way("plain, compiled, graph", "plain", compiled=True),
    Way("fraction, fused, compiled, graph", "fraction", compiled=True),
    Way("exact, whole, graph", "exact", second="whole"),
]


class Stage:
    """Members, a batch and axes, for steps in every way.

    Attributes:
        case: sizes and precision.
        ensemble: the members.
    """

    def __init__(self, case: Case, norm: bool) -> None:
        architecture = replace(case.network.architecture, norm="batch" if norm else None)  # pyright: ignore
        self.case = replace(case, network=replace(case.network, architecture=architecture))
        self.ensemble = self.case.make().train()
        low = case.precision == "bfloat16"
        self.ensemble.compute_in(torch.bfloat16 if low else None)
        x, y = self.case.data()
        self.x, self.y = x[: case.batch_size].clone(), y[: case.batch_size].clone()
        axes = torch.linalg.qr(torch.randn(x[0].numel(), x[0].numel(), device=x.device))[0]
        self.axes = axes * torch.logspace(0, -3, len(axes), device=x.device)

    def step(self, way: Way) -> Step:
        """A function that computes the gradients of one step."""
        once = MemberRunner("loop", streams=way.streams, compiled=way.compiled)
        if way.kind.startswith("plain"):
            return lambda: plain_gradients(self.ensemble, self.x, self.y, once)
        if way.kind == "exact":
            return self._repelled(way, slice(None))
        fraction, rest = slice(0, len(self.x) // 4), slice(len(self.x) // 4, None)
        # Batch normalisation couples the batch: the fraction runs twice. Else the batch is divided.
        driven = rest if "no norm" in way.kind else slice(None)
        repelled = self._repelled(way, fraction)

        def step() -> list[Tensor]:
            drive = plain_gradients(self.ensemble, self.x[driven], self.y[driven], once)
            return torch._foreach_add(drive, repelled())  # pyright: ignore

        return step

    def _repelled(self, way: Way, rows: slice) -> Step:
        ensemble, x, y = self.ensemble, self.x[rows], self.y[rows]
        whole = WholeGraph(ensemble, way.streams) if way.second == "whole" else None

        def step() -> list[Tensor]:
            if whole is not None:
                found = whole(member_inputs(x, ensemble.members, self._dtype), y)
            else:
                mapping = MemberRunner("loop", streams=way.streams)
                found = forward_with_gradients(ensemble, x, y, mapping, _way(way.second))
            return backward_pass(ensemble, found, cotangents(*found, y, self.axes, len(self.x)))

        return step

    @property
    def _dtype(self) -> torch.dtype:
        return self.ensemble.groups[0].compute or self.x.dtype


def _way(second: str) -> Any:
    return nullcontext() if second == "torch" else fast_second_order(fuse=second == "fused")


def timed_way(way: Way, stages: dict[bool, Stage], seconds: float) -> dict[str, Any]:
    """Time and memory of a way."""
    stage = stages["no norm" not in way.kind]
    device = stage.case.device
    torch.backends.cudnn.benchmark = way.search
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    start = time.perf_counter()
    step = stage.step(way)
    run = captured(step) if way.graph and device.type == "cuda" else step
    rounds = timed(run, device, seconds)
    peak = torch.cuda.max_memory_allocated() / 2**20 if device.type == "cuda" else None
    setup = time.perf_counter() - start - sum(rounds) / 1e3
    return {"ms": statistics.median(rounds), "rounds_ms": rounds, "memory_mib": peak,
            "setup_seconds": setup}  # fmt: skip


def errors(case: Case, members: int = 4, batch: int = 32) -> dict[str, float]:
    """Relative distance of the weight gradients from those of plain double backward in float32."""
    small = replace(case, members=members, batch_size=batch, precision="float32")
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    stage = Stage(small, norm=True)
    mapping = MemberRunner("loop")

    def gradients(second: str, dtype: torch.dtype | None, at: Any = None) -> tuple[Tensor, Any]:
        stage.ensemble.compute_in(dtype)
        found = forward_with_gradients(stage.ensemble, stage.x, stage.y, mapping, _way(second))
        at = at or cotangents(*found, stage.y, stage.axes, batch)
        found = backward_pass(stage.ensemble, found, at)
        return torch.cat([t.flatten() for t in found]), at

    # The cotangents are computed once, so only the backward passes are compared.
    exact, at = gradients("torch", None)
    result = {}
    for second in ("torch", "single", "fused"):
        for name, dtype in (("float32", None), ("bfloat16", torch.bfloat16)):
            found, _ = gradients(second, dtype, at)
            result[f"{second}, {name}"] = ((found - exact).norm() / exact.norm()).item()
    return result


def trainer_steps(case: Case, seconds: float) -> Iterator[tuple[str, Callable[[], dict]]]:
    """Steps as in `shoal.fit`, with two methods."""
    for engine in ("auto", "auto+compile"):
        for method in ("ensemble", "forde"):

            def run(method: str = method, engine: str = engine) -> dict[str, Any]:
                if method not in METHODS:
                    raise LookupError(f"there is no method called {method!r}")
                ensemble = case.make()
                ensemble.compute_in(torch.bfloat16 if case.precision == "bfloat16" else None)
                steps = EnsembleSteps(case, ensemble, method, engine)
                steps(6)
                rounds = timed(lambda: steps(1), case.device, seconds)
                return {"ms": statistics.median(rounds), "rounds_ms": rounds}

            yield f"trainer: {method}, {engine}", run


def main() -> None:
    """Time every way, then profile the best."""
    made = parser(str(__doc__).splitlines()[0])
    made.add_argument(
        "--seconds", type=float, default=230.0, help="start no new way after so many seconds"
    )
    made.add_argument("--only", default="", help="only ways with this text in their name")
    made.add_argument("--precision", default="bfloat16", help="precision of the networks")
    given = options(made)
    widths, members, batch = ((4, 6), 2, 8) if given.quick else ((64, 128, 256, 512), 10, 128)
    side = 8 if given.quick else 32
    network = Network("resnet18", ResNet18(widths), (3, side, side), members, 20)
    case = Case(network, members, batch, given.precision, "sgd", given.device, 20 * batch)
    stages = {norm: Stage(case, norm) for norm in (True, False)}
    battery, each = Battery(given.seconds), 0.1 if given.quick else 1.5
    works = [("errors", lambda: errors(case))]
    works += [(way.name, lambda way=way: timed_way(way, stages, each)) for way in WAYS]
    # The way that takes a minute to compile comes last.
    works[-1:-1] = list(trainer_steps(case, each))
    for name, work in works:
        if given.only in name:
            battery(name, work)
    report(battery, stages, given)


def report(battery: Battery, stages: dict[bool, Stage], given: Any) -> None:
    """Ratios to the best plain step of the same network, and a profile of the best exact step."""
    results = battery.results
    known = {way: results[way.name] for way in WAYS if "ms" in results.get(way.name, {})}
    base = {
        norm: min((found["ms"] for way, found in known.items()
                   if way.kind == ("plain" if norm else "plain, no norm")), default=None)
        for norm in (True, False)
    }  # fmt: skip
    for way, found in known.items():
        plain = base["no norm" not in way.kind]
        found["times_plain"] = None if plain is None else found["ms"] / plain
    exact = [way for way in known if way.kind == "exact"]
    if exact and given.device.type == "cuda":
        best = min(exact, key=lambda way: known[way]["ms"])
        battery.end = max(battery.end, time.perf_counter() + 20)
        battery("profile", lambda: {"of": best.name, "kernels": profile(stages[True].step(best))})
    lines = [f"{way.name:40s} {found['ms']:9.2f} ms  {found['times_plain'] or 0:5.2f} x"
             for way, found in known.items()]  # fmt: skip
    finish({**title(given.device), "results": results}, "\n".join(lines), given.out)


if __name__ == "__main__":
    main()

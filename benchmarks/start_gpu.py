"""Where the seconds of a start of `fit` on a GPU go, network by network, and those of a search.

    python benchmarks/start_gpu.py --within 150 -o docs/benchmarks/start-gpu.json
    python benchmarks/start_gpu.py --quick --device cpu    # a short test

Every network starts in a fresh process with an empty cache of Triton ("cold"), and in another with
the cache that the first has left ("warm disk"). Each process fits the same network twice, for eight
steps. Every phase waits for the device at its end. Phases overlap: a step contains its builds.
"""

import argparse
import functools
import importlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

BEGUN = time.perf_counter()
STEPS, MEMBERS, BATCH = 8, 5, 16
NAMES = [
    "torchvision:efficientnet_b0", "torchvision:resnet50", "transformers:bert",
    "torchvision:vit_b_32", "own:inverted", "torchvision:mobilenet_v3_large",
    "torchvision:lraspp_mobilenet_v3_large", "resnet18", "vit",
]  # fmt: skip
QUICK = ["mlp", "small-cnn"]


class Phases:
    """Seconds and calls of functions that are wrapped from outside, and every call of some."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.spent: dict[str, float] = defaultdict(float)
        self.calls: Counter[str] = Counter()
        self.each: dict[str, list[float]] = defaultdict(list)
        self.kernels: Counter[str] = Counter()
        self.forms: list[str] = []

    def restart(self) -> None:
        """Forget what was counted."""
        for kept in (self.spent, self.calls, self.each, self.kernels, self.forms):
            kept.clear()

    def wrap(
        self, owner: Any, name: str, label: str, wait: bool = True, each: bool = False
    ) -> None:
        """Count the seconds of `owner.name` under a label."""
        before = getattr(owner, name)

        @functools.wraps(before)
        def timed(*args: Any, **kwargs: Any) -> Any:
            begun = time.perf_counter()
            try:
                return before(*args, **kwargs)
            finally:
                if wait and self.device.type == "cuda" and not capturing():
                    torch.cuda.synchronize()
                taken = time.perf_counter() - begun
                self.spent[label] += taken
                self.calls[label] += 1
                if each:
                    self.each[label].append(round(taken, 3))

        setattr(owner, name, timed)

    def table(self) -> dict[str, Any]:
        """All counts, for JSON."""
        spent = {label: [round(s, 3), self.calls[label]] for label, s in self.spent.items()}
        counts = {"kernels": self.kernels.most_common(), "forms": list(self.forms)}
        return {"spent": spent, "each": dict(self.each), **counts}


def capturing() -> bool:
    """Whether a CUDA graph is being captured, within which nothing may wait."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def watch(phases: Phases) -> None:
    """Wrap the phases of a start."""
    from shoal.engine.resources.graph import CapturedSteps
    from shoal.inference.ensemble import Ensemble
    from shoal.training.loop.session import Session
    from shoal.training.loop.trainer import Trainer
    from shoal.training.mover import step_memory
    from shoal.training.search import search

    for name in ("default_likelihood", "check_targets", "look"):
        phases.wrap(
            importlib.import_module("shoal.training.fit"), name, f"before the session: {name}"
        )
    phases.wrap(Ensemble, "to", "members to the device")
    phases.wrap(Session, "_make_trainer", "trainer")
    phases.wrap(Trainer, "fit_batches", "memory plan")
    phases.wrap(step_memory, "with_activations", "memory plan: trial", each=True)
    phases.wrap(CapturedSteps, "_step", "step", each=True)
    phases.wrap(CapturedSteps, "_captured", "capture", each=True)
    phases.wrap(Session, "run", "session")
    phases.wrap(search.HeldOutData, "scores", "search: scores")
    phases.wrap(search.Search, "_restore", "search: restore")
    try:
        watch_triton(phases)
    except Exception as error:
        print(f"Triton is not watched: {error!r}", flush=True)


def watch_triton(phases: Phases) -> None:
    """Wrap the builds of kernels and of their launchers."""
    import triton
    import triton.compiler.compiler as compiler
    import triton.runtime.build as build
    from triton.runtime.jit import JITFunction

    phases.wrap(build, "_build", "Triton: C compiler", wait=False)
    phases.wrap(JITFunction, "_do_compile", "Triton: kernels", wait=False)
    phases.wrap(compiler.CompiledKernel, "_init_handles", "Triton: launchers, load", wait=False)

    def built(*args: Any, **given: Any) -> None:
        src, times = given["src"], given["times"]
        phases.kernels[f"{'hit ' if given['cache_hit'] else ''}{src.name}"] += 1
        phases.forms.append(form_of(src, given["metadata"]))
        phases.spent["Triton: own time of kernels"] += times.total / 1e6
        for stage, spent in times.lowering_stages:
            phases.spent[f"Triton: {stage}"] += spent / 1e6

    triton.knobs.compilation.listener = built


def form_of(src: Any, metadata: dict[str, Any]) -> str:
    """The name of a kernel, with types, constants and multiples of sixteen of its arguments."""
    names, parts = src.fn.arg_names, []
    multiples = {places[0] for places in src.attrs}
    for number, name in enumerate(names):
        kind = src.signature[name]
        if kind == "constexpr":
            parts.append(f"{name}={src.constants.get((number,))}")
        else:
            parts.append(f"{name}:{kind}{'%' if number in multiples else ''}")
    return f"{src.name}({', '.join(parts)}) warps {metadata.get('num_warps')}"


def profiled(call: Callable[[], Any]) -> list[str]:
    """Host seconds of the operations that took most, of a call, in all threads."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU]) as found:
        call()
    rows = sorted(found.key_averages(), key=lambda row: -row.self_cpu_time_total)[:14]
    return [f"{r.self_cpu_time_total / 1e6:7.3f} s {r.count:6} {r.key[:60]}" for r in rows]


class Inverted(nn.Module):
    """The layers of EfficientNet-B0: inverted bottlenecks with squeeze and excitation."""

    BLOCKS = (
        (1, 16, 1, 1, 3), (6, 24, 2, 2, 3), (6, 40, 2, 2, 5), (6, 80, 3, 2, 3), (6, 112, 3, 1, 5),
        (6, 192, 4, 2, 5), (6, 320, 1, 1, 3),
    )  # fmt: skip

    def __init__(self, outputs: int = 10) -> None:
        super().__init__()
        self.stem, width, blocks = unit(3, 32, 3, 2), 32, []
        for expand, after, count, stride, side in self.BLOCKS:
            for number in range(count):
                blocks.append(Block(width, after, expand, stride if number == 0 else 1, side))
                width = after
        self.blocks, self.last = nn.Sequential(*blocks), unit(width, 1280, 1)
        self.head = nn.Linear(1280, outputs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Outputs [B, C]."""
        return self.head(self.last(self.blocks(self.stem(x))).mean((2, 3)))


class Block(nn.Module):
    """An inverted bottleneck."""

    def __init__(self, width: int, after: int, expand: int, stride: int, side: int) -> None:
        super().__init__()
        inner, few = width * expand, max(width // 4, 1)
        self.up = unit(width, inner, 1) if expand > 1 else nn.Identity()
        self.deep = unit(inner, inner, side, stride, inner)
        squeeze = nn.AdaptiveAvgPool2d(1), nn.Conv2d(inner, few, 1), nn.SiLU()
        self.gate = nn.Sequential(*squeeze, nn.Conv2d(few, inner, 1), nn.Sigmoid())
        self.down = nn.Sequential(nn.Conv2d(inner, after, 1, bias=False), nn.BatchNorm2d(after))
        self.shortcut = stride == 1 and width == after

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Images with other channels."""
        h = self.deep(self.up(x))
        h = self.down(h * self.gate(h))
        return x + h if self.shortcut else h


def unit(width: int, after: int, side: int, stride: int = 1, groups: int = 1) -> nn.Sequential:
    """Convolution, batch normalisation, SiLU."""
    layer = nn.Conv2d(width, after, side, stride, side // 2, groups=groups, bias=False)
    return nn.Sequential(layer, nn.BatchNorm2d(after), nn.SiLU())


def problem(name: str, device: torch.device, quick: bool) -> tuple[Callable[[], Any], Any]:
    """A function that makes members, and data for `STEPS` batches."""
    import shoal
    from shoal.experiment.bench.battery import random_data
    from shoal.experiment.bench.zoo import find_network

    points = STEPS * BATCH
    if name == "own:inverted":
        side = 8 if quick else 224
        x, y = random_data((3, side, side), points, str(device), torch.float32)
        return lambda: shoal.Ensemble.init(Inverted, 2 if quick else MEMBERS, seed=0), (x, y)
    net = find_network(name)
    kind = net.words, net.places, net.classes
    data = random_data(net.input_shape, points, str(device), torch.float32, *kind)
    members = 2 if quick else MEMBERS
    return lambda: shoal.Ensemble.init(net.blueprint, members, seed=0), data


def one(name: str, device: torch.device, quick: bool, profile: bool) -> None:
    """In a process of its own: fit twice, and print what each took."""
    import shoal

    warnings.simplefilter("ignore")
    begun = time.perf_counter()
    make, data = problem(name, device, quick)
    phases = Phases(device)
    if device.type == "cuda":
        torch.zeros(1, device=device)
        torch.cuda.synchronize()
    members = [make() for _ in range(2)]
    result: dict[str, Any] = {"before": round(time.perf_counter() - begun, 2)}
    watch(phases)
    result["fits"] = []
    for ensemble in members:
        phases.restart()

        def fit(ensemble: Any = ensemble) -> None:
            shoal.fit(
                ensemble, data, method="ensemble", optimizer="sgd", lr=1e-3, steps=STEPS,
                batch_size=BATCH, precision="bfloat16", device=str(device), progress=False,
            )  # fmt: skip
            if device.type == "cuda":
                torch.cuda.synchronize()

        begun = time.perf_counter()
        rows = profiled(fit) if profile else fit()
        seconds = round(time.perf_counter() - begun, 2)
        result["fits"].append({"seconds": seconds, **phases.table(), "host": rows})
    print("RESULT " + json.dumps(result), flush=True)


def search(device: torch.device, quick: bool, images: int) -> None:
    """In a process of its own: `method="auto"`, with the seconds of every trial."""
    import shoal
    from shoal.training.search.search import Search

    warnings.simplefilter("ignore")
    points, epochs, members = (300, 2, 2) if quick else (images, 12, 5)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(points, 3, 32, 32, generator=generator).to(device)
    y = torch.randint(0, 10, (points,), generator=generator).to(device)
    network = "small_cnn" if quick else "resnet18"
    phases = Phases(device)
    watch(phases)
    plain, begun = Search._trained, time.perf_counter()
    trials: list[dict[str, Any]] = []

    def trained(self: Any, candidate: Any, steps: int) -> Any:
        phases.restart()
        begun = time.perf_counter()
        scores = plain(self, candidate, steps)
        taken = {"candidate": candidate.label, "steps": steps, "price": candidate.price}
        trials.append(taken | {"seconds": time.perf_counter() - begun, **phases.table()})
        trials[-1].pop("forms")
        print(trials[-1], flush=True)
        return scores

    Search._trained = trained  # pyright: ignore
    ensemble = made(network, members, points)
    run = shoal.fit(
        ensemble, (x, y), method="auto", optimizer="sgd", lr=1e-3, epochs=epochs, batch_size=128,
        precision="bfloat16", device=str(device), progress=False,
    )  # fmt: skip
    whole = time.perf_counter() - begun
    choice = run.choice
    assert choice is not None
    training = run.provenance.get("seconds")
    result = {"whole": whole, "search": choice.seconds, "cost": choice.cost, "trials": trials}
    print("RESULT " + json.dumps(result | {"training": training, "why": choice.why}), flush=True)


def made(network: str, members: int, points: int) -> Any:
    """Members of one of shoal's own networks for small images."""
    import shoal
    from shoal.models.cnn import SmallCNN
    from shoal.models.resnet import ResNet18

    architecture = {"small_cnn": SmallCNN, "resnet18": ResNet18}[network]()
    return shoal.Ensemble.init(lambda: architecture.build((3, 32, 32), 10), members, seed=0)


def depthwise(device: torch.device, quick: bool) -> None:
    """In a process of its own: first and later calls of depthwise convolutions, by each way."""
    shapes = [
        (32, 3, 1, 112), (96, 3, 2, 112), (144, 3, 1, 56), (144, 5, 2, 56), (240, 5, 1, 28),
        (240, 3, 2, 28), (480, 3, 1, 14), (672, 5, 1, 14), (672, 5, 2, 14), (1152, 5, 1, 7),
    ]  # fmt: skip
    rows = []
    for shape in shapes[:1] if quick else shapes:
        for way in ("library", "kernels", "library, channels first"):
            rows.append(one_depthwise(*shape, way, device))
            print(rows[-1], flush=True)
    print("RESULT " + json.dumps(rows), flush=True)


def one_depthwise(
    channels: int, side: int, stride: int, width: int, way: str, device: torch.device
) -> str:
    """Milliseconds of the first and of later calls of the layer and of both gradients."""
    from shoal.engine.derivatives.convolution import Geometry

    layout = torch.contiguous_format if "first" in way else torch.channels_last
    of = (channels, -(-width // stride), -(-width // stride))
    x, g = (
        torch.randn(BATCH, *shape, device=device).bfloat16().contiguous(memory_format=layout)
        for shape in ((channels, width, width), of)
    )
    w = torch.randn(channels, 1, side, side, device=device).bfloat16()
    geometry = Geometry.of(stride, side // 2, 1, channels, 2)
    each = [stride] * 2, [side // 2] * 2, [1, 1], False, [0, 0], channels

    def by_library(what: str) -> Any:
        if what == "outputs":
            return torch.convolution(x, w, None, *each)
        mask = [what == "at input", what == "at weight", False]
        both = torch.ops.aten.convolution_backward(g, x, w, None, *each, mask)
        return both[0 if mask[0] else 1]

    def by_kernels(what: str) -> Any:
        from shoal.engine.derivatives import launch_depthwise_kernels as kernels

        if what == "outputs":
            return kernels.outputs(x, w, None, geometry)
        return (kernels.at_input if what == "at input" else kernels.at_weight)(g, x, w, geometry)

    found, call = [], by_kernels if way == "kernels" else by_library
    for what in ("outputs", "at input", "at weight"):
        first = spent(functools.partial(call, what), 1, device)
        later = least(functools.partial(call, what), device)
        found.append(f"{what} {first:.0f} then {later:.3f} ms")
        if way == "kernels":
            plain = by_library(what).float()
            found[-1] += f" (apart {(call(what).float() - plain).norm() / plain.norm():.1e})"
    return f"{channels} channels, {side}x{side}/{stride} on {width}, {way}: {', '.join(found)}"


def least(call: Callable[[], Any], device: torch.device) -> float:
    """Milliseconds of one call on the device, captured ten times so that nothing waits."""
    if device.type != "cuda":
        return spent(call, 2, device)
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(10):
            call()
    return min(spent(graph.replay, 5, device) for _ in range(3)) / 10


def builds(device: torch.device) -> None:
    """In a process of its own: seconds of building kernels one after another, and side by side."""
    from concurrent.futures import ThreadPoolExecutor

    import triton

    from shoal.engine.derivatives import batchnorm_kernels as kernels

    x = torch.randn(BATCH, 64, 8, 8, device=device).to(memory_format=torch.channels_last)
    each = torch.randn(64, device=device)

    def build(rows: int) -> None:
        size = {"ROWS": rows, "COLUMNS": 64, "num_warps": 2}
        how = {"AFFINE": True, "RESIDUAL": False, "RECTIFIED": True}
        kernels.normalise.warmup(
            x, None, x, each, each, each, each, 1024, 64, grid=(1,), **how, **size
        )

    result: dict[str, Any] = {}
    for threads, types in ((0, torch.float32), (16, torch.bfloat16)):
        x, begun = x.to(types), time.perf_counter()
        sizes = [1 << n for n in range(8)]
        if threads == 0:
            [build(rows) for rows in sizes]
        else:
            with ThreadPoolExecutor(threads) as pool, triton.AsyncCompileMode(pool):
                [build(rows) for rows in sizes]
        result[f"{threads} threads"] = time.perf_counter() - begun
    print("RESULT " + json.dumps(result), flush=True)


def spent(call: Callable[[], Any], times: int, device: torch.device) -> float:
    """Milliseconds of one call."""
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    wait()
    begun = time.perf_counter()
    for _ in range(times):
        call()
    wait()
    return 1e3 * (time.perf_counter() - begun) / times


def in_process(arguments: list[str], cache: str, left: float) -> Any:
    """The result of a fresh process, or a sentence why there is none."""
    root = Path(__file__).resolve().parent.parent
    path = os.pathsep.join(filter(None, [str(root), os.environ.get("PYTHONPATH")]))
    environment = os.environ | {"PYTHONPATH": path, "TRITON_CACHE_DIR": cache}
    begun = time.perf_counter()
    try:
        found = subprocess.run(
            [sys.executable, __file__, *arguments], env=environment, timeout=max(left, 1),
            capture_output=True, text=True,
        )  # fmt: skip
    except subprocess.TimeoutExpired as late:
        text = late.stdout.decode() if isinstance(late.stdout, bytes) else late.stdout or ""
        return f"no time was left: {text[-6000:]}"
    lines = [line for line in found.stdout.splitlines() if line.startswith("RESULT ")]
    if not lines:
        return "\n".join(f"{found.stdout}\n{found.stderr}".strip().splitlines()[-6:])
    result = json.loads(lines[-1].removeprefix("RESULT "))
    if isinstance(result, dict):
        result["process"] = round(time.perf_counter() - begun, 1)
    return result


def show(name: str, state: str, result: Any) -> None:
    """Print what a process has found."""
    if not isinstance(result, dict):
        print(f"{name} ({state}): {result}", flush=True)
        return
    fits = result["fits"]
    seconds = ", ".join(f"{fit['seconds']:.2f} s" for fit in fits)
    print(f"\n{name} ({state}): first and second fit {seconds}; process {result['process']} s")
    for number, fit in enumerate(fits, 1):
        for label, (taken, calls) in sorted(fit["spent"].items(), key=lambda each: -each[1][0]):
            if taken >= 0.02:
                each = fit["each"].get(label, "")
                print(f"  fit {number}: {taken:7.3f} s {calls:4} {label} {each}")
        kernels = ", ".join(f"{count} {kernel}" for kernel, count in fit["kernels"])
        print(f"  fit {number}: kernels {kernels}" if kernels else f"  fit {number}: no kernels")
        for row in fit["host"] or ():
            print(f"  fit {number}: {row}")
    sys.stdout.flush()


def show_search(result: Any) -> None:
    """Print what a search has found."""
    if not isinstance(result, dict):
        print(f"search: {result}", flush=True)
        return
    print(f"\nsearch: {result['search']:.1f} s, cost {result['cost']:.2f} trainings, training "
          f"{result['training']} s, all {result['whole']:.1f} s")  # fmt: skip
    for trial in result["trials"]:
        spent = sorted(trial["spent"].items(), key=lambda each: -each[1][0])
        each = {k: v if len(v) < 8 else [*v[:6], "...", v[-1]] for k, v in trial["each"].items()}
        print(f"  {trial['candidate']}: {trial['steps']} steps, {trial['seconds']:.2f} s, "
              f"{1e3 * trial['seconds'] / trial['steps']:.1f} ms a step")  # fmt: skip
        for label, (taken, calls) in spent:
            if taken >= 0.02:
                print(f"    {taken:7.3f} s {calls:4} {label} {each.get(label, '')}")
    sys.stdout.flush()


def measure(asked: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """All processes, in the order of their use, while there is time."""
    common = ["--device", str(device), *(["--quick"] if asked.quick else [])]
    value: dict[str, Any] = {}

    def run(name: str, state: str, cache: str, more: list[str]) -> Any:
        left = asked.within - (time.perf_counter() - BEGUN)
        if left < 5:
            return "no time left"
        found = value[f"{name} ({state})"] = in_process([*more, *common], cache, left)
        return found

    found = run("depthwise", "", tempfile.mkdtemp(), ["--depthwise"])
    print("\n".join(found) if isinstance(found, list) else found, flush=True)
    for number, name in enumerate(asked.networks):
        cache = tempfile.mkdtemp()
        show(name, "cold", run(name, "cold", cache, ["--one", name]))
        if number < 2:
            show(name, "warm disk", run(name, "warm disk", cache, ["--one", name]))
        if asked.profiled and number == 0:
            found = run(name, "profiled", cache, ["--one", name, "--profile"])
            show(name, "profiled, warm disk", found)
        if number == 1:
            print("8 kernels:", run("builds", "", tempfile.mkdtemp(), ["--builds"]), flush=True)
            how = ["--search", "--images", str(asked.images)]
            show_search(run("search", "cold", tempfile.mkdtemp(), how))
        shutil.rmtree(cache, ignore_errors=True)
    return value


def main() -> None:
    """Measure, or be one of the processes that do."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--quick", action="store_true", help="a small, short test")
    parser.add_argument("--within", type=float, default=150.0, help="seconds for everything")
    parser.add_argument("--profiled", action="store_true", help="operations of the first network")
    parser.add_argument("--images", type=int, default=5_000, help="of the search")
    parser.add_argument("--networks", type=lambda text: text.split(","))
    parser.add_argument("-o", "--out", type=Path)
    for name in ("one", "profile", "search", "depthwise", "builds"):
        how: dict[str, Any] = {} if name == "one" else {"action": "store_true"}
        parser.add_argument(f"--{name}", help=argparse.SUPPRESS, **how)
    asked = parser.parse_args()
    device = torch.device(asked.device)
    if asked.one is not None:
        one(asked.one, device, asked.quick, asked.profile)
    elif asked.search:
        search(device, asked.quick, asked.images)
    elif asked.depthwise:
        depthwise(device, asked.quick)
    elif asked.builds:
        builds(device)
    else:
        asked.networks = asked.networks or (QUICK if asked.quick else NAMES)
        value = measure(asked, device)
        if asked.out is not None:
            asked.out.write_text(json.dumps(value, indent=1))


if __name__ == "__main__":
    main()

"""Odd arguments for every public call: each is accepted, or refused in one sentence.

    python tests/fuzz_calls.py [--only NAME] [--log FILE]

A case is a call with usual arguments. Each argument is replaced by each odd value, one at a time.
A call is *raw* if it ends with anything but a result or an error of ours in one sentence. The calls
are the same every time; the seed of all runs is 0.
"""

import argparse
import inspect
import os
import signal
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from small_runs import CLASSES, plain, points, quick
from torch import Tensor, nn

import shoal
from shoal.core.errors import ShoalError, named_line

SECONDS = 20
"""Longest time of one call."""

ODD: dict[str, Callable[[], Any]] = {
    "nan": lambda: float("nan"),
    "inf": lambda: float("inf"),
    "-inf": lambda: float("-inf"),
    "-1": lambda: -1,
    "0": lambda: 0,
    "0.5": lambda: 0.5,
    "1e-320": lambda: 1e-320,
    "1e308": lambda: 1e308,
    "10**30": lambda: 10**30,
    "2**62": lambda: 2**62,
    "True": lambda: True,
    "1j": lambda: 1j,
    "None": lambda: None,
    "''": lambda: "",
    "'a'": lambda: "a",
    "'a\\0b'": lambda: "a\0b",
    "b'a'": lambda: b"a",
    "[]": list,
    "()": tuple,
    "{}": dict,
    "{'a': 1}": lambda: {"a": 1},
    "['a']": lambda: ["a"],
    "[nan]": lambda: [float("nan")],
    "ragged": lambda: [[1.0], [2.0, 3.0]],
    "object": object,
    "class": lambda: int,
    "function": lambda: lambda: None,
    "iterator": lambda: iter([]),
    "empty array": lambda: np.zeros(0),
    "array of text": lambda: np.array(["a", "b"]),
    "array of objects": lambda: np.array([object(), None]),
    "complex array": lambda: np.zeros(40, dtype=complex),
    "tensor [2, 3, 4, 5]": lambda: torch.zeros(2, 3, 4, 5),
    "tensor of nan": lambda: torch.full((40,), torch.nan),
    "scalar tensor": lambda: torch.tensor(0.5),
}


FUNCTIONS = {
    "annealing", "augment", "batches", "build", "callbacks", "compute", "estimator", "flow",
    "bandwidth", "likelihood", "log_density", "loss", "networks", "schedule", "source",
}  # fmt: skip
"""Arguments that may be functions of the caller's own."""


@dataclass(frozen=True)
class Case:
    """A public call with usual arguments; those that `fixed` names are not replaced."""

    name: str
    call: Callable[..., Any]
    usual: dict[str, Any]
    fixed: tuple[str, ...] = ()
    slow: bool = False


@cache
def labels_run() -> Any:
    torch.manual_seed(0)
    return quick()


@cache
def numbers_run() -> Any:
    x, _ = points()
    network = nn.Sequential  # two layers suffice
    ensemble = shoal.Ensemble.init(lambda: network(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)), 3)
    return quick(ensemble, (x, x[:, 0] + 0.1 * x[:, 1]))


@cache
def labels() -> tuple[Any, Tensor]:
    x, y = points(200, seed=1)
    return shoal.predict(labels_run(), x[:40]), y[:40]


@cache
def numbers() -> tuple[Any, Tensor]:
    x, _ = points(seed=1)
    return shoal.predict(numbers_run(), x), x[:, 0]


def cases() -> Iterator[Case]:
    """Every public call that takes arguments."""
    yield from _training()
    yield from _prediction()
    yield from _decisions()
    yield from _metrics()
    yield from _analysis()
    yield from _parts()


def _training() -> Iterator[Case]:
    x, y = points()
    fresh = lambda: shoal.Ensemble.init(plain, 2)  # noqa: E731

    def fit(ensemble: Any = None, data: Any = (x, y), **options: Any) -> Any:
        known = fresh() if ensemble is None else ensemble
        return shoal.fit(known, data, **{"steps": 1, "progress": False} | options)

    names = [n for n in inspect.signature(shoal.fit).parameters if n != "more"]
    from shoal.training.options.options import FitOptions, StepOptions

    more = [n for n in (*names, *FitOptions.__annotations__) if n not in ("progress", "mesh")]
    yield Case("fit", fit, dict.fromkeys(more, _SAME))

    def init(**arguments: Any) -> Any:
        return shoal.Ensemble.init(**arguments)

    yield Case(
        "Ensemble.init",
        init,
        {"build": plain, "members": 2, "seed": 0, "shared": (), "divided": False},
    )
    yield Case("Ensemble.of", shoal.Ensemble.of, {"networks": [plain(), plain()]})
    yield Case("Ensemble()", lambda x: fresh()(x), {"x": x})
    yield Case("Ensemble.member", lambda index: fresh().member(index), {"index": 0})
    yield Case("Ensemble[]", lambda index: fresh()[index], {"index": 0})
    yield Case(
        "Ensemble.slice_members",
        lambda start, stop: fresh().slice_members(start, stop),
        {"start": 0, "stop": 1},
    )
    yield Case("Ensemble.to", lambda **a: fresh().to(**a), {"device": None, "dtype": None})
    yield Case("Ensemble.train", lambda mode: fresh().train(mode), {"mode": True})
    yield Case("Ensemble.save", lambda path: fresh().save(path), {"path": "e.safetensors"})
    yield Case("Ensemble.load", shoal.Ensemble.load, {"path": _saved_ensemble(), "build": plain})
    yield Case(
        "Ensemble.load_state_dict",
        lambda state, strict: fresh().load_state_dict(state, strict),
        {"state": fresh().state_dict(), "strict": True},
    )
    yield Case("Ensemble.use_output", lambda name: fresh().use_output(name), {"name": None})

    def grow(run: Any = None, **options: Any) -> Any:
        source = quick(fresh(), steps=1) if run is None else run
        return shoal.grow(source, **{"more": 1, "data": (x, y), "progress": False} | options)

    grown = ("run", "more", "data", "out", "resume", "loggers", "callbacks", "lr", "strength")
    yield Case("grow", grow, dict.fromkeys(grown, _SAME), slow=True)

    def draw(run: Any = None, **options: Any) -> Any:
        source = quick(fresh(), steps=1) if run is None else run
        few = {"draws": 2, "warmup": 2, "thin": 1, "progress": False}
        made = shoal.draw(source, (x, y), **{"sampler": "sghmc"} | few | options)
        _finite(made.ensemble)
        return made

    drawn = [n for n in inspect.signature(shoal.draw).parameters if n not in ("data", "progress")]
    yield Case("draw", draw, dict.fromkeys(drawn, _SAME))
    adopted = {"networks": [plain(), plain()], "build": None, "likelihood": "categorical"}
    yield Case("adopt", shoal.adopt, {**adopted, "data": (x, y), "outputs": None, "out": None})
    yield Case("load", shoal.load, {"folder": _saved_run(), "build": None, "likelihood": None})

    def stepper(ensemble: Any = None, n: Any = 40, **options: Any) -> Any:
        made = shoal.Stepper(fresh() if ensemble is None else ensemble, n, **options)
        info = made((x, y))
        _finite(made.ensemble)
        return info

    steps = [n for n in inspect.signature(shoal.Stepper).parameters if n != "more"]
    yield Case("Stepper", stepper, dict.fromkeys((*steps, *StepOptions.__annotations__), _SAME))

    def step(**arguments: Any) -> Any:
        made = shoal.Stepper(fresh(), 40, method="kde")
        info = made(**{"batch": (x, y)} | arguments)
        _finite(made.ensemble)
        return info

    called = ("batch", "lr", "annealing", "strength", "loss", "own")
    yield Case("Stepper()", step, dict.fromkeys(called, _SAME))
    yield Case("Stepper() targets", lambda y: step(batch=(x, y)), {"y": y})
    yield Case("Stepper() inputs", lambda x: step(batch=(x, y)), {"x": x})
    yield Case(
        "Stepper.load_state_dict",
        lambda state: shoal.Stepper(fresh(), 40).load_state_dict(state),
        {"state": shoal.Stepper(fresh(), 40).state_dict()},
    )
    posterior = shoal.Posterior(shoal.likelihoods.Categorical(), shoal.priors.Gaussian(), 40)
    forced = {
        "ensemble": fresh(),
        "posterior": posterior,
        "repulsion": None,
        "batch": (x, y),
        "annealing": 1.0,
        "adversarial": None,
        "seed": 0,
        "step": 0,
    }
    yield Case("forces", shoal.forces, forced)
    sampled = {"log_density": lambda z: -z.square().sum(), "start": torch.randn(4, 2), "steps": 2}
    more_sampled = {"method": "kde", "lr": 0.1, "optimizer": "sgd", "annealing": None}
    yield Case("sample", shoal.sample, {**sampled, **more_sampled, "noise": None, "seed": 0})

    def repel(**fields: Any) -> Any:
        return shoal.forces(fresh(), posterior, shoal.Repulsion(**fields), (x, y))

    yield Case(
        "Repulsion",
        repel,
        {n: _SAME for n in inspect.signature(shoal.Repulsion).parameters},
    )

    def infer(**fields: Any) -> Any:
        given = {"likelihood": posterior.likelihood, "prior": posterior.prior, "n": 40} | fields
        return shoal.forces(fresh(), shoal.Posterior(**given), None, (x, y))

    yield Case(
        "Posterior",
        infer,
        dict.fromkeys(("likelihood", "prior", "n", "temperature"), _SAME),
    )
    yield Case(
        "Adversarial",
        lambda **a: fit(adversarial=shoal.Adversarial(**a)),
        dict.fromkeys(("epsilon", "shared", "joined", "relative"), _SAME),
    )
    trunk = {"module": plain(), "fresh": True, "spread": 0.02}
    a = shoal.adapters
    yield Case("adapters.last_layer", a.last_layer, {**trunk, "layer": None})
    lora = {**trunk, "rank": 2, "targets": None, "alpha": None, "train": None}
    yield Case("adapters.lora", a.lora, lora)
    scaled = {"module": plain(), "targets": None, "train": None, "spread": 0.05}
    yield Case("adapters.scale", a.scale, scaled)
    yield Case("adapters.peft", a.peft, {"model": plain(), "spread": 0.02})
    low_rank = shoal.Ensemble.init(a.lora(plain(), targets="0", train=()), 2)
    folders = a.save_peft(low_rank, tempfile.mkdtemp(dir="."))
    yield Case("adapters.load_peft", a.load_peft, {"module": plain(), "folders": folders})
    yield Case(
        "adapters.save_peft",
        lambda ensemble, folder: a.save_peft(
            ensemble, tempfile.mkdtemp(dir=".") if folder is None else folder
        ),
        {"ensemble": low_rank, "folder": None},
    )


def _prediction() -> Iterator[Case]:
    x, y = points(seed=1)
    run = labels_run()
    predicted = {"source": run, "x": x, "batch_size": 16, "device": None, "likelihood": None}
    yield Case(
        "predict",
        shoal.predict,
        {**predicted, "weights": "uniform", "data": None, "out": None},
    )
    yield Case(
        "predict ensemble",
        lambda likelihood: shoal.predict(run.ensemble, x, likelihood=likelihood).entropy(),
        {"likelihood": shoal.likelihoods.Categorical()},
    )
    yield Case(
        "predict posterior weights",
        lambda data: shoal.predict(run, x, weights="posterior", data=data),
        {"data": points()},
    )
    for kind, (pred, targets) in {"labels": labels(), "numbers": numbers()}.items():
        of = f"Predictive of {kind}"
        yield Case(
            of,
            type(pred),
            {"members": pred.members, "likelihood": pred.likelihood, "weights": None},
        )
        yield Case(f"{of}[]", pred.__getitem__, {"index": 0})
        yield Case(f"{of}.concat", pred.concat, {"parts": [pred, pred]})
        yield Case(f"{of}.save", pred.save, {"path": "p.safetensors"})
        for name in ("log_prob", "check", "points"):
            yield Case(f"{of}.{name}", getattr(pred, name), {"y": targets})
        yield Case(f"{of}.sample", pred.sample, {"n": 2, "seed": 0, "joint": False})
        yield Case(f"{of}.to_frame", pred.to_frame, {"level": 0.5, "classes": None})
        yield Case(f"{of}.average", pred.average, {"values": pred.members})
    real, targets = numbers()
    yield Case("Predictive.cdf", real.cdf, {"y": targets})
    yield Case("Predictive.quantile", real.quantile, {"level": 0.5})
    yield Case("Predictive.interval", real.interval, {"level": 0.5})
    yield Case(
        "Predictive.load",
        shoal.Predictive.load,
        {"path": _saved_prediction(), "likelihood": None},
    )


def _decisions() -> Iterator[Case]:
    (pred, y), (real, targets), d = labels(), numbers(), shoal.decisions
    sets = {"level": 0.5, "score": "raps", "penalty": 0.01, "free_ranks": 1, "seed": 0}
    flags = {"randomised": True, "allow_empty": False}
    yield Case("conformal_sets", d.conformal_sets, {"pred": pred, "y": y, **sets, **flags})
    intervals = {"pred": real, "y": targets, "level": 0.5, "score": "cqr"}
    yield Case("conformal_intervals", d.conformal_intervals, intervals)
    rules = {
        "ConformalSets": d.conformal_sets(pred, y, 0.5),
        "Alarm": d.ood_alarm(pred, 0.5),
        "Temperature": d.temperature(pred, y),
        "SelectiveRule": d.selective(pred, y, 0.9),
    }
    for name, rule in rules.items():
        yield Case(f"{name}()", rule, {"pred": pred})
    yield Case("ConformalIntervals()", d.conformal_intervals(real, targets, 0.5), {"pred": real})
    for name, fitted, given, said, score in (
        ("sets", d.cross_conformal_sets, pred, y, "lac"),
        ("intervals", d.cross_conformal_intervals, real, targets, "scaled"),
    ):
        folds, held = torch.arange(len(given)) % 2, torch.arange(given.size) % 2
        known = {"folds": folds, "member_folds": held, "repeated": None, "knew": ()}
        arguments = {"pred": given, "y": said, "level": 0.5, "score": score, **known}
        yield Case(f"cross_conformal_{name}", fitted, arguments)
        yield Case(f"cross-conformal {name}()", fitted(**arguments), {"pred": given})
        yield Case(f"cross-conformal {name}.at", fitted(**arguments).at, {"level": 0.5})
    randomised = d.conformal_sets(pred, y, 0.5, randomised=True)
    yield Case("ConformalSets() seed", randomised, {"pred": pred, "seed": 0})
    alarm = {"pred": pred, "rate": 0.5, "score": "entropy", "confidence": 0.5}
    yield Case("ood_alarm", d.ood_alarm, alarm)
    yield Case("temperature", d.temperature, {"pred": pred, "y": y, "where": "members"})
    chosen = {"pred": pred, "y": y, "error": 0.9, "confidence": 0.5, "score": "confidence"}
    yield Case("selective", d.selective, chosen)
    yield Case("risk_coverage", d.risk_coverage, {"pred": pred, "y": y, "score": "confidence"})
    costs = torch.ones(CLASSES, CLASSES) - torch.eye(CLASSES)
    yield Case("cheapest", d.cheapest, {"pred": pred, "costs": costs, "abstain": 0.5})
    yield Case("clopper_pearson", d.clopper_pearson, {"k": 1, "n": 3, "confidence": 0.9})


def _metrics() -> Iterator[Case]:
    (pred, y), (real, targets), m = labels(), numbers(), shoal.metrics
    usual = {"pred": pred, "y": y, "test": pred, "ood": pred, "bins": 5, "adaptive": False}
    usual |= {"level": 0.5, "thresholds": None, "sample_weight": None, "batches": [(pred, y, None)]}
    of_numbers = {"coverage", "crps", "pit", "rmse", "sharpness"}
    l = shoal.likelihoods
    binary = shoal.Predictive(pred.members[..., :1], l.Bernoulli()), (y > 1).long()
    ordered = shoal.Predictive(pred.members, l.Ordinal()), y
    custom = shoal.Predictive(real.members, l.Custom(nn.functional.mse_loss)), targets[:, None]
    others = {"ece_positive": binary, "label_auroc": binary, "subset_accuracy": binary}
    others |= {"label_mae": ordered, "rps": ordered, "loss": custom}
    for name in m.__all__:
        function = getattr(m, name)
        if not inspect.isfunction(function) or name == "register":
            continue
        known = {**usual, "pred": real, "y": targets} if name in of_numbers else usual
        if name in others:
            known = {**usual, "pred": others[name][0], "y": others[name][1]}
        if name in ("aupr", "auroc", "fpr95"):
            known = {**usual, "test": pred.entropy(), "ood": pred.entropy()}
        taken = inspect.signature(function).parameters
        arguments = {n: known[n] for n in taken if n in known}
        yield Case(f"metrics.{name}", function, arguments)


def _analysis() -> Iterator[Case]:
    x, y = points(seed=1)
    pred, labelled = labels()
    yield Case(
        "evaluate prediction",
        shoal.evaluate,
        {"source": pred, "data": labelled, "sample_weight": None, "ood": None},
    )
    evaluated = {"source": labels_run(), "data": (x, y), "ood": {"noise": x}, "shifts": None}
    more = {"severities": (1,), "gallery": 2, "device": None, "keep": False, "progress": False}
    yield Case("evaluate run", shoal.evaluate, {**evaluated, **more})
    kept = shoal.evaluate(labels_run(), (x, y))
    yield Case("Evaluation.split_samples", kept.split_samples, {"name": "test"})
    yield Case("Evaluation.reliability", kept.reliability, {"split": "test"})
    yield Case("Evaluation.accuracy_confidence", kept.accuracy_confidence, {"split": "test"})
    yield Case("Evaluation.save", kept.save, {"folder": "."})
    reported = {"runs": labels_run(), "path": "r.html", "data": (x, y), "ood": None}
    more = {"shifts": None, "title": None, "figures": None, "progress": False}
    yield Case("report", shoal.report, {**reported, **more}, slow=True)
    landscape = {"run": labels_run(), "data": points(), "test": (x, y), "parts": ["line"]}
    more = {"quick": True, "points": 2, "inputs": 5, "steps": 2, "fresh": True, "seed": 0}
    yield Case(
        "landscape", shoal.landscape, {**landscape, **more, "device": None, "progress": False}
    )
    evidence = {"run": numbers_run(), "data": (x, x[:, 0]), "test": (x, x[:, 0]), "priors": False}
    more = {"points": 5, "flow_steps": 2, "progress": False}
    yield Case("evidence", shoal.evidence, {**evidence, **more})
    fidelity = {
        "run": numbers_run(),
        "data": (x, x[:, 0]),
        "test": (x, x[:, 0]),
        "methods": ["kde"],
    }
    more = {"points": 5, "draws": 10, "chains": 2, "within": 5.0, "seed": 0, "progress": False}
    yield Case("fidelity", shoal.fidelity, {**fidelity, **more, "subspace": None}, slow=True)
    compared = {"source": plain, "data": points(), "methods": ["ensemble"], "strengths": None}
    more = {"sizes": [2], "seeds": 1, "test": (x, y), "ood": None, "shifts": None, "out": None}
    last = {"report": None, "jobs": 1, "threads": None, "retries": 0, "progress": False}
    yield Case(
        "compare",
        lambda out, **a: shoal.compare(**a, out=tempfile.mkdtemp(dir=".") if out is None else out),
        {**compared, **more, **last, "epochs": 1, "lr": 1e-3},
        slow=True,
    )
    smaller = {"run": labels_run(), "to": 2, "by": "greedy", "data": points(), "test": (x, y)}
    more = {"level": 0.5, "epochs": 1, "lr": 1e-3, "seed": 0, "out": None}
    yield Case("compress", shoal.compress, {**smaller, **more})
    distilled = {**smaller, "by": "distil", "to": 1}
    yield Case("compress distil", shoal.compress, {**distilled, **more}, fixed=("by",), slow=True)
    exported = {"source": numbers_run(), "path": "m.pt2", "x": x, "likelihood": None}
    more = {"weights": "uniform", "data": None, "members": False, "quantiles": (), "merge": False}
    last = {"precision": None, "compile": False, "classes": None, "preprocessing": None}
    yield Case(
        "export",
        shoal.export,
        {**exported, **more, **last, "tolerance": None},
        slow=True,
    )


def _parts() -> Iterator[Case]:
    """Likelihoods, priors, methods, kernels, spaces and networks, each made and then used."""
    x, y = points()
    build = lambda: plain()  # noqa: E731

    def trained(method: Any = "kde", **options: Any) -> Any:
        data = options.pop("data", (x, y))
        network = options.pop("build", build)
        ensemble = shoal.Ensemble.init(network, 2)
        run = shoal.fit(ensemble, data, method=method, steps=1, progress=False, **options)
        _finite(run.ensemble)
        return run

    for name in ("Categorical",):
        make = getattr(shoal.likelihoods, name)
        yield _made(f"likelihoods.{name}", make, lambda part: trained(likelihood=part))
    real = (x, x[:, 0])
    for name, width in {"Gaussian": 1, "StudentT": 2, "MixtureDensity": 9}.items():
        make = getattr(shoal.likelihoods, name)

        def use(part: Any, width: int = width) -> Any:
            wide = lambda: nn.Linear(3, width)  # noqa: E731
            return trained(likelihood=part, data=real, build=wide)

        yield _made(f"likelihoods.{name}", make, use)
    yield _made(
        "likelihoods.Custom", shoal.likelihoods.Custom, lambda part: trained(likelihood=part)
    )
    for name in ("FanIn", "Gaussian", "FunctionSpace", "GaussianProcess"):
        method = "kde" if name in ("FanIn", "Gaussian") else "f-kde"
        make = getattr(shoal.priors, name)
        yield _made(f"priors.{name}", make, lambda part, method=method: trained(method, prior=part))
    r = shoal.Repulsion
    for name in ("Fixed", "Median"):
        make = getattr(shoal.kernels, name)
        yield _made(f"kernels.{name}", make, lambda part: trained(r(bandwidth=part)))
    yield _made("kernels.Matern", shoal.kernels.Matern, lambda part: trained(r(kernel=part)))
    for name in ("SGE", "SSGE"):
        make = getattr(shoal.estimators, name)
        yield _made(
            f"estimators.{name}",
            make,
            lambda part: trained(r(flow=shoal.flows.Wasserstein(part))),
        )
    yield _made("flows.Wasserstein", shoal.flows.Wasserstein, lambda part: trained(r(flow=part)))
    for name in (
        "InputGradients", "LastLayer", "Normalised", "Outputs", "Projected", "Rotated", "Scaled",
    ):  # fmt: skip
        make = getattr(shoal.spaces, name)
        yield _made(f"spaces.{name}", make, lambda part: trained(r(space=part)))
    for name in ("Mixup", "Noise", "Uniform", "Unlabelled"):
        make = getattr(shoal.points, name)
        yield _made(
            f"points.{name}",
            make,
            lambda part: trained(r(space=shoal.spaces.Outputs(), points=part)),
        )
    got = {"name": "f-kde", "legacy": False, "calibrated": False, "points": "batch"}
    yield Case("methods.get", lambda **a: trained(shoal.methods.get(**a)), got)
    kde = shoal.methods.get("f-kde")
    yield Case(
        "Method.with_strength",
        lambda strength: trained(kde.with_strength(strength)),
        {"strength": 1.0},
    )
    yield Case(
        "Method.with_points", lambda points: trained(kde.with_points(points)), {"points": "batch"}
    )
    yield from _worlds()


def _worlds() -> Iterator[Case]:
    x, y = points()
    images, small = torch.rand(2, 1, 8, 8), (1, 8, 8)
    small_ones = "MLP LinearModel MultiHead BatchEnsemble TabM SmallCNN MediumCNN ViT".split()
    for name in (*small_ones, "ResNet18", "ResNet20", "PreActResNet18", "WideResNet16x4"):
        make = getattr(shoal.models, name)
        yield _made(f"models.{name}", make, lambda part: part.build(small, 3), large=False)
    mlp = shoal.models.MLP((4,))
    blueprint = {"architecture": mlp, "input_shape": (3,), "outputs": 2}
    yield Case("models.Blueprint", lambda **a: shoal.models.Blueprint(**a)(), blueprint)
    d = shoal.data
    yield Case("data.load", d.load, {"spec": {"name": "digits", "seed": 0}})
    np.savez("t.npz", x=x.numpy(), y=y.numpy())
    loaded = {"path": "t.npz", "target": None, "shape": None, "classes": None}
    yield Case("data.load_file", d.load_file, loaded)
    corrupted = {"images": images, "name": "fog", "severity": 1, "seed": 0, "first": 0}
    yield Case("data.corrupt", d.corrupt, {**corrupted, "device": None})
    yield Case("data.rotated", d.rotated, {"images": images, "degrees": 5.0})
    yield Case("data.check_labels", d.check_labels, {"y": y, "classes": CLASSES})
    yield Case("data.as_split", d.as_split, {"data": (x, y)})
    yield Case(
        "data.input_batches",
        lambda **a: list(d.input_batches(**a)),
        {"data": x, "batch_size": 16, "device": None},
    )
    batched = {"data": (x, y), "batch_size": 16, "seed": 0, "device": None, "steps": None}
    yield Case("data.batches_of", lambda **a: next(iter(d.batches_of(**a).batches(0))), batched)
    split = shoal.Split(x, y)
    named = {"name": "n", "train": split, "test": split, "shifts": {}, "ood": {}, "classes": None}
    yield Case(
        "Dataset",
        lambda **a: shoal.evaluate(labels_run(), shoal.Dataset(**a), keep=False),
        named,
    )
    yield Case(
        "Split",
        lambda **a: shoal.evaluate(labels_run(), shoal.Split(**a), keep=False),
        {"x": x, "y": y},
    )
    yield Case("Split.batches", lambda size: list(split.batches(size)), {"size": 16})


def _made(name: str, make: Any, use: Callable[[Any], Any], large: bool = True) -> Case:
    """A part with each of its settings changed, in use."""
    settings = {}
    for parameter in inspect.signature(make).parameters.values():
        needed = {"loss": nn.functional.cross_entropy, "data": "digits", "x": points()[0]}
        settings[parameter.name] = needed.get(parameter.name, _SAME)
    return Case(name, lambda **a: use(make(**a)), settings)


_SAME = object()
"""Stands for an argument that is left out of the usual call."""


def _saved_run() -> str:
    if not Path("run").exists():
        from shoal.models import MLP, Blueprint

        quick(shoal.Ensemble.init(Blueprint(MLP((4,)), (3,), CLASSES), 2), steps=1, out="run")
    return "run"


def _saved_ensemble() -> str:
    shoal.Ensemble.init(plain, 2).save("ensemble.safetensors")
    return "ensemble.safetensors"


def _saved_prediction() -> str:
    labels()[0].save("prediction.safetensors")
    return "prediction.safetensors"


class SilentNaN(Exception):
    """A call that returned and left weights that are not finite."""


def _finite(ensemble: Any) -> None:
    if any(not bool(t.isfinite().all()) for t in ensemble.state.values() if t.is_floating_point()):
        raise SilentNaN("weights are not finite, and no sentence says so")


class Late(Exception):
    """A call beyond its time."""


def _late(*_: Any) -> None:
    raise Late(f"no result after {SECONDS} s")


def outcome(case: Case, parameter: str, odd: str) -> tuple[str, str]:
    """What came of a call, and the line of its error.

    Besides "accepted", "refused" and "raw": a count is "too large" for memory or time, or the
    caller's "own function" raised an error, which passes as it is.
    """
    usual = {name: value for name, value in case.usual.items() if value is not _SAME}
    arguments = {**usual, parameter: ODD[odd]()}
    signal.signal(signal.SIGALRM, _late)
    signal.alarm(SECONDS)
    try:
        case.call(**arguments)
    except ShoalError as error:
        text = str(error)
        one = text.strip() and "\n" not in text and len(text) < 700
        return ("refused", text) if one else ("raw", f"not one sentence: {text!r}")
    except Exception as error:
        beyond = isinstance(error, (Late, RuntimeError, OverflowError, MemoryError))
        if odd == "2**62" and (beyond or "Overflow" in str(error)):
            return "too large", named_line(error)
        if odd in ("class", "function") and parameter in FUNCTIONS:
            return "own function", named_line(error)
        return "raw", named_line(error)
    finally:
        signal.alarm(0)
    return "accepted", ""


def broken(only: str = "") -> list[str]:
    """Cases whose usual call fails, so that their odd calls would tell nothing."""
    found = []
    for case in cases():
        usual = {name: value for name, value in case.usual.items() if value is not _SAME}
        if only in case.name:
            try:
                case.call(**usual)
            except Exception as error:
                found.append(f"{case.name}: {named_line(error)}")
    return found


def calls(only: str = "") -> Iterator[tuple[Case, str, str]]:
    """Every case with every argument and odd value."""
    for case in cases():
        if only in case.name:
            for parameter in case.usual:
                if parameter not in case.fixed:
                    yield from ((case, parameter, odd) for odd in ODD)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="cases whose name holds this text")
    parser.add_argument("--log", help="file for one line per call")
    chosen = parser.parse_args()
    count: Counter[str] = Counter()
    by_case: Counter[str] = Counter()
    log = open(chosen.log, "w") if chosen.log else None  # noqa: SIM115
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        sys.stdin = open(os.devnull)  # noqa: SIM115
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for line in broken(chosen.only):
                print(f"the usual call fails: {line}", flush=True)
        for case, parameter, odd in calls(chosen.only):
            start = time.perf_counter()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                kind, text = outcome(case, parameter, odd)
            count[kind] += 1
            taken = time.perf_counter() - start
            line = f"{kind}\t{case.name}\t{parameter}\t{odd}\t{taken:.2f}\t{text[:300]}"
            if log:
                print(line, file=log, flush=True)
            if kind == "raw":
                by_case[case.name] += 1
                print(line, flush=True)
        os.chdir("/")
    print(f"{sum(count.values())} calls: {dict(count)}")
    for name, raw in by_case.most_common():
        print(f"  {raw:4} {name}")
    return 1 if count["raw"] else 0


if __name__ == "__main__":
    sys.exit(main())

"""Networks on small problems: toys, fidelity problems and digits, one function per part."""

import math
import warnings
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

import shoal
from shoal.analysis.fidelity import problems, reference
from shoal.analysis.fidelity.study import distances_of
from shoal.core.errors import DataError, ShoalWarning
from shoal.core.tree import rows
from shoal.interaction.bandwidths import Fixed
from shoal.interaction.methods import Method, get
from shoal.models import MLP, Blueprint
from shoal.prediction import Predictive
from shoal.prediction.metrics.detection import auroc
from shoal.training.options.annealing import Constant
from studies.common import test_of
from studies.particles.densities import KERNELS
from studies.released import LinearDensity

INTERVALS = ((1.5, 2.5), (4.5, 6.0))
"""Where the regression toy has data."""

SIDE_BY_SIDE = ("relu", "tanh")


def method_of(label: str) -> Method:
    """The method of a label NAME[:FORM or STRENGTH][+KERNEL].

    KERNEL `laplace-100` has the fixed width 100 of released code; `linear` is `LinearDensity`.
    """
    label, _, kernel = label.partition("+")
    name, _, form = label.partition(":")
    found = get(name, legacy=form == "legacy", calibrated=form == "calibrated")
    if form[:1].isdigit():
        found = found.with_strength(float(form))
    if not kernel or found.repulsion is None:
        return found
    changed = found.repulsion
    if kernel == "laplace-100":
        changed = replace(changed, bandwidth=Fixed(1e4))
    if kernel == "linear":
        changed = replace(changed, flow=LinearDensity())
    changed = replace(changed, kernel=KERNELS[kernel.partition("-")[0]])
    return replace(found, repulsion=changed)


def fitted(ensemble: shoal.Ensemble, data: Any, label: str, **settings: Any) -> shoal.Run:
    """`shoal.fit` without its remarks: the tables show negligible pushes."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ShoalWarning)
        return shoal.fit(ensemble, data, method=method_of(label), progress=False, **settings)


def force_ratio(run: shoal.Run) -> dict[str, float]:
    """Push / drive in the last epoch."""
    last = run.history[-1]
    return {"ratio": last["push"] / last["drive"] if last["drive"] else math.nan}


# --- toys -----------------------------------------------------------------------------------------


def toy(problem: str, method: str, members: int, seed: int) -> dict[str, float]:
    """A toy with published settings, but fewer steps; NAME:calibrated targets the posterior."""
    points = {"test_points": 1400} if problem == "regression" else {"test_points": 200}
    data = shoal.data.load({"name": f"toy-{problem}", "seed": seed, **points})
    build = Blueprint(MLP((50, 50)), data.input_shape, data.outputs)
    settings: dict[str, Any] = {"lr": 1e-2, "steps": 1000, "batch_size": 64, "seed": seed}
    settings["schedule"] = "cosine"
    if problem == "regression":
        published = not method.endswith("calibrated")
        settings["likelihood"] = shoal.likelihoods.Gaussian(1.0 if published else 0.25)
        settings["temperature"] = 1 / members if published else 1.0
    if method.endswith("calibrated"):
        settings |= {"batch_size": len(data.train.x), "steps": 500, "lr": 3e-2}
    run = fitted(shoal.Ensemble.init(build, members, seed), data, method, **settings)
    return curve_scores(run, data) if problem == "regression" else plane_scores(run, data)


def curve_scores(run: shoal.Run, data: shoal.Dataset) -> dict[str, float]:
    """NLL, coverage and standard deviation, on and off the data, with the true noise."""
    x, y = test_of(data).x, test_of(data).y
    inside = torch.zeros(len(x), dtype=torch.bool)
    for low, high in INTERVALS:
        inside |= (x[:, 0] >= low) & (x[:, 0] <= high)
    found = force_ratio(run)
    for place, there in (("on", inside), ("off", ~inside)):
        outputs = shoal.predict(run, x[there]).members
        pred = Predictive(outputs, shoal.likelihoods.Gaussian(0.25))
        error = (pred.mean[:, 0] - y[there].flatten()).abs()
        found |= {
            f"nll_{place}": shoal.evaluate(pred, y[there])["nll"],
            f"coverage_{place}": float((error <= 1.96 * pred.stddev[:, 0]).float().mean()),
            f"std_{place}": float(outputs[..., 0].std(0).mean()),
            f"rmse_{place}": float(error.square().mean().sqrt()),
        }
    return found


def plane_scores(run: shoal.Run, data: shoal.Dataset) -> dict[str, float]:
    """Divergence from the true class probabilities, and OOD detection.

    The classes are five Gaussians of unit variance on a ring of radius 5, so that the true
    probabilities are known everywhere.
    """
    turns = 2 * math.pi * torch.arange(5) / 5
    means = 5 * torch.stack([turns.cos(), turns.sin()], -1)
    at = {"test": test_of(data).x, **{name: split.x for name, split in data.ood.items()}}
    found, preds = force_ratio(run), {}
    for name, x in at.items():
        preds[name] = pred = shoal.predict(run, x)
        true = (-torch.cdist(x, means).square() / 2).log_softmax(-1)
        gap = true - pred.probs.clamp(min=1e-30).log()
        found[f"kl_{name}"] = float((true.exp() * gap).sum(-1).mean())
        found[f"entropy_{name}"] = float(pred.entropy().mean())
        if name != "test":
            found[f"auroc_{name}"] = auroc(preds["test"].entropy(), pred.entropy())
    return found | {"nll": shoal.evaluate(preds["test"], test_of(data).y)["nll"]}


# --- fidelity problems ----------------------------------------------------------------------------


def fidelity(problem: str, method: str, members: int, seed: int) -> dict[str, float]:
    """Distances to the true posterior; METHOD may end in /one by one, for a grown ensemble."""
    label, _, procedure = method.partition("/")
    task = problems.make(problem)
    settings: dict[str, Any] = {
        "likelihood": task.likelihood, "prior": task.prior, "steps": 400, "lr": 0.1, "seed": seed,
        "batch_size": len(task.x), "schedule": "cosine", "engine": "vmap",
    }  # fmt: skip
    run = _procedure(task.build, (task.x, task.y), label, members, procedure, settings)
    flat = torch.cat([rows(tensor.detach()) for tensor in run.ensemble.weights.values()], 1)
    return distances_of(task, reference.load(task), flat)


def _procedure(build, data, label, members, procedure, settings):
    """All members at once, or one after the other with earlier members frozen."""
    if procedure != "one by one":
        return fitted(
            shoal.Ensemble.init(build, members, settings["seed"]), data, label, **settings
        )
    run = fitted(shoal.Ensemble.init(build, 1, settings["seed"]), data, label, **settings)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ShoalWarning)
        for _ in range(members - 1):
            run = shoal.grow(run, 1, data=data, progress=False)
    return run


# --- digits ---------------------------------------------------------------------------------------


def digits(problem: str, method: str, members: int, seed: int) -> dict[str, float]:
    """Small perceptrons on the digits.

    METHOD is LABEL/WORDS with words `one by one`, `adv EPSILON`, `batchnorm`, `relu`, `tanh` or
    `mixed` (half of the members of each activation), or `hot`: prior 0.5 and a hundredth of the
    drive, as in the released code for MNIST.
    """
    label, *words = method.split("/")
    data = shoal.data.load({"name": "digits", "seed": seed})
    settings: dict[str, Any] = {"lr": 5e-3, "epochs": 30, "schedule": "cosine", "seed": seed}
    for word in words:
        settings |= {"adversarial": float(word[4:])} if word.startswith("adv ") else {}
        settings |= _HOT if word == "hot" else {}
    build = _builds(words, data, members)
    procedure = "one by one" if "one by one" in words else ""
    try:
        if isinstance(build, list):
            run = fitted(shoal.Ensemble.init(build, seed=seed), data, label, **settings)
        else:
            run = _procedure(build, data, label, members, procedure, settings)
    except DataError:  # all members diverged
        return {"diverged": 1.0}
    return image_scores(run, data, "photographs") | _distances(run, test_of(data).x, words)


_HOT = {"prior": shoal.priors.Gaussian(0.5), "annealing": Constant(0.01), "lr": 1e-2}


def _builds(words, data, members):
    """A blueprint, or two with half of the members each."""
    norm = "batch" if "batchnorm" in words else None
    shape = data.input_shape, data.outputs
    if "mixed" in words:
        return [(Blueprint(MLP((100, 100), kind), *shape), members // 2) for kind in SIDE_BY_SIDE]
    kind = next((word for word in words if word in SIDE_BY_SIDE), "relu")
    return Blueprint(MLP((100, 100), kind, norm), *shape)


def image_scores(run: shoal.Run, data: shoal.Dataset, ood: str) -> dict[str, float]:
    """Scores on test images, rotated images and OOD images."""
    test, other = (shoal.predict(run, x) for x in (test_of(data).x, data.ood[ood].x))
    found = force_ratio(run)
    scores = shoal.evaluate(test, test_of(data).y)
    found |= {name: scores[name] for name in ("accuracy", "nll", "ece", "effective_functions")}
    for name in ("entropy", "mutual_information"):
        found[f"auroc_{name}"] = auroc(*(getattr(each, name)() for each in (test, other)))
    found["entropy_ratio"] = float(other.entropy().mean() / test.entropy().mean())
    rotated = data.shifts["rotated-30"]
    shifted = shoal.evaluate(shoal.predict(run, rotated.x), rotated.y)
    return found | {f"rotated_{name}": shifted[name] for name in ("accuracy", "nll")}


def _distances(run: shoal.Run, x: Tensor, words: list[str]) -> dict[str, float]:
    """Mean squared distance of two members' logits per image, and where it comes from.

    `shift_share` is the share of a constant added to all logits of an image, which no probability
    sees. `between` and `within` are without that constant: pairs of members with different and
    with equal architecture.
    """
    outputs = shoal.predict(run, x).members
    seen = outputs - outputs.mean(-1, keepdim=True)
    whole, d2 = (torch.cdist(z.flatten(1), z.flatten(1)).square() / len(x) for z in (outputs, seen))
    found = {"shift_share": float(1 - d2.sum() / whole.sum())}
    if "mixed" not in words:
        return found
    half = len(outputs) // 2
    apart = ~torch.eye(half, dtype=torch.bool)
    within = torch.stack([d2[:half, :half][apart], d2[half:, half:][apart]]).mean()
    return found | {"between": float(d2[:half, half:].mean()), "within": float(within)}

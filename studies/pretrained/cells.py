"""Cells of the pre-trained study: one method, number of training images and seed each.

All members of a fit see the same batches. They differ in their random heads and adapters.
"""

# Libraries of this study alone.
# pyright: reportMissingImports=false

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import shoal
from shoal.prediction import metrics
from shoal.prediction.predictive import Predictive
from studies.pretrained import images, network

__all__ = ["CHOICES", "CHOICE_SEED", "LORA_CHOICES", "METHODS", "Study", "pick"]

METHODS = ("fine-tuned", "heads", "laplace", "lora", "heads-repelled", "lora-repelled")
"""`fine-tuned` gives the rows of one network and of five."""
CHOICE_SEED = 7
"""Its 1,000 images are not those of seeds 0 to 4."""
CHOICES = [
    {"points": points, "strength": strength}
    for points in ("batch", "shuffled", "mixed")
    for strength in (0.1, 1.0, 10.0)
]
LORA_CHOICES = [c for c in CHOICES if c["points"] != "batch" and c["strength"] >= 1.0]
"""Fewer, because each costs a training of the network."""
TARGETS = ("*_expand_conv", "*_project_conv", "*_conv_head")
"""Convolutions of one pixel; those of more pixels pad inside their forward pass."""
POINTS = 64


@dataclass
class Study:
    """Data, network and sizes.

    Attributes:
        data: the images.
        net: the pre-trained network.
        features: features of a set by its name, computed once.
        device: device of training and evaluation.
        quick: tiny sizes.
    """

    data: images.Images
    net: network.Lite0
    features: Callable[[str], Tensor]
    device: str
    quick: bool = False

    def run(self, method: str, size: int, seed: int, choice: dict) -> Iterator[tuple[str, Any]]:
        """Train, evaluate, and give (name of the row, scores)."""
        kind = method.partition("-repelled")[0]
        if kind in ("heads", "laplace"):  # computed once for all cells, outside their cost
            for name in ("train", *images.JUDGES, choice.get("points", "batch")):
                _ = self.features(name) if name != "batch" else None
        begun = time.monotonic()
        if self.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        made = self._trained(kind, size, seed, choice)
        cost = {"training_seconds": time.monotonic() - begun, **made.cost}
        if self.device == "cuda":
            cost["peak_bytes"] = float(torch.cuda.max_memory_allocated())
        found = {name: made.predict(name) for name in images.JUDGES}
        if kind != "fine-tuned":
            yield method, self._scores(found) | cost
            return
        alone = {name: Predictive(p.members[:1], p.likelihood) for name, p in found.items()}
        # All five train together; one network is counted with a fifth of the seconds and bytes.
        share = {name: value / len(found["test"].members) for name, value in cost.items()}
        share.pop("peak_bytes", None)
        yield "fine-tuned-1", self._scores(alone) | share
        yield "fine-tuned-5", self._scores(found) | cost

    def held(self, kind: str, size: int, choice: dict) -> dict[str, float]:
        """What a choice gives on held-out training images and their shifted copies."""
        made = self._trained(kind, size, CHOICE_SEED, choice)
        clean, shifted = made.predict("held"), made.predict("shifted")
        y = self.data.labels["held"]
        found = {f"held_{name}": value for name, value in _labelled(clean, y).items()}
        found |= {f"shifted_{name}": value for name, value in _labelled(shifted, y).items()}
        return found | _detection(clean, shifted) | made.cost

    def _trained(self, kind: str, size: int, seed: int, choice: dict) -> "Trained":
        if kind == "laplace":
            return self._laplace(size, seed)
        if kind == "heads":
            return self._heads(size, seed, choice, members=8 if self.quick else 100)
        x, y = self._some(*self.data.training(size, seed))
        members = 2 if self.quick else 5
        if kind == "lora":
            build: Any = shoal.adapters.lora(self.net, rank=4, targets=TARGETS)
        else:
            build = self._fresh
        ensemble = shoal.Ensemble.init(build, members=members, seed=seed)
        run = shoal.fit(
            ensemble,
            (x.float() / 255, y),
            method=self._method(choice, lambda name: self.data[name].float() / 255),
            lr=3e-4 if kind == "fine-tuned" else 1e-3,
            schedule="cosine",
            epochs=1 if self.quick else 15 if size else 2,
            batch_size=32 if self.quick else 256,
            seed=seed,
            device=self.device,
            precision="bfloat16" if self.device == "cuda" else None,
            progress=False,
        )

        def predict(name: str) -> Predictive:
            inputs = self._some(self.data[name])[0].float() / 255
            return shoal.predict(run, inputs, batch_size=1024)

        return Trained(predict, _cost(run))

    def _heads(self, size: int, seed: int, choice: dict, members: int) -> "Trained":
        """Heads on features, which is what `shoal.adapters.last_layer` with cache=True trains."""
        x, y = self._training_features(size, seed)
        ensemble = shoal.Ensemble.init(
            lambda: nn.Linear(network.FEATURES, 10), members=members, seed=seed
        )
        run = shoal.fit(
            ensemble,
            (x, y),
            method=self._method(choice, self.features),
            lr=1e-3,
            schedule="cosine",
            epochs=1 if self.quick else 60 if size else 15,
            batch_size=32 if self.quick else 256,
            seed=seed,
            device=self.device,
            progress=False,
        )

        def predict(name: str) -> Predictive:
            return shoal.predict(run, self.features(name))

        return Trained(predict, _cost(run), run.ensemble)

    def _laplace(self, size: int, seed: int) -> "Trained":
        """A hundred samples of a Kronecker-factored Laplace posterior of one head (laplace-torch).

        Daxberger et al. (2021), arXiv 2106.14806. The prior precision maximises the evidence.
        """
        from laplace import Laplace
        from laplace.curvature import CurvlinopsGGN

        x, y = self._training_features(size, seed)
        point = self._heads(size, seed, {}, members=1)
        head = point.ensemble.member(0).eval()
        loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=500)
        posterior: Any = Laplace(head, "classification", "all", "kron", backend=CurvlinopsGGN)
        posterior.fit(loader)
        posterior.optimize_prior_precision(method="marglik")
        torch.manual_seed(seed)
        samples = posterior.sample(8 if self.quick else 100).detach()
        weights = samples[:, : 10 * network.FEATURES].reshape(-1, 10, network.FEATURES)
        bias = samples[:, 10 * network.FEATURES :]

        def predict(name: str) -> Predictive:
            outputs = torch.einsum("bf,mcf->mbc", self.features(name), weights) + bias[:, None]
            return Predictive(outputs, shoal.likelihoods.Categorical())

        precision = float(posterior.prior_precision.mean())
        stored = 4.0 * samples[0].numel() + 4 * (network.FEATURES**2 + 100)
        return Trained(predict, {"stored_bytes": stored, "prior_precision": precision})

    def _training_features(self, size: int, seed: int) -> tuple[Tensor, Tensor]:
        rows = self.data.rows(size, seed)
        return self.features("train")[rows], self.data.labels["train"][rows]

    def _method(self, choice: dict, inputs: Callable[[str], Tensor]) -> Any:
        if not choice:
            return "ensemble"
        more = {"strength": choice["strength"], "per": "batch"}
        if choice["points"] == "batch":
            return shoal.Repulsion(**more)
        pool = inputs(choice["points"])
        return shoal.Repulsion(points=shoal.points.Unlabelled(pool, count=POINTS), **more)

    def _fresh(self) -> network.Lite0:
        """A copy of the network with its own head; batch normalisation stays in evaluation mode."""
        return network.Lite0(_copied(self.net.trunk))

    def _some(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(t[: 64 if self.quick else None] for t in tensors)

    def _scores(self, found: dict[str, Predictive]) -> dict[str, float]:
        scores = {}
        for name in ("test", "corrupted"):
            y = self.data.targets(name)
            assert y is not None
            y = y[: found[name].members.shape[1]]
            scores |= {f"{name}_{key}": value for key, value in _labelled(found[name], y).items()}
        return scores | _detection(found["test"], found["svhn"])


@dataclass
class Trained:
    """A trained ensemble: its predictions on a set by name, and its cost."""

    predict: Callable[[str], Predictive]
    cost: dict[str, float]
    ensemble: Any = None


def pick(rows: dict[str, dict[str, float]]) -> str:
    """The choice with the highest AUROC of shifted copies by mutual information.

    Only choices within half a point of the plain ensemble's held-out accuracy count. If there are
    none, the most accurate one is taken.
    """
    plain = rows["plain"]["held_accuracy"]
    repelled = [key for key in rows if key != "plain"]
    fair = [key for key in repelled if rows[key]["held_accuracy"] >= plain - 0.005]
    metric = "auroc_mutual_information" if fair else "held_accuracy"
    return max(fair or repelled, key=lambda key: rows[key][metric])


def _labelled(pred: Predictive, y: Tensor) -> dict[str, float]:
    y = y.to(pred.members.device)
    found = {name: getattr(metrics, name)(pred, y) for name in ("accuracy", "nll", "ece", "brier")}
    other = pred.members.argmax(-1) != pred.labels()
    return {**found, "apart_from_mean": float(other.float().mean())}


def _detection(test: Predictive, ood: Predictive) -> dict[str, float]:
    a, b = metrics.scores(test), metrics.scores(ood)
    names = ("entropy", "mutual_information", "disagreement")
    return {f"auroc_{name}": metrics.auroc(a[name], b[name]) for name in names}


def _cost(run: Any) -> dict[str, float]:
    e = run.ensemble
    tensors = [*e.weights.values(), *e.buffers.values(), *e.shared.values()]
    last = run.history[-1]
    ratio = (last.get("push") or 0.0) / last["drive"] if last.get("drive") else 0.0
    return {
        "stored_bytes": float(sum(t.numel() * t.element_size() for t in tensors)),
        "force_ratio": ratio,
    }


def _copied(trunk: nn.Module) -> nn.Module:
    import copy

    made = copy.deepcopy(trunk)
    for p in made.parameters():
        p.requires_grad_(True)
    return made

"""The report of each kind of likelihood shows the measures that fit, and no others."""

import re

import pytest
import torch
from likelihood_examples import drawn, simulated
from torch import nn

import shoal
from shoal.cli.outcome import scores_text
from shoal.data.dataset import Dataset, Split
from shoal.evaluation.evaluate import evaluate_run
from shoal.inference import likelihoods
from shoal.page.report import report


def huber(outputs, y):
    return nn.functional.huber_loss(outputs.squeeze(-1), y, reduction="none")


KINDS = {
    "poisson": (likelihoods.Poisson(), 1),
    "ordinal": (likelihoods.Ordinal(), 3),
    "yes or no": (likelihoods.Bernoulli(), 1),
    "several labels": (likelihoods.Bernoulli(), 3),
    "heavy tails": (likelihoods.StudentT(), 2),
    "peaks": (likelihoods.MixtureDensity(2), 6),
    "custom": (likelihoods.Custom(huber), 1),
}

SHOWN = {
    "poisson": ("NLL", "RMSE", "intervals contain", "Coverage on the test set"),
    "ordinal": ("Accuracy:", "label MAE", "RPS", "Reliability", "Mean confidence"),
    "yes or no": ("Accuracy:", "Brier score", "label AUROC", "Reliability", "ECE"),
    "several labels": ("Accuracy:", "Brier score", "label AUROC", "Reliability", "ECE"),
    "heavy tails": ("NLL", "RMSE", "intervals contain"),
    "peaks": ("NLL", "RMSE", "intervals contain"),
    "custom": ("mean loss", "effective number of functions"),
}

NUMBERS = ("[Aa]ccuracy", "Brier", "[Cc]onfiden", "CRPS")
LABELS = ("RMSE", "intervals contain", "CRPS")
HIDDEN = {
    "poisson": NUMBERS,
    "ordinal": LABELS,
    "yes or no": (*LABELS, "RPS"),
    "several labels": (*LABELS, "RPS"),
    "heavy tails": NUMBERS,
    "peaks": NUMBERS,
    "custom": (*NUMBERS, "NLL", "RMSE", "intervals contain", "standard deviation"),
}


def split(name, seed, shift=0.0, n=200):
    likelihood, width = KINDS[name]
    x = drawn(n, 2, seed=seed) + shift
    maker = likelihoods.Gaussian(0.3) if name == "custom" else likelihood
    outputs = 0.3 + x @ (0.6 * drawn(2, width, seed=9))
    y = simulated(maker, outputs.double(), seed)
    return Split(x, y.squeeze(-1).float() if maker.about.has_classes is False else
                 y.float() if width == 3 and name != "ordinal" else y)  # fmt: skip


@pytest.fixture(scope="module", params=list(KINDS))
def kind(request, tmp_path_factory):
    name = request.param
    likelihood, width = KINDS[name]
    data = Dataset(
        name,
        train=split(name, 0),
        test=split(name, 1),
        shifts={"moved": split(name, 2, 0.5)},
        ood={"far": Split(split(name, 3, 6.0).x)},
    )
    folder, found = tmp_path_factory.mktemp("kinds"), []
    for method in ("ensemble", "f-kde"):
        ensemble = shoal.Ensemble.init(lambda: nn.Linear(2, width), members=3)
        run = shoal.fit(
            ensemble, data, method=method, likelihood=likelihood, epochs=5, lr=0.05,
            out=folder / method, progress=False,
        )  # fmt: skip
        found.append((run, evaluate_run(run, data)))
    return name, found


@pytest.mark.parametrize("drawn", [False, pytest.param(True, marks=pytest.mark.nightly)])
def test_the_page_shows_what_fits(kind, tmp_path, drawn, request):
    pytest.importorskip("matplotlib")
    pytest.importorskip("jinja2")
    if not drawn:
        request.getfixturevalue("undrawn")
    name, runs = kind
    page = report([run.folder for run, _ in runs], tmp_path / "page.html").read_text()
    text = re.sub(r"<(style|script|svg).*?</\1>", " ", page, flags=re.S)
    text = re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", text))
    for words in ("Can I trust it?", "Which method", "far", "under shift", *SHOWN[name]):
        assert words in text
    for words in (r"\bnan\b", *HIDDEN[name]):
        assert re.search(words, text) is None


def test_the_terminal_shows_its_measures(kind):
    _, runs = kind
    run, evaluation = runs[0]
    text = scores_text(evaluation.scores)
    better = [key for key in run.likelihood.about.measures if key in ("nll", "loss", "label_mae")]
    assert better and all(key.replace("_", " ") in text for key in better)
    assert all(torch.isfinite(torch.tensor(value)) for value in evaluation.test.values())

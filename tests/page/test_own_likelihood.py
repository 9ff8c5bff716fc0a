"""A new likelihood is one class: training, prediction, metrics and the page follow from it."""

import re
from dataclasses import dataclass, replace
from typing import ClassVar

import pytest
import torch
from torch import Tensor, nn

import shoal
from shoal.cli.outcome import scores_text
from shoal.core.errors import ConfigError, DataError
from shoal.data.dataset import Dataset, Split
from shoal.evaluation.evaluate import evaluate_run
from shoal.inference.likelihoods import Likelihood, Task, registry, task_of
from shoal.page.report import report


@dataclass(frozen=True)
class Poisson(Likelihood):
    """Counts: y ~ Poisson(exp f), log p(y | f) = y f - exp f - log y!."""

    about: ClassVar[Task] = Task("counts", measures=("nll", "rmse"), under_shift=("nll", "rmse"))

    def log_prob(self, outputs: Tensor, y: Tensor) -> Tensor:
        y = (y.unsqueeze(-1) if y.ndim == 1 else y).to(outputs.dtype)
        return (y * outputs - outputs.exp() - (y + 1).lgamma()).sum(-1)

    def mean(self, outputs: Tensor) -> Tensor:
        return outputs.exp()

    def variance(self, outputs: Tensor) -> Tensor:
        return outputs.exp()

    def check(self, y: Tensor, outputs: int) -> None:
        if bool((y < 0).any()):
            raise DataError("counts are 0, 1, 2, ...; drop the negative ones")
        super().check(y, outputs)


@pytest.fixture(scope="module", autouse=True)
def registered():
    """As the decorator does it, but not for the laws that other tests prove of the registry."""
    registry.register("test-poisson")(Poisson)
    yield
    del registry._entries["test-poisson"], registry._citations["test-poisson"]


def counts(n=300, seed=0, shift=0.0):
    random = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 2, generator=random)
    return x, torch.poisson((1 + x[:, 0] + shift).exp(), generator=random).long()


@pytest.fixture(scope="module")
def data():
    return Dataset(
        "visits",
        train=Split(*counts()),
        test=Split(*counts(seed=1)),
        shifts={"busier": Split(*counts(seed=2, shift=0.5))},
        ood={"far": Split(4 + counts(seed=3)[0])},
    )


@pytest.fixture(scope="module")
def runs(data, tmp_path_factory):
    folder, found = tmp_path_factory.mktemp("counts"), []
    for method in ("ensemble", "f-kde"):
        ensemble = shoal.Ensemble.init(lambda: nn.Linear(2, 1), members=3)
        run = shoal.fit(
            ensemble, data, method=method, likelihood="test-poisson", epochs=40, lr=0.05,
            out=folder / method, progress=False,
        )  # fmt: skip
        evaluate_run(run, data)
        found.append(run)
    return found


def test_it_learns_the_rate(runs):
    weight, bias = (runs[0].ensemble.weights[name].detach() for name in ("weight", "bias"))
    torch.testing.assert_close(weight.mean(0)[0], torch.tensor([1.0, 0.0]), atol=0.1, rtol=0)
    torch.testing.assert_close(bias.mean(0), torch.tensor([1.0]), atol=0.1, rtol=0)


def test_predictions_follow_from_mean_variance_and_density(runs):
    x, y = counts(seed=1)
    pred = shoal.predict(runs[0], x)
    rates = pred.members.exp()[..., 0]
    torch.testing.assert_close(pred.mean, rates.mean(0))
    torch.testing.assert_close(pred.variance, rates.mean(0) + rates.var(0, correction=0))
    each = torch.distributions.Poisson(rates).log_prob(y.float())
    torch.testing.assert_close(pred.log_prob(y), each.exp().mean(0).log(), atol=1e-4, rtol=1e-4)
    with pytest.raises(ConfigError, match="counts has no class probabilities"):
        pred.member_probs()


def test_the_metrics_are_those_of_numbers(runs):
    x, y = counts(seed=1)
    scores = shoal.evaluate(shoal.predict(runs[0], x), y, ood=shoal.predict(runs[0], 4 + x))
    assert {"nll", "rmse", "sharpness", "effective_functions", "auroc_variance"} <= scores.keys()
    assert not {"accuracy", "ece", "entropy", "coverage_90", "crps"} & scores.keys()


def test_its_folder_loads(runs):
    loaded = shoal.load(runs[0].folder, lambda: nn.Linear(2, 1))
    assert loaded.likelihood == Poisson()


def test_its_targets_are_checked():
    x, y = counts()
    with pytest.raises(DataError, match="negative"):
        shoal.fit(shoal.Ensemble.init(lambda: nn.Linear(2, 1), members=2), (x, y.float() - 1),
                  likelihood=Poisson(), progress=False)  # fmt: skip


@pytest.mark.parametrize("method", ["forde", "kde", "f-svgd"])
def test_every_kind_of_method_trains_it(method):
    ensemble = shoal.Ensemble.init(lambda: nn.Linear(2, 1), members=3)
    run = shoal.fit(ensemble, counts(40), method=method, likelihood="test-poisson", epochs=2,
                    progress=False)  # fmt: skip
    assert all(bool(tensor.isfinite().all()) for tensor in run.ensemble.weights.values())


def test_the_page_speaks_of_counts_and_not_of_classes(runs, tmp_path):
    pytest.importorskip("matplotlib")
    pytest.importorskip("jinja2")
    page = report([run.folder for run in runs], tmp_path / "page.html").read_text()
    text = re.sub(r"<(style|script|svg).*?</\1>", " ", page, flags=re.S)
    text = re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", text))
    for words in ("Can I trust it?", "NLL", "RMSE", "Which method", "far", "under shift"):
        assert words in text
    for words in ("[Aa]ccuracy", "intervals contain", r"\bnan\b", "Brier", "[Cc]onfiden"):
        assert re.search(words, text) is None


def test_a_task_may_have_no_measure_under_shift(data, tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    pytest.importorskip("jinja2")
    monkeypatch.setattr(Poisson, "about", replace(Poisson.about, under_shift=()))
    ensemble = shoal.Ensemble.init(lambda: nn.Linear(2, 1), members=2)
    run = shoal.fit(ensemble, data, method="ensemble", likelihood="test-poisson", epochs=2,
                    out=tmp_path / "run", progress=False)  # fmt: skip
    evaluate_run(run, data)
    page = report([run.folder], tmp_path / "page.html").read_text()
    assert "RMSE" in page and "RMSE under shift" not in page


def test_the_terminal_shows_its_measures(runs, data):
    text = scores_text(evaluate_run(runs[0], data).scores)
    assert "nll" in text and "rmse" in text and "accuracy" not in text


def test_a_file_describes_the_task_without_the_class():
    assert task_of(Poisson.about.plain) == Poisson.about
    with pytest.raises(ConfigError, match="no likelihood has the task 'ranking'"):
        task_of("ranking")
    with pytest.raises(ConfigError, match="description of the task is not valid"):
        task_of({"name": "counts", "colour": "red"})


@pytest.mark.parametrize(
    "field, value", [("measures", ["nll", {}]), ("measures", "nll"), ("kinds", 3), ("name", None)]
)
def test_a_task_of_other_things_than_text_is_refused(field, value):
    with pytest.raises(ConfigError, match=f"{field} is not text"):
        task_of(Poisson.about.plain | {field: value})

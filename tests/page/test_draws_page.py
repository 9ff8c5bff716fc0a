"""The page and the analyses of a run of many draws."""

import re

import pytest
import torch
from small_runs import assert_one_sentence
from torch import nn

import shoal
from shoal.core.errors import ConfigError
from shoal.page.report_data import load_report_data


@pytest.fixture(scope="module")
def runs():
    """Three trained members, and 90 draws of their chains."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(40, 2, generator=generator)
    y = x.sum(1) + 0.3 * torch.randn(40, generator=generator)
    ensemble = shoal.Ensemble.init(lambda: nn.Linear(2, 1), members=3)
    likelihood = shoal.likelihoods.Gaussian(0.3)
    run = shoal.fit(ensemble, (x, y), likelihood=likelihood, steps=20, progress=False)
    return run, shoal.draw(run, draws=30, warmup=10, thin=1, progress=False), (x, y)


@pytest.fixture(scope="module")
def pages(runs, tmp_path_factory):
    run, drawn, data = runs
    folder = tmp_path_factory.mktemp("pages")
    both = shoal.report([run, drawn], folder / "both.html", data=data)
    alone = shoal.report(drawn, folder / "alone.html", data=data)
    return [re.sub(r"<[^>]*>", " ", page.read_text()) for page in (alone, both)]


def test_a_page_names_chains_and_says_which_draws_are_compared(pages):
    alone, both = pages
    assert "ensemble draws, 3 chains of 30" in alone and "64 of 90 members" in alone
    assert "Training diverged" not in alone
    assert "draws.chains none" not in both and "ensemble draws" in both


def test_no_table_and_no_tensor_has_a_row_for_every_draw(runs, pages):
    _, drawn, _ = runs
    assert all("member 89" not in page and "chain 3" not in page for page in pages)
    samples = drawn.results["evaluation"].samples
    assert samples["test/affinity"].shape == (64, 64)
    assert not [name for name, tensor in samples.items() if 90 in tensor.shape]


def test_advice_trains_the_members_at_which_chains_begin(runs):
    _, drawn, _ = runs
    record = load_report_data([drawn]).entries[0]
    assert record.members == 90 and record.trained["members"] == 3
    assert "draws" not in record.trained and record.trained["model"][0]["members"] == 3


def test_evidence_of_draws_is_refused_in_a_sentence(runs):
    _, drawn, data = runs
    with pytest.raises(ConfigError, match="draws are not maxima") as caught:
        shoal.evidence(drawn, data)
    assert_one_sentence(caught.value)

"""Calibrated training through `fit`, and its settings in a run."""

import pytest
import torch
from torch import nn

import shoal
from shoal.experiment.build import check_names
from shoal.experiment.config import load_config


@pytest.mark.parametrize("method", ["kde", "f-kde"])
def test_a_calibrated_run_says_so_and_can_be_repeated(method):
    x = torch.linspace(-1, 1, 12)[:, None]

    def run(**settings):
        ensemble = shoal.Ensemble.init(lambda: nn.Linear(1, 1), members=4, seed=0)
        return shoal.fit(ensemble, (x, 2 * x[:, 0]), steps=5, progress=False, **settings)

    first = run(method=method, calibrated=True)
    assert first.config["calibrated"] and first.config["method"] == method
    functional = method.startswith("f-")
    assert (first.config["prior"]["name"] == "gaussian-process") == functional
    kept = {key: first.config[key] for key in ("method", "calibrated", "prior", "likelihood", "lr")}
    again = run(**kept)
    assert torch.equal(again.ensemble.weights["weight"], first.ensemble.weights["weight"])


def test_calibrated_repulsion_is_felt():
    """Beside it the published push is a small part of the drive."""
    x = torch.randn(40, 3, generator=torch.Generator().manual_seed(0))
    ratios = {}
    for form in ("legacy", "calibrated"):
        ensemble = shoal.Ensemble.init(lambda: nn.Linear(3, 2), members=6, seed=0)
        network = {"method": "kde", form: True, "prior": "fan-in"}
        run = shoal.fit(ensemble, (x, (x[:, 0] > 0).long()), steps=30, progress=False, **network)
        ratios[form] = run.history[-1]["ratio"]
    assert ratios["calibrated"] > 3 * ratios["legacy"]


def test_a_config_can_ask_for_it():
    config = load_config("digits", ["calibrated=true", "method=f-kde"])
    assert config.calibrated
    check_names(config)
    with pytest.raises(shoal.ConfigError, match="give legacy or calibrated"):
        check_names(load_config("digits", ["calibrated=true", "legacy=true"]))

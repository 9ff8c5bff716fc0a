"""Data sets from names and tables, and the tables they remember."""

import pytest
import torch

import shoal
from shoal.core.errors import ConfigError


def test_the_spec_is_complete_and_makes_the_same_data():
    first = shoal.data.load({"name": "toy-classification", "points": 7})
    assert first.spec is not None and first.spec["points"] == 7
    assert first.spec.keys() == {"name", "seed", "points", "test_points", "ood_points"}
    again = shoal.data.load(first.spec)
    assert again.spec == first.spec
    assert torch.equal(again.train.x, first.train.x)


def test_a_name_alone_takes_the_defaults():
    data = shoal.data.load("toy-regression")
    assert data.spec is not None and data.spec["noise_std"] == 0.25


@pytest.mark.parametrize(
    "spec, sentence",
    [
        ("toy-regresion", "did you mean 'toy-regression'"),
        ({"points": 3}, "data needs a name"),
        ({"name": "toy-regression", "point": 3}, "did you mean 'points'"),
        ({"name": "toy-regression", "points": "3"}, "data.points must be a whole number"),
        (3, "data must be a name or a table"),
    ],
)
def test_mistakes(spec, sentence):
    with pytest.raises(ConfigError, match=sentence):
        shoal.data.load(spec)


def test_a_run_remembers_its_data():
    data = shoal.data.load({"name": "toy-classification", "points": 5})
    ensemble = shoal.Ensemble.init(lambda: torch.nn.Linear(2, 5), members=2)
    run = shoal.fit(ensemble, data, method="ensemble", steps=1, progress=False)
    assert run.config["data"] == data.spec

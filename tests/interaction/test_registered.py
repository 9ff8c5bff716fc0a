"""Everything that is registered can be named, cited, written down and made again."""

import dataclasses

import pytest

import shoal
from shoal.core.bibliography import BIBLIOGRAPHY
from shoal.interaction import bandwidths
from shoal.training.options import annealing, torch_schedules

REGISTRIES = {
    "kernels": shoal.kernels.registry,
    "bandwidths": bandwidths.registry,
    "estimators": shoal.estimators.registry,
    "flows": shoal.flows.registry,
    "spaces": shoal.spaces.registry,
    "points": shoal.points.registry,
    "likelihoods": shoal.likelihoods.registry,
    "priors": shoal.priors.registry,
    "annealing": annealing.registry,
    "schedules": torch_schedules.schedules,
}
EVERY = [
    pytest.param(registry, name, id=f"{kind} {name}")
    for kind, registry in REGISTRIES.items()
    for name in registry
]


@pytest.mark.parametrize(("registry", "name"), EVERY)
def test_every_entry_has_a_sentence_and_known_sources(registry, name):
    assert registry.summary(name).endswith(".")
    assert set(registry.cite(name)) <= set(BIBLIOGRAPHY)


@pytest.mark.parametrize(("registry", "name"), EVERY)
def test_every_entry_is_a_frozen_value(registry, name):
    entry = registry.make(name)
    assert entry == registry.make({"name": name})
    with pytest.raises(dataclasses.FrozenInstanceError):
        entry.another = 1


@pytest.mark.parametrize(("registry", "name"), EVERY)
def test_written_down_and_made_again(registry, name):
    entry = registry.make(name)
    spec = registry.spec(entry)
    assert spec["name"] == name
    assert registry.make(spec) == entry


@pytest.mark.parametrize("registry", REGISTRIES.values(), ids=REGISTRIES)
def test_a_misspelt_name_or_setting_is_answered(registry):
    name = registry.names()[0]
    with pytest.raises(shoal.ConfigError, match="did you mean|choose from"):
        registry.make(name + "x")
    with pytest.raises(shoal.ConfigError, match="has no setting 'colour'"):
        registry.make({"name": name, "colour": 1})

"""The table of methods."""

import dataclasses

import pytest

import shoal
from shoal.core.bibliography import BIBLIOGRAPHY
from shoal.core.errors import ConfigError
from shoal.interaction.bandwidths import Median

methods = shoal.methods
NAMES = list(methods.METHODS)


@pytest.mark.parametrize("name", NAMES)
def test_every_method_has_a_sentence_and_known_sources(name):
    method = methods.get(name)
    assert method.name == name
    assert method.summary.endswith(".")
    assert method.cite and set(method.cite) <= set(BIBLIOGRAPHY)


@pytest.mark.parametrize("name", NAMES)
def test_function_space_methods_begin_with_f(name):
    repulsion = methods.get(name).repulsion
    assert (repulsion is not None and repulsion.space.base == "outputs") == name.startswith("f-")


@pytest.mark.parametrize("name", [name for name in NAMES if name != "ensemble"])
def test_published_form(name):
    method = methods.get(name, legacy=True)
    assert method.legacy and not methods.get(name).legacy
    assert method.repulsion.bandwidth == Median(legacy=True)
    assert method.functional_prior == name.startswith("f-")
    assert not methods.get(name).functional_prior
    flow = method.repulsion.flow
    if name.endswith("ssge"):
        assert flow.estimator == shoal.estimators.SSGE(share=1.0, eta=0.01)
    elif name.endswith("sge"):
        assert flow.estimator == shoal.estimators.SGE(eta=0.01)


def test_strength():
    kde = methods.get("kde")
    assert kde.with_strength(2.5).repulsion == dataclasses.replace(kde.repulsion, strength=2.5)
    assert kde.with_strength(None) is kde
    assert methods.get("ensemble").with_strength(2.0).repulsion is None


def test_a_misspelt_name_is_answered_with_the_nearest():
    with pytest.raises(ConfigError, match="no method called 'f-kd'; did you mean 'f-kde'"):
        methods.get("f-kd")

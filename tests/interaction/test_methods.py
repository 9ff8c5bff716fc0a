"""The table of methods."""

import dataclasses

import pytest

import shoal
from shoal.core.bibliography import BIBLIOGRAPHY
from shoal.core.errors import ConfigError
from shoal.interaction.bandwidths import Median, MemberMedian
from shoal.interaction.spaces import innermost

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


@pytest.mark.parametrize("name", [name for name in NAMES if name.startswith("forde")])
def test_published_form_of_input_gradients(name):
    method, corrected = methods.get(name, legacy=True), methods.get(name)
    assert method.legacy and not method.functional_prior
    assert method.repulsion.bandwidth == MemberMedian()
    assert method.repulsion.per == corrected.repulsion.per == "batch"
    rotated = name in ("forde", "forde-tuned")
    assert ("pca-uncentred" in repr(method.repulsion)) == rotated
    assert "uncentred" not in repr(corrected.repulsion)


def test_settings_reach_into_the_space():
    method = methods.get("forde-tuned", fraction=0.25, alpha=0.4)
    assert method.repulsion.space.alpha == 0.4
    assert innermost(method.repulsion.space).fraction == 0.25
    assert method.settings == (("alpha", 0.4), ("fraction", 0.25))
    with pytest.raises(ConfigError, match="'forde' has no setting 'fractoin'; did you mean 'frac"):
        methods.get("forde", fractoin=0.5)
    with pytest.raises(ConfigError, match="'ensemble' has no setting 'alpha'"):
        methods.get("ensemble", alpha=0.5)
    with pytest.raises(ConfigError, match="method.fraction must be a number"):
        methods.get("forde", fraction="half")
    with pytest.raises(ConfigError, match="fraction must be above 0 and at most 1"):
        methods.get("forde", fraction=0.0)
    with pytest.raises(ConfigError, match="alpha must lie between 0 and 1"):
        methods.get("forde-tuned", alpha=2.0)
    with pytest.raises(ConfigError, match="no target 'logits'; did you mean 'logit'"):
        methods.get("forde", target="logits")


def test_repulsion_is_counted_per_data_or_per_batch():
    with pytest.raises(ConfigError, match="per 'data' or per 'batch', not 'epoch'"):
        shoal.Repulsion(per="epoch")
    with pytest.raises(ConfigError, match="weights do not depend on a batch"):
        shoal.Repulsion(shoal.spaces.Weights(), per="batch")


PUBLISHED = [name for name in NAMES if name != "ensemble" and not name.startswith("forde")]


@pytest.mark.parametrize("name", PUBLISHED)
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

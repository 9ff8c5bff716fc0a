"""Annealing factors, point by point from their formulas."""

import functools
import math

import numpy as np
import pytest
import torch
from small_runs import make_old

import shoal
from shoal.core.errors import ConfigError
from shoal.training.options.annealing import (
    Constant,
    Cyclic,
    Hyperbolic,
    LinearAnnealing,
    registry,
    stored_annealing,
)

EVERY = [registry[name](gamma=gamma) for name in registry for gamma in (1.0, 0.4)]
STEPS = 100


def values(annealing, steps=STEPS):
    return [annealing(step, steps) for step in range(steps)]


@pytest.mark.parametrize("annealing", EVERY, ids=repr)
@pytest.mark.parametrize("steps", [1, 2, 3, 7, 100])
def test_factors_are_finite_and_not_negative(annealing, steps):
    for value in values(annealing, steps):
        assert math.isfinite(value) and 0 <= value <= 1


@pytest.mark.parametrize("annealing", EVERY, ids=repr)
def test_after_the_rise_it_is_gamma(annealing):
    share = getattr(annealing, "share", 0.0)
    assert all(
        annealing(step, STEPS) == annealing.gamma for step in range(int(share * STEPS), STEPS)
    )


@pytest.mark.parametrize("kind", [LinearAnnealing, Hyperbolic, Cyclic])
def test_no_rise_is_constant(kind):
    assert values(kind(gamma=0.3, share=0.0)) == [0.3] * STEPS


def test_constant():
    assert values(Constant(0.01)) == [0.01] * STEPS


@pytest.mark.parametrize("share", [0.02, 0.25, 1.0])
def test_linear(share):
    rise = int(share * STEPS)
    target = [*np.linspace(0, 0.7, rise), *[0.7] * (STEPS - rise)]
    np.testing.assert_allclose(values(LinearAnnealing(0.7, share)), target, rtol=1e-14)


@pytest.mark.parametrize("share", [0.25, 1.0])
def test_hyperbolic(share):
    rise = int(share * STEPS)
    rising = np.tanh((1.3 * np.linspace(0, rise, rise) / rise) ** 10)  # as in the released code
    target = [*rising, *[0.4] * (STEPS - rise)]
    assert values(Hyperbolic(0.4, share, legacy=True)) == pytest.approx(target, rel=1e-14)
    target = [*(0.4 * rising / np.tanh(1.3**10)), *[0.4] * (STEPS - rise)]
    np.testing.assert_allclose(values(Hyperbolic(0.4, share)), target, rtol=1e-14)


@pytest.mark.parametrize("share", [0.25, 0.5, 1.0])
def test_cyclic(share):
    rise = int(share * STEPS)
    period = rise // 5
    target = [((t % period) / period) ** 10 for t in range(rise)] + [0.4] * (STEPS - rise)
    np.testing.assert_allclose(values(Cyclic(0.4, share, legacy=True)), target, rtol=1e-12)
    target = [0.4 * (t % period / (period - 1)) ** 10 for t in range(rise)] + [0.4] * (STEPS - rise)
    np.testing.assert_allclose(values(Cyclic(0.4, share)), target, rtol=1e-12)


def test_cyclic_falls_as_often_as_it_says():
    factors = values(Cyclic(share=1.0, cycles=4))
    assert sum(b < a for a, b in zip(factors, factors[1:], strict=False)) == 3


@pytest.mark.parametrize("steps", [10, 23, 100])
@pytest.mark.parametrize("gamma", [0.01, 1.0, 3.0])
@pytest.mark.parametrize("kind", [LinearAnnealing, Hyperbolic, Cyclic])
def test_a_rise_goes_from_0_to_its_final_value_without_a_jump(kind, gamma, steps):
    factors = values(kind(gamma, share=1.0), steps)
    assert (factors[0], factors[-1], max(factors)) == pytest.approx((0, gamma, gamma), rel=1e-14)
    tops = sum(factor == pytest.approx(gamma) for factor in factors)
    falls = sum(b < a for a, b in zip(factors, factors[1:], strict=False))
    assert (falls == 4 and tops == 5) if kind is Cyclic else falls == 0


def test_a_stored_rise_keeps_the_form_that_it_was_trained_with():
    old = stored_annealing({"name": "hyperbolic", "gamma": 0.4, "share": 0.5})
    assert registry.make(old) == Hyperbolic(0.4, legacy=True)
    for rise in (Hyperbolic(0.4), Cyclic(legacy=True), LinearAnnealing(0.7, of="push")):
        assert registry.make(stored_annealing(registry.spec(rise))) == rise


BUILD = functools.partial(torch.nn.Linear, 3, 3)


def data():
    x = torch.randn(24, 3, generator=torch.Generator().manual_seed(0))
    return x, torch.arange(24) % 3


def run_of(method="kde", **options):
    given = {"epochs": 2, "batch_size": 8, "optimizer": "sgd", "lr": 0.1, "progress": False}
    return shoal.fit(
        shoal.Ensemble.init(BUILD, 4, seed=1), data(), method=method, **given | options
    )


def weights_of(ensemble):
    return torch.cat([tensor.detach().flatten() for tensor in ensemble.weights.values()])


@pytest.mark.parametrize("method", ["kde", "f-kde", "forde", "svgd"])
def test_a_constant_factor_of_the_push_is_a_strength(method):
    ramp = {"name": "linear", "gamma": 0.3, "share": 0.0, "of": "push"}
    ramped = run_of(method, strength=20.0, annealing=ramp).ensemble
    torch.testing.assert_close(
        weights_of(ramped), weights_of(run_of(method, strength=6.0).ensemble)
    )


@pytest.mark.parametrize("engine", ["vmap", "loop", "chunk:2"])
def test_repulsion_grows_from_the_plain_ensemble_to_its_strength(engine):
    ramp = {"name": "linear", "share": 1.0, "of": "push"}
    whole = {"batch_size": 24, "steps": 3, "epochs": None}
    run = run_of(strength=500.0, annealing=ramp, engine=engine, **whole)
    ensemble = shoal.Ensemble.init(BUILD, 4, seed=1)
    stepper = shoal.Stepper(ensemble, 24, method="kde", optimizer="sgd", lr=0.1)
    for factor in (0.0, 0.5, 1.0):
        stepper(data(), strength=500.0 * factor)
    torch.testing.assert_close(weights_of(run.ensemble), weights_of(ensemble))


def test_annealing_of_the_push_needs_repulsion_and_a_known_force():
    with pytest.raises(ConfigError, match="repels nothing"):
        run_of("ensemble", annealing={"name": "linear", "of": "push"})
    with pytest.raises(ConfigError, match="'drive' or of the 'push'"):
        run_of(annealing={"name": "linear", "of": "weights"})


def test_particles_take_a_ramp_too():
    start, wide = torch.randn(5, 2, dtype=torch.float64), LinearAnnealing(share=1.0, of="push")
    density = lambda x: -(x**2).sum()  # noqa: E731
    alone = shoal.sample(density, start, method="ensemble", lr=0.1, optimizer="sgd", steps=1)
    ramped = shoal.sample(
        density, start, method="kde", lr=0.1, optimizer="sgd", steps=1, annealing=wide
    )
    torch.testing.assert_close(ramped, alone)


def test_the_published_form_of_a_method_has_the_published_rise(tmp_path):
    run = run_of(legacy=True, annealing="cyclic", out=tmp_path)
    assert run.config["annealing"]["legacy"] is True
    assert run_of(annealing="cyclic").config["annealing"]["legacy"] is False


@pytest.mark.parametrize("kind", [LinearAnnealing, Hyperbolic, Cyclic])
def test_training_begins_with_repulsion_alone(kind):
    assert kind()(0, STEPS) == 0


def test_an_older_folder_goes_on_with_the_form_that_it_was_trained_with(tmp_path):
    rise = {"name": "hyperbolic", "gamma": 0.4, "share": 1.0}
    run_of(annealing=rise | {"legacy": True}, out=tmp_path)
    make_old(tmp_path)
    path = tmp_path / "config.toml"
    text = path.read_text()
    path.write_text(text.replace(", legacy = true", "").replace("\nlegacy = true", ""))
    assert path.read_text() != text
    assert shoal.load(tmp_path, BUILD).config["annealing"] == {**rise, "legacy": True}
    run_of(annealing=rise | {"legacy": True}, out=tmp_path, resume=True)
    with pytest.raises(ConfigError, match="annealing"):
        run_of(annealing=rise, out=tmp_path, resume=True)

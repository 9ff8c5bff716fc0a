"""Annealing factors, point by point from their formulas."""

import math

import numpy as np
import pytest

from shoal.training.options.annealing import Constant, Cyclic, Hyperbolic, LinearAnnealing, registry

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
    target = [*rising, *[1.0] * (STEPS - rise)]
    np.testing.assert_allclose(values(Hyperbolic(share=share)), target, rtol=1e-14)


@pytest.mark.parametrize("share", [0.25, 0.5, 1.0])
def test_cyclic(share):
    rise = int(share * STEPS)
    period = rise // 5
    target = [((t % period) / period) ** 10 for t in range(rise)] + [1.0] * (STEPS - rise)
    np.testing.assert_allclose(values(Cyclic(share=share)), target, rtol=1e-12)


def test_cyclic_falls_as_often_as_it_says():
    factors = values(Cyclic(share=1.0, cycles=4))
    assert sum(b < a for a, b in zip(factors, factors[1:], strict=False)) == 3


@pytest.mark.parametrize("kind", [LinearAnnealing, Hyperbolic, Cyclic])
def test_training_begins_with_repulsion_alone(kind):
    assert kind()(0, STEPS) == 0

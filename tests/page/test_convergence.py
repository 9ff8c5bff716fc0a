"""Whether a training loss converged, on curves whose answer is known."""

import math

import numpy as np
import pytest

from shoal.page.trend import loss_sentence, loss_trend


def kinds(curve, epochs, noise=0.0, correlation=0.0, draws=100):
    """How often each verdict is given for a curve with noise."""
    rng = np.random.default_rng(0)
    found = []
    for _ in range(draws if noise else 1):
        errors = noise * rng.normal(size=epochs)
        for k in range(1, epochs):
            errors[k] = correlation * errors[k - 1] + math.sqrt(1 - correlation**2) * errors[k]
        found.append(loss_trend(list(curve(np.arange(epochs)) + errors)).kind)
    return {kind: found.count(kind) / len(found) for kind in found}


def to_floor(pace, floor=0.3):
    return lambda t: floor + 2 * np.exp(-t / pace)


@pytest.mark.parametrize("epochs", [8, 12, 20, 30, 100, 300])
@pytest.mark.parametrize("rate", [0.97, 0.99])
def test_a_steady_fall_is_a_fall(epochs, rate):
    assert kinds(lambda t: 2 * rate**t, epochs) == {"falling": 1.0}


@pytest.mark.parametrize("epochs", [8, 12, 20, 30, 100, 300])
@pytest.mark.parametrize("noise", [0.001, 0.003, 0.01])
def test_a_steady_fall_never_converged_whatever_the_noise(epochs, noise):
    assert "converged" not in kinds(lambda t: 2 * 0.97**t, epochs, noise)


@pytest.mark.parametrize("epochs", [20, 30, 100])
@pytest.mark.parametrize("floor", [0.3, 1e3, -2.0, 0.0])
def test_a_decay_to_a_floor_converged_once_it_is_there(epochs, floor):
    assert kinds(to_floor(epochs / 20, floor), epochs) == {"converged": 1.0}
    assert kinds(to_floor(epochs / 2, floor), epochs) == {"falling": 1.0}


def test_an_offset_does_not_hide_a_fall():
    """The loss itself hardly changes, but a third of its fall is in the last third."""
    assert kinds(lambda t: 1000 - t / 30, 30) == {"falling": 1.0}


def test_noise_at_the_floor_needs_epochs():
    assert kinds(to_floor(2), 100, noise=0.003).get("converged", 0) > 0.9
    assert kinds(to_floor(2), 20, noise=0.01).get("unclear", 0) > 0.85


@pytest.mark.parametrize("epochs", [8, 20, 100])
def test_noise_alone_is_no_trend(epochs):
    found = kinds(lambda t: 0.3 + 0 * t, epochs, noise=0.01)
    assert found["unclear"] > 0.85 and "converged" not in found


def test_noise_that_lasts_over_epochs_is_allowed_for():
    found = kinds(to_floor(1), 100, noise=0.01, correlation=0.8, draws=200)
    assert found["unclear"] > 0.6 and found.get("converged", 0) < 0.05


def test_a_rise_is_a_rise():
    assert kinds(lambda t: to_floor(1)(t) + 0.01 * t, 20) == {"rising": 1.0}
    assert kinds(lambda t: to_floor(1)(t) + 0.01 * t, 100, noise=0.01) == {"rising": 1.0}


@pytest.mark.parametrize("losses", [[], [1.0], [1.0, 0.1, 0.1, 0.1], [1.0] * 8 + [math.nan]])
def test_too_short_or_not_a_number(losses):
    assert loss_trend(losses).kind == "short"


def history(losses, **first):
    rows = [{"loss": loss} for loss in losses]
    return [rows[0] | first, *rows[1:]] if rows else []


@pytest.mark.parametrize(
    ("losses", "words"),
    [
        (to_floor(1)(np.arange(30)).tolist(), "The training loss converged."),
        ([0.97**t for t in range(30)], "still falling, by 0.13 nats"),
        ([3.0 + 0.05 * t for t in range(20)], "rising"),
        ([2.3, 1e5, 3e19], "Training diverged: the loss went from 2.3 to 3e+19"),
        ([2.3, 1.0, None], "Training diverged: the loss is not finite"),
        ([2.3, 1.0, 0.5], ""),
        ([], ""),
    ],
)
def test_what_is_said(losses, words):
    told = loss_sentence(history(losses))
    assert words in told if words else told == ""


def test_a_run_that_diverged_in_its_first_epoch_is_known_by_where_it_began():
    falling = [5e4 * 0.9**t for t in range(20)]
    assert "falling" in loss_sentence(history(falling))
    assert "diverged: the loss went from 2.3" in loss_sentence(history(falling, initial_loss=2.3))

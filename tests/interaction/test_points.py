"""Laws of every kind of points, and what each kind draws."""

import dataclasses

import numpy as np
import pytest
import torch
from scipy.stats import beta as beta_distribution
from scipy.stats import kstest

import shoal
from shoal.core.errors import ConfigError
from shoal.core.random import key
from shoal.core.structure import Structured
from shoal.data.batches.augment import CropFlip
from shoal.interaction.points import Unlabelled, beta, points_of, registry
from shoal.training.options.points import statistics


def batch(rows=12):
    return torch.randn(rows, 3, 6, 5, generator=torch.Generator().manual_seed(0))


def pool():
    return 100 + torch.arange(30.0).reshape(-1, 1, 1, 1).expand(30, 3, 6, 5)


def ready(name, x=None, **settings):
    """A kind of points with whatever `fit` gives it."""
    points = registry.make({"name": name, **settings})
    x = batch() if x is None else x
    if hasattr(points, "x"):
        points = dataclasses.replace(points, x=pool())
    if name == "augmented":
        points = dataclasses.replace(points, function=CropFlip(padding=1))
    if hasattr(points, "statistics"):
        found = statistics(points, lambda: x.split(5))
        known = {name.removeprefix("points."): t.to(x.dtype) for name, t in found.items()}
        points = dataclasses.replace(points, statistics=known)
    return points


COUNTED = [name for name in registry if name != "batch"]


@pytest.mark.parametrize("name", list(registry))
def test_points_have_the_shape_and_type_of_the_batch(name):
    x = batch()
    found = ready(name).draw(x, key(0, "points", 3))
    assert found.x.shape == x.shape and found.x.dtype == x.dtype
    assert found.rows.shape == (len(x),) and 0 <= found.rows.min() <= found.rows.max() < len(x)


@pytest.mark.parametrize("count", [1, 5, 40])
@pytest.mark.parametrize("name", COUNTED)
def test_count_is_the_number_of_points(name, count):
    found = ready(name, count=count).draw(batch(), key(0, "points", 3))
    assert len(found.x) == len(found.rows) == count


@pytest.mark.parametrize("name", COUNTED)
def test_draws_depend_on_seed_and_step_alone(name):
    points, x = ready(name), batch()

    def drawn(seed, step):
        torch.rand(3)  # other randomness does not matter
        return points.draw(x, key(seed, "points", step)).x

    assert torch.equal(drawn(1, 2), drawn(1, torch.tensor(2)))
    assert not torch.equal(drawn(1, 2), drawn(1, 3))
    assert not torch.equal(drawn(1, 2), drawn(2, 2))


@pytest.mark.parametrize("name", COUNTED)
@pytest.mark.parametrize("count", [0, -1, 2.5, True])
def test_a_count_that_is_none_is_refused(name, count):
    with pytest.raises(ConfigError, match="count must be a whole number"):
        registry.make({"name": name, "count": count})


def test_noise_has_the_spread_of_the_data():
    x = torch.stack([torch.linspace(0, 1, 4000), torch.linspace(0, 50, 4000)], -1).double()
    points = ready("noise", x, scale=0.5)
    away = points.draw(x, key(0, "points", 0)).x - x
    assert away.mean(0).abs().max() < 0.05 * x.std(0).max()
    torch.testing.assert_close(
        away.std(0) / x.std(0), torch.full((2,), 0.5).double(), rtol=0.05, atol=0
    )
    assert abs(np.corrcoef(away.T.numpy())[0, 1]) < 0.06


def test_a_constant_coordinate_gets_no_noise():
    x = torch.full((50, 2), 0.1)
    x[:, 1] = torch.randn(50)
    away = ready("noise", x).draw(x, key(0, "points", 0)).x - x
    assert (away[:, 0] == 0).all() and (away[:, 1] != 0).any()


@pytest.mark.parametrize("margin", [0.0, 0.25])
def test_uniform_points_fill_the_box(margin):
    x = torch.rand(4000, 2) * torch.tensor([2.0, 10.0]) - torch.tensor([1.0, 0.0])
    found = ready("uniform", x, margin=margin).draw(x, key(0, "points", 0)).x
    low, high = x.amin(0), x.amax(0)
    width = high - low
    place = (found - (low - margin * width)) / ((1 + 2 * margin) * width)
    assert place.min() > -1e-5 and place.max() < 1 + 1e-5
    assert all(kstest(place[:, d].numpy(), "uniform").pvalue > 1e-3 for d in range(2))


def test_mixtures_lie_between_two_different_rows():
    x = torch.eye(6)
    found = ready("mixup", x, count=2000).draw(x, key(0, "points", 0))
    torch.testing.assert_close(found.x.sum(1), torch.ones(2000))
    mixed = (found.x > 0).sum(1)
    assert mixed.max() == 2 and (mixed == 2).float().mean() > 0.99
    assert (found.x[torch.arange(2000), found.rows] > 0).float().mean() > 0.99
    partner = found.x.scatter(1, found.rows[:, None], 0.0).argmax(1)
    assert len(set(((partner - found.rows) % 6).tolist())) == 5  # every other row takes part


@pytest.mark.parametrize("alpha", [0.2, 1.0, 3.0])
def test_shares_of_a_mixture_have_the_beta_distribution(alpha):
    found = beta(alpha, key(3, "points", 0), torch.Size([5000])).numpy()
    assert kstest(found, beta_distribution(alpha, alpha).cdf).pvalue > 1e-3


def test_tiny_and_huge_alpha_stay_numbers():
    for alpha in (1e-6, 1e6):
        found = beta(alpha, key(3, "points", 0), torch.Size([500]))
        assert ((found >= 0) & (found <= 1)).all()


@pytest.mark.parametrize("name", ["unlabelled", "dataset"])
def test_points_of_a_pool_are_rows_of_it(name):
    found = ready(name, count=2000).draw(batch(), key(0, "points", 0))
    assert set(found.x[:, 0, 0, 0].tolist()) == set(pool()[:, 0, 0, 0].tolist())
    assert (found.x == found.x[:, :1, :1, :1]).all()
    assert set(found.rows.tolist()) == set(range(12))


def test_augmented_points_are_crops_of_their_rows():
    x = torch.arange(1.0, 13.0).reshape(-1, 1, 1, 1).expand(12, 1, 4, 4)
    points = dataclasses.replace(ready("augmented", count=50), function=CropFlip(padding=1))
    found = points.draw(x, key(0, "points", 0))
    assert ((found.x == 0) | (found.x == (1.0 + found.rows).reshape(-1, 1, 1, 1))).all()
    assert (found.x == 0).any()


def test_a_batch_of_one_row_has_points():
    for name in registry:
        assert ready(name).draw(batch(1), key(0, "points", 0)).x.isfinite().all()


def test_points_from_a_name_a_table_and_inputs():
    assert points_of("noise") == shoal.points.Noise()
    assert points_of({"name": "noise", "scale": 2.0}) == shoal.points.Noise(2.0)
    given = {"a": torch.zeros(3, 2), "b": torch.zeros(3, 1)}
    assert isinstance(points_of(given), Unlabelled) and points_of(given).x is given
    assert isinstance(points_of(Structured.of(given)), Unlabelled)
    assert shoal.Repulsion(points="mixup").points == shoal.points.Mixup()


def test_a_misspelt_kind_is_answered():
    with pytest.raises(ConfigError, match="did you mean 'noise'"):
        shoal.Repulsion(points="nois")
    with pytest.raises(ConfigError, match="has no setting 'scal'.*did you mean 'scale'"):
        shoal.methods.get("f-kde", points={"name": "noise", "scal": 1.0})
    with pytest.raises(ConfigError, match="method.points.scale must be a number"):
        shoal.methods.get("f-kde", points={"name": "noise", "scale": "wide"})
    with pytest.raises(ConfigError, match="did you mean 'points'"):
        shoal.methods.get("f-kde", point="noise")


@pytest.mark.parametrize(
    "table", [{"name": "noise", "scale": 0.0}, {"name": "mixup", "alpha": -1.0},
              {"name": "uniform", "margin": -0.6}], ids=str,
)  # fmt: skip
def test_numbers_out_of_range_are_refused(table):
    with pytest.raises(ConfigError, match="must be"):
        points_of(table)


def test_the_spec_of_a_repulsion_at_the_batch_is_the_older_one():
    from shoal.interaction.repulsion import registry as repulsions

    assert "points" not in repulsions.spec(shoal.Repulsion())
    wide = shoal.Repulsion(points=shoal.points.Noise(2.0))
    assert repulsions.make(repulsions.spec(wide)) == wide

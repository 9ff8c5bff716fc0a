"""What one does with a prediction: choose data points, draw targets, make a table."""

import pytest
import torch
from likelihood_examples import DEFAULTS, drawn, kind, width

from shoal.core.errors import ConfigError, DataError
from shoal.inference.likelihoods import Bernoulli, Categorical, Gaussian, Poisson
from shoal.prediction import Predictive

M, B = 3, 5
WEIGHTS = torch.tensor([0.2, 0.3, 0.5])


def example(likelihood, points=B, columns=1):
    scale = 0.5 if kind(likelihood) == "counts" else 1.0
    return Predictive(
        scale * drawn(M, points, width(likelihood, columns)), likelihood, weights=WEIGHTS
    )


@pytest.mark.parametrize(
    "index, rows",
    [
        (slice(1, 4), [1, 2, 3]),
        (slice(None, None, -2), [4, 2, 0]),
        (2, [2]),
        (-1, [4]),
        ([3, 0, 3], [3, 0, 3]),
        (torch.tensor([True, False, False, True, False]), [0, 3]),
    ],
)
def test_an_index_chooses_data_points_and_keeps_members_and_weights(index, rows):
    pred = example(Categorical())
    chosen = pred[index]
    assert torch.equal(chosen.members, pred.members[:, rows])
    assert chosen.weights is not None and torch.equal(chosen.weights, pred.weights)
    assert torch.allclose(chosen.entropy(), pred.entropy()[rows])


def test_numpy_indices_work_and_the_points_can_be_iterated():
    pred = example(Gaussian())
    uncertain = pred.stddev[:, 0].numpy() > 0
    assert len(pred[uncertain]) == B
    assert [len(one) for one in pred] == [1] * B
    assert torch.equal(Predictive.concat(list(pred)).members, pred.members)


@pytest.mark.parametrize(
    "index, error",
    [
        (slice(3, 3), DataError),
        (torch.zeros(B, dtype=torch.bool), DataError),
        (B, IndexError),
        ([0, B], IndexError),
        (torch.zeros(B + 1, dtype=torch.bool), IndexError),
        ((0, 1), DataError),
    ],
)
def test_an_index_without_data_points_is_refused(index, error):
    with pytest.raises(error):
        example(Categorical())[index]


DISTRIBUTIONS = [one for one in DEFAULTS if "any" in one.about.kinds]


@pytest.mark.parametrize("likelihood", DISTRIBUTIONS, ids=lambda one: type(one).__name__)
def test_drawn_targets_have_the_distribution_of_the_mixture(likelihood):
    """Frequencies of classes, and the distribution function at the quartiles, within 5 errors."""
    pred, n = example(likelihood, points=2), 5_000
    draws = pred.sample(n, seed=1)
    if pred.likelihood.about.has_classes:
        assert draws.shape == (n, 2) and not draws.is_floating_point()
        found = torch.nn.functional.one_hot(draws, pred.probs.shape[-1]).double().mean(0)
        wanted = pred.probs.double()
    else:
        assert draws.shape == (n, 2, 1)
        places = torch.stack([pred.quantile(level) for level in (0.25, 0.5, 0.9)])
        found = (draws.double() <= places.unsqueeze(1) + 1e-9).double().mean(1)
        wanted = torch.stack([pred.cdf(place) for place in places])
    errors = (wanted * (1 - wanted) / n).sqrt().clamp_min(1e-4)
    assert bool(((found - wanted).abs() < 5 * errors).all())


def test_one_draw_of_several_columns_comes_from_one_member():
    """Members that say (9, 9) and (-9, -9) never give (9, -9)."""
    members = torch.tensor([[[9.0, 9.0]], [[-9.0, -9.0]]])
    draws = Predictive(members, Gaussian(0.1)).sample(500, seed=0)
    assert bool((draws[..., 0].sign() == draws[..., 1].sign()).all())
    assert 0.4 < (draws[..., 0] > 0).double().mean() < 0.6
    labels = Predictive(members, Bernoulli()).sample(500, seed=0)
    assert labels.shape == (500, 1, 2)
    assert bool((labels[..., 0] == labels[..., 1]).double().mean() > 0.99)


def test_a_function_draw_takes_one_member_for_all_points():
    members = torch.tensor([[[9.0], [9.0], [9.0]], [[-9.0], [-9.0], [-9.0]]])
    pred = Predictive(members, Gaussian(0.1))
    signs = pred.sample(400, seed=3, joint=True).sign().squeeze(-1)
    assert bool((signs == signs[:, :1]).all())
    alone = pred.sample(400, seed=3).sign().squeeze(-1)
    assert not bool((alone == alone[:, :1]).all())


def test_draws_repeat_with_their_seed_and_have_sites():
    pred = Predictive(drawn(M, B, 7, 4), Categorical())
    assert pred.sample(6, seed=2).shape == (6, B, 7)
    assert torch.equal(pred.sample(6, seed=2), pred.sample(6, seed=2))
    assert not torch.equal(pred.sample(6, seed=2), pred.sample(6, seed=3))
    state = torch.get_rng_state()
    pred.sample(2, seed=0)
    assert torch.equal(torch.get_rng_state(), state)


def test_what_has_no_distribution_is_not_drawn():
    from shoal.inference.likelihoods import Custom

    custom = Custom(torch.nn.functional.mse_loss)
    with pytest.raises(ConfigError, match="loss"):
        Predictive(drawn(M, B, 1), custom).sample(3)
    with pytest.raises(ConfigError, match="n must be a whole number"):
        example(Categorical()).sample(0)


@pytest.mark.parametrize("level", [0.0, 1.0, 1.5, -0.2])
def test_a_level_that_is_no_probability_is_refused(level):
    with pytest.raises(ConfigError, match="between 0 and 1"):
        example(Gaussian()).interval(level)


def test_a_table_of_classes_has_their_probabilities():
    pred = example(Categorical())
    frame = pred.to_frame(classes=["ant", "bee", "cat", "dog"])
    assert len(frame) == B
    assert frame["class"].tolist() == [
        ["ant", "bee", "cat", "dog"][i] for i in pred.labels().tolist()
    ]
    assert frame["probability"].to_numpy() == pytest.approx(pred.confidence().numpy())
    assert frame["mutual_information"].to_numpy() == pytest.approx(
        pred.mutual_information().numpy()
    )
    assert frame["p(cat)"].to_numpy() == pytest.approx(pred.probs[:, 2].numpy())
    assert pred.to_frame()["p(3)"].to_numpy() == pytest.approx(pred.probs[:, 3].numpy())
    with pytest.raises(ConfigError, match="4 classes"):
        pred.to_frame(classes=["ant"])


def test_a_table_of_numbers_has_their_intervals():
    pred = example(Gaussian(), columns=2)
    frame = pred.to_frame(level=0.8)
    low, high = pred.interval(0.8)
    for column in range(2):
        assert frame[f"mean_{column}"].to_numpy() == pytest.approx(pred.mean[:, column].numpy())
        assert frame[f"low_{column}"].to_numpy() == pytest.approx(low[:, column].numpy())
        assert frame[f"high_{column}"].to_numpy() == pytest.approx(high[:, column].numpy())
    counts = example(Poisson()).to_frame()
    assert {"mean", "stddev", "low", "high"} <= set(counts.columns)


def test_tables_of_several_labels_and_of_tokens():
    several = example(Bernoulli(), columns=3).to_frame()
    assert "probability_2" in several.columns
    tokens = Predictive(drawn(M, B, 7, 4), Categorical())
    frame = tokens.to_frame()
    assert len(frame) == B * 7
    assert frame["point"].tolist()[:8] == [0] * 7 + [1]


def test_a_custom_loss_has_its_outputs_and_disagreement_in_the_table():
    from shoal.inference.likelihoods import Custom

    pred = Predictive(drawn(M, B, 2), Custom(torch.nn.functional.mse_loss))
    assert list(pred.to_frame().columns) == ["mean_0", "mean_1", "disagreement"]

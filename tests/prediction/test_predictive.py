import math

import numpy as np
import pytest
import torch

from shoal.core.errors import ConfigError, DataError
from shoal.inference.likelihoods import Categorical, Gaussian, HeteroscedasticGaussian
from shoal.prediction import Predictive

M, B, C = 4, 6, 3


def normal(*shape, seed=0, scale=2.0):
    generator = torch.Generator().manual_seed(seed)
    return scale * torch.randn(*shape, generator=generator, dtype=torch.float64)


def classes(weights=None, members=M):
    return Predictive(normal(members, B, C), Categorical(), weights)


def numbers(likelihood=None, weights=None):
    return Predictive(normal(M, B, 4), likelihood or HeteroscedasticGaussian(), weights)


WEIGHTS = torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64)
LABELS = torch.tensor([0, 1, 2, 0, 1, 2])


@pytest.mark.parametrize("weights", [None, WEIGHTS])
def test_classification_is_the_literal_mixture_of_probabilities(weights):
    pred = classes(weights)
    share = [0.25] * M if weights is None else weights.tolist()
    for b in range(B):
        each = [np.exp(f) / np.exp(f).sum() for f in pred.members[:, b].numpy()]
        p = sum(w * e for w, e in zip(share, each, strict=True))
        inner = sum(-w * (e * np.log(e)).sum() for w, e in zip(share, each, strict=True))
        total = -(p * np.log(p)).sum()
        assert pred.probs[b].numpy() == pytest.approx(p, rel=1e-12)
        assert pred.mean[b].numpy() == pytest.approx(p, rel=1e-12)
        assert pred.variance[b].numpy() == pytest.approx(p * (1 - p), rel=1e-12)
        assert float(pred.log_prob(LABELS)[b]) == pytest.approx(np.log(p[LABELS[b]]), rel=1e-12)
        assert float(pred.entropy()[b]) == pytest.approx(total, rel=1e-12)
        assert float(pred.aleatoric()[b]) == pytest.approx(inner, rel=1e-12)
        assert float(pred.mutual_information()[b]) == pytest.approx(total - inner, rel=1e-9)
        assert float(pred.confidence()[b]) == pytest.approx(p.max(), rel=1e-12)
        assert int(pred.labels()[b]) == p.argmax()


@pytest.mark.parametrize("likelihood", [Gaussian(0.7), HeteroscedasticGaussian()])
@pytest.mark.parametrize("weights", [None, WEIGHTS])
def test_moments_of_the_mixture_agree_with_monte_carlo(likelihood, weights):
    pred = numbers(likelihood, weights)
    mean, variance = likelihood.moments(pred.members)
    generator, n = torch.Generator().manual_seed(1), 400_000
    share = torch.full((M,), 1 / M) if weights is None else weights
    who = torch.multinomial(share.float(), n, replacement=True, generator=generator)
    noise = torch.randn(n, *mean.shape[1:], generator=generator, dtype=torch.float64)
    draws = mean[who] + variance[who].sqrt() * noise
    error = 5 * draws.std(0) / math.sqrt(n)
    assert ((draws.mean(0) - pred.mean).abs() < error).all()
    square = (draws - draws.mean(0)).square()
    assert ((square.mean(0) - pred.variance).abs() < 5 * square.std(0) / math.sqrt(n)).all()
    assert torch.equal(pred.stddev, pred.variance.sqrt())


def test_regression_log_prob_is_the_log_of_the_mean_density():
    pred = numbers(weights=WEIGHTS)
    mean, variance = pred.moments()
    y = normal(B, 2, seed=3)
    density = torch.distributions.Normal(mean, variance.sqrt()).log_prob(y).sum(-1).exp()
    torch.testing.assert_close(pred.log_prob(y), (WEIGHTS @ density).log())


def test_regression_entropies_of_gaussians():
    pred = numbers()
    entropy = torch.distributions.Normal(pred.mean, pred.stddev).entropy().sum(-1)
    each = torch.distributions.Normal(*(m.double() for m in pred.moments()))
    inner = torch.distributions.Normal(each.mean, each.stddev.sqrt()).entropy().sum(-1).mean(0)
    torch.testing.assert_close(pred.entropy(), entropy)
    torch.testing.assert_close(pred.aleatoric(), inner)
    assert (pred.mutual_information() > 0).all()


def test_disagreement_is_the_unbiased_spread_averaged_over_outputs():
    pred = classes()
    expected = pred.members.softmax(-1).std(0, unbiased=True).mean(-1)
    torch.testing.assert_close(pred.disagreement(), expected)
    pred = numbers()
    expected = pred.members[..., :2].std(0, unbiased=True).mean(-1)
    torch.testing.assert_close(pred.disagreement(), expected)


def test_equal_weights_are_the_same_as_none():
    plain, weighted = classes(), classes(torch.full((M,), 1 / M, dtype=torch.float64))
    for name in ("entropy", "aleatoric", "mutual_information", "disagreement", "confidence"):
        torch.testing.assert_close(getattr(plain, name)(), getattr(weighted, name)())
    torch.testing.assert_close(plain.log_prob(LABELS), weighted.log_prob(LABELS))


def test_a_member_of_weight_zero_is_not_there():
    weights = torch.tensor([0.5, 0.5, 0.0, 0.0])
    pred, pair = classes(weights), Predictive(classes().members[:2], Categorical())
    torch.testing.assert_close(pred.log_prob(LABELS), pair.log_prob(LABELS))
    torch.testing.assert_close(pred.disagreement(), pair.disagreement())
    torch.testing.assert_close(pred.mutual_information(), pair.mutual_information())


@pytest.mark.parametrize(
    "pred",
    [
        classes(members=1),
        Predictive(normal(1, B, 2), Gaussian()),
        classes(torch.tensor([0.0, 1.0, 0.0, 0.0])),
    ],
)
def test_one_member_does_not_disagree_with_itself(pred):
    assert torch.equal(pred.disagreement(), torch.zeros(B, dtype=torch.float64))
    assert float(pred.mutual_information().max()) < 1e-12


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equal_members_never_have_negative_information(dtype):
    outputs = normal(1, 500, 10, scale=8.0).to(dtype).expand(7, -1, -1)
    pred = Predictive(outputs, Categorical())
    assert (pred.mutual_information() >= 0).all()
    assert float(pred.mutual_information().max()) < 1e3 * torch.finfo(dtype).eps


def test_single_precision_keeps_impossible_labels_finite():
    outputs = torch.tensor([[[0.0, 300.0]], [[0.0, 250.0]]])
    pred = Predictive(outputs, Categorical())
    assert float(pred.log_prob([0])[0]) == pytest.approx(-250 - math.log(2), rel=1e-6)
    assert float(pred.entropy()[0]) == 0.0
    assert float(pred.stddev.sum()) == 0.0


def test_classes_ruled_out_by_an_infinite_logit():
    pred = Predictive(torch.tensor([[[0.0, 0.0, -math.inf]]]), Categorical())
    assert float(pred.entropy()[0]) == pytest.approx(math.log(2))
    assert float(pred.log_prob([2])[0]) == -math.inf


def test_weights_that_sum_to_a_little_more_than_one_give_no_nan():
    pred = Predictive(torch.tensor([[[99.0, 0.0]]] * 3), Categorical(), torch.full((3,), 0.33335))
    assert pred.stddev.isfinite().all()
    assert (pred.entropy() >= 0).all()


def test_half_precision_becomes_single():
    assert Predictive(torch.zeros(2, 3, 4).bfloat16(), Categorical()).probs.dtype == torch.float32


def test_concat_joins_points_in_order_and_len_counts_them():
    whole = classes(WEIGHTS)
    parts = [Predictive(whole.members[:, i : i + 2], Categorical(), WEIGHTS) for i in (0, 2, 4)]
    joined = Predictive.concat(parts)
    assert torch.equal(joined.members, whole.members)
    assert torch.equal(joined.log_prob(LABELS), whole.log_prob(LABELS))
    assert (len(joined), joined.size) == (B, M)


@pytest.mark.parametrize(
    "other",
    [classes(), classes(WEIGHTS.flip(0)), classes(members=2), numbers(), numbers(Gaussian())],
)
def test_concat_refuses_other_members(other):
    with pytest.raises(DataError, match="same members"):
        Predictive.concat([classes(WEIGHTS), other])


def test_concat_refuses_nothing():
    with pytest.raises(DataError, match="at least one"):
        Predictive.concat([])


def test_targets_come_as_lists_arrays_or_tensors():
    pred = classes()
    expected = pred.log_prob(LABELS)
    frozen = LABELS.numpy().copy()
    frozen.flags.writeable = False
    for y in (LABELS.tolist(), LABELS.numpy(), frozen, LABELS.to(torch.uint8)):
        assert torch.equal(pred.log_prob(y), expected)


def test_a_single_column_comes_flat_and_whole_numbers_are_values_in_regression():
    pred = Predictive(normal(M, B, 1), Gaussian())
    y = torch.tensor([-1.0, 0.0, 1.0, 2.0, -3.0, 4.0], dtype=torch.float64)
    expected = pred.log_prob(y.unsqueeze(-1))
    assert expected.shape == (B,)
    for same in (y, y.long(), y.long().numpy(), y.tolist()):
        assert torch.equal(pred.log_prob(same), expected)


@pytest.mark.parametrize(
    ("pred", "y", "sentence"),
    [
        (classes(), [0, 1], "6 points but y has 2 points"),
        (classes(), 1, "no points"),
        (classes(), [0, 1, 2, 3, 1, 2], r"y\[3\] is 3, but the network has 3 outputs"),
        (classes(), [0, 1, 2, -1, 1, 2], r"y\[3\] is -1"),
        (classes(), [0.5] * B, "not a class"),
        (classes(), torch.eye(6)[:, :3].long(), "one-hot"),
        (classes(), ["a"] * B, "numbers"),
        (numbers(), [1.0] * B, "1 columns but the members predict 2"),
        (numbers(), normal(B + 1, 2), "6 points but y has 7"),
        (numbers(), torch.full((B, 2), math.nan), "not finite"),
    ],
)
def test_wrong_targets_are_refused_in_one_sentence(pred, y, sentence):
    with pytest.raises(DataError, match=sentence):
        pred.log_prob(y)


@pytest.mark.parametrize("name", ["probs", "confidence", "labels", "member_probs"])
def test_regression_has_no_classes(name):
    with pytest.raises(ConfigError, match="regression has no class probabilities; use mean"):
        found = getattr(numbers(), name)
        found()


def test_classification_has_no_moments():
    with pytest.raises(ConfigError, match="classification has no .*; use probs"):
        classes().moments()


@pytest.mark.parametrize("members", [torch.zeros(2, 3), torch.zeros(2, 0, 3), [[[1.0]]]])
def test_members_need_three_axes(members):
    with pytest.raises(DataError, match=r"\[members, points, outputs\]"):
        Predictive(members, Categorical())


@pytest.mark.parametrize("weights", [[0.5, 0.5], [0.5] * 4, [-0.5, 0.5, 0.5, 0.5]])
def test_weights_must_sum_to_one(weights):
    with pytest.raises(DataError, match="4 numbers of at least 0 with sum 1"):
        classes(torch.tensor(weights))

"""The parts of the image studies that have a closed form: penalties, priors, decompositions."""

import pytest
import torch
from torch.distributions import Normal, kl_divergence

from shoal.interaction.bandwidths import Fixed
from shoal.interaction.repulsion import Repulsion, interact
from shoal.interaction.spaces import Outputs
from studies.cifar10_methods import arms, hyper, tables
from studies.landscape_seeds import cell, mean_field


def test_a_word_names_method_changes_and_strength():
    assert arms.parsed("ensemble") == ("ensemble", {}, None)
    assert arms.parsed("ensemble+members=11").changes == {"members": "11"}
    assert arms.parsed("kde+laplace+hyperbolic:1000")[1:] == (
        {"laplace": "", "hyperbolic": ""},
        1000.0,
    )


def test_local_independence_descends_the_squared_cosines():
    z = torch.nn.functional.normalize(torch.randn(3, 4, dtype=torch.float64), dim=-1)
    repulsion = Repulsion(Outputs(), arms.SquaredCosine(), Fixed(1.0), arms.Energy())
    found = interact(repulsion, [z[:, None]], torch.ones(3, dtype=torch.bool))
    push = found.B[0] @ z
    live = z.clone().requires_grad_()
    d2 = (live[:, None] - z).square().sum(-1)
    (1 - d2 / 2).square().sum().backward()
    # Only the first argument of the kernel is live, as in the summed kernel gradient.
    assert torch.allclose(push, live.grad, atol=1e-12)
    assert torch.allclose(found.K, (z @ z.T).square(), atol=1e-12)


def test_the_score_of_the_empirical_covariance_prior_is_its_gradient():
    prior = arms.EmpCov.of(torch.rand(20, 1, 6, 6), size=3)
    tree = {"first": torch.randn(2, 4, 1, 3, 3), "other": torch.randn(2, 5)}
    live = {name: t.requires_grad_() for name, t in tree.items()}
    prior.log_prob(live).sum().backward()
    score = prior.score(live)
    assert list(score) == list(tree)
    for name, t in live.items():
        assert torch.allclose(score[name], t.grad, rtol=1e-4, atol=1e-3)


def test_the_score_of_one_network_is_that_of_the_mean_plus_the_variance():
    y = torch.tensor([0, 2, 1, 1])
    found = cell.brier_parts(torch.randn(5, 4, 3), y)
    assert found["variance"] > 0
    assert found["one"] == pytest.approx(found["averaged"] + found["variance"], abs=1e-12)


def test_scores_are_those_of_the_mean_probability():
    outputs, y = torch.randn(3, 6, 4), torch.randint(4, (6,))
    mean = outputs.double().softmax(-1).mean(0)
    found = cell.scores(outputs, y)
    assert found["nll"] == pytest.approx(float(-mean[torch.arange(6), y].log().mean()))
    assert found["accuracy"] == float((mean.argmax(-1) == y).double().mean())


def test_the_divergence_of_a_mean_field_is_that_of_its_normals():
    mean = {"w": torch.randn(2, 3, 8), "b": torch.randn(2, 3)}
    log_sigma = {name: 0.3 * torch.randn_like(t) for name, t in mean.items()}
    wanted = sum(
        kl_divergence(Normal(mu, log_sigma[n].exp()), Normal(0.0, mean_field.PRIOR.width(mu)))
        .flatten(1)
        .sum(1)
        for n, mu in mean.items()
    )
    assert torch.allclose(mean_field.divergence(mean, log_sigma), wanted, rtol=1e-5)


def test_a_strength_in_capitals_is_the_chosen_one():
    strengths = {"kde": 1000.0, "f-kde": 30.0}
    assert arms.named("kde+laplace:KDE", strengths) == "kde+laplace:1000"
    assert arms.named("f-kde:F-KDE", strengths) == "f-kde:30"
    assert arms.named("forde:16", strengths) == "forde:16"


def test_strengths_are_chosen_by_validation_nll_of_another_seed():

    def row(method, seed, held, nll=1.0):
        return {"method": method, "seed": seed, "validation_nll": held, "nll": nll}

    rows = [
        row("kde:10", tables.CHOOSING, 1.4, nll=0.5),  # the test set does not choose
        row("kde:100", tables.CHOOSING, 1.2),
        row("kde:1000", tables.CHOOSING, 0.9, nll=float("nan")),  # diverged
        row("forde:4", 0, 0.1),
    ]
    assert tables.strengths(rows) == tables.USUAL | {"kde": 100.0}
    assert tables.strengths([]) == tables.USUAL


def test_columns_of_activation_maps_follow_the_network():
    rows = [{"cam_8": 0.1, "cam_32": 0.2, "nll": 1.0}, {"cam_16": 0.3}]
    assert tables.maps(rows) == ["cam_32", "cam_16", "cam_8"]


def test_a_hyper_deep_ensemble_chooses_what_lowers_the_nll_of_the_mean():
    probabilities = torch.rand(4, 6, dtype=torch.float64)
    chosen = hyper.greedy(probabilities, 3)
    for count in (1, 2, 3):
        nll = [
            -probabilities[[*chosen[: count - 1], other]].mean(0).log().mean() for other in range(4)
        ]
        assert chosen[count - 1] == min(range(4), key=lambda other: nll[other])
    best = torch.tensor([[0.9, 0.9], [0.5, 0.1]])
    assert hyper.greedy(best, 2) == [0, 0]  # with replacement


def test_candidates_of_a_hyper_deep_ensemble_are_in_their_ranges():
    for setting in hyper.drawn(3, count=50):
        assert 1 / 3 <= setting.lr_factor <= 3
        assert 0.1 <= setting.prior_std <= 10
        assert 0 <= setting.dropout <= 0.5

"""Points of weight space as members: planes, surveys, and statistics of batch normalisation."""

import pytest
import torch
from small_runs import assert_one_sentence, normed, plain, points, quick, shoal_of
from torch import nn
from torch.optim.swa_utils import update_bn

from shoal.analysis.landscape.planes import line, plane_through_origin, plane_through_three
from shoal.analysis.landscape.points import (
    Halving,
    chosen,
    combined,
    cosines,
    install_pooling,
    joined,
    refresh,
    with_weights,
)
from shoal.analysis.landscape.survey import BATCH, apart, evaluated, outputs, survey
from shoal.core.errors import ConfigError, DataError
from shoal.data.dataset import Split
from shoal.inference.ensemble import Ensemble
from shoal.inference.likelihoods import Categorical, Gaussian

X, Y = points(60)
SPLIT = Split(X, Y)


def same(ensemble, other):
    for name, tensor in ensemble.weights.items():
        torch.testing.assert_close(tensor, other.weights[name])


def test_chosen_members_are_copies_in_order():
    ensemble = shoal_of(normed)
    found = chosen(ensemble, [2, 0])
    torch.testing.assert_close(found(X), ensemble(X)[[2, 0]])
    with torch.no_grad():
        next(iter(found.weights.values())).zero_()
    assert float(next(iter(ensemble.weights.values())).detach().abs().sum()) > 0
    torch.testing.assert_close(joined([found, ensemble])(X), torch.cat([found(X), ensemble(X)]))


def test_an_ensemble_in_training_stays_in_training():
    ensemble = shoal_of(normed).train()
    chosen(ensemble, [0])(X)
    assert ensemble.training
    assert all(module.training for module in ensemble.groups[0].skeleton.modules())


def test_a_survey_is_what_each_network_does_alone():
    pair = shoal_of(plain, members=2)
    t = line(7)
    found = survey(pair, t, SPLIT, Categorical())
    for k, (a, b) in enumerate(t.tolist()):
        module = pair.member(0)
        with torch.no_grad():
            for p, q in zip(module.parameters(), pair.member(1).parameters(), strict=True):
                p.copy_(a * p + b * q)
            logits = module(X)
        assert float(found.loss[k]) == pytest.approx(float(nn.functional.cross_entropy(logits, Y)))
        assert float(found.accuracy[k]) == pytest.approx(
            float((logits.argmax(-1) == Y).float().mean())
        )
    assert float(found.apart[0, 0]) == float(found.apart[1, -1]) == 0


def test_what_the_chunks_are_does_not_matter(monkeypatch):
    pair = shoal_of(plain, members=2)
    whole = survey(pair, line(9), SPLIT, Categorical())
    monkeypatch.setattr("shoal.analysis.landscape.survey.chunk_size", lambda *_: 2)
    monkeypatch.setitem(BATCH, "cpu", 7)
    for one, other in zip(whole, survey(pair, line(9), SPLIT, Categorical()), strict=True):
        torch.testing.assert_close(one, other)


def test_difference_in_regression_is_that_of_the_means():
    a, b = torch.zeros(1, 5, 1), torch.full((2, 5, 1), 3.0)
    torch.testing.assert_close(apart(Gaussian(), b, a), torch.full((1, 2), 3.0).double())
    found = evaluated(b, Split(X[:5], torch.zeros(5)), Gaussian(1.0))
    assert bool(found.accuracy.isnan().all())
    assert float(found.loss[0]) == pytest.approx(4.5 + 0.9189385, abs=1e-5)


def test_planes_hold_what_they_are_spanned_by():
    ensemble = shoal_of(plain, members=3)
    pair = chosen(ensemble, [0, 1])
    for basis, plane in (
        (pair, plane_through_origin(pair, points=5)),
        (ensemble, plane_through_three(ensemble, points=5)),
    ):
        # Distances in the picture are distances of weights.
        flat = torch.cat(
            [t.detach().flatten(1) for t in combined(basis, plane.coefficients).weights.values()], 1
        )
        there = torch.stack(torch.meshgrid(plane.across, plane.up, indexing="xy"), -1).reshape(
            -1, 2
        )
        torch.testing.assert_close(
            torch.cdist(flat.double(), flat.double()),
            torch.cdist(there, there),
            rtol=1e-4,
            atol=1e-4,
        )
        assert len(plane.marks) == basis.members
        assert bool((plane.marks.amax(0) <= torch.stack([plane.across[-1], plane.up[-1]])).all())


def test_a_mark_is_where_its_member_is():
    three = shoal_of(plain, members=3)
    plane = plane_through_three(three, points=3, margin=0.0)
    flat = torch.cat([t.detach().flatten(1) for t in three.weights.values()], 1).double()
    torch.testing.assert_close(
        torch.cdist(plane.marks, plane.marks), torch.cdist(flat, flat), rtol=1e-5, atol=1e-5
    )
    corner = combined(three, plane.coefficients[:1])
    here = torch.cat([t.flatten(1) for t in corner.weights.values()], 1).double()
    expected = torch.stack([plane.across[0], plane.up[0]])
    gap = (plane.marks - expected).norm(dim=1)
    torch.testing.assert_close((flat - here).norm(dim=1), gap, rtol=1e-4, atol=1e-4)


def test_no_plane_through_points_on_a_line():
    two = shoal_of(plain, members=2)
    for share in (0.5, 0.3, 0.1):  # rounded to float32 in other ways
        places = torch.tensor([[1.0, 0], [0, 1], [share, 1 - share]])
        with pytest.raises(ConfigError) as caught:
            plane_through_three(combined(two, places), points=3)
        assert_one_sentence(caught.value, "line")
    with pytest.raises(ConfigError, match="2 members, not 3"):
        plane_through_origin(shoal_of(plain, members=3))


def test_refreshed_statistics_are_those_of_torch():
    ensemble = quick(normed).ensemble
    batches = [X[i : i + 20] for i in range(0, 60, 20)]
    modules = [ensemble.member(i) for i in range(ensemble.members)]
    for module in modules:
        update_bn(batches, module)
    refresh(ensemble, X, batch_size=20)
    for i, module in enumerate(modules):
        for name, buffer in module.named_buffers():
            if buffer.is_floating_point():
                torch.testing.assert_close(ensemble.buffers[name][i], buffer)
    assert not ensemble.training


def test_points_with_batch_normalisation_need_inputs():
    pair = shoal_of(normed, members=2)
    with pytest.raises(DataError) as caught:
        survey(pair, line(3), SPLIT, Categorical())
    assert_one_sentence(caught.value, "train=")
    refresh(pair, X)
    found = survey(pair, line(3), SPLIT, Categorical(), train=X)
    torch.testing.assert_close(
        found.loss[0], evaluated(outputs(pair, X), SPLIT, Categorical()).loss[0]
    )


def test_only_one_architecture():
    mixed = Ensemble.init([(plain, 1), (lambda: nn.Linear(3, 4), 1)])
    with pytest.raises(ConfigError) as caught:
        chosen(mixed, [0])
    assert_one_sentence(caught.value, "one architecture")


@pytest.mark.parametrize("shape", [(8, 8), (7, 5), (2, 3)])
def test_halving_by_comparisons_is_pooling(shape):
    x = torch.randn(3, 4, *shape, generator=torch.Generator().manual_seed(0))
    x[0, 0, 0, 0] = torch.nan
    layers = nn.Sequential(nn.MaxPool2d(2), nn.MaxPool2d(2, padding=1), nn.MaxPool2d(3))
    install_pooling(layers)
    assert [type(layer) is Halving for layer in layers] == [True, False, False]
    expected = nn.functional.max_pool2d(x, 2)
    with torch.no_grad():
        torch.testing.assert_close(layers[0](x), expected, rtol=0, atol=0, equal_nan=True)
    x.requires_grad_()
    layers[0](x).nansum().backward()
    assert float(x.grad.sum()) == expected.numel() - 1


def test_cosines_of_known_vectors():
    ensemble = shoal_of(lambda: nn.Linear(2, 1, bias=False), members=1)
    weights = torch.tensor([[[1.0, 0.0]], [[0.0, 2.0]], [[-3.0, 0.0]]])
    found = cosines(with_weights(ensemble, {"weight": weights}))
    torch.testing.assert_close(found, torch.tensor([[1.0, 0, -1], [0, 1, 0], [-1, 0, 1]]).double())

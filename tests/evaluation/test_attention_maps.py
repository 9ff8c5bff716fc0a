"""Class-activation maps and input gradients where both are known in closed form."""

import pytest
import torch
from torch import nn

import shoal
from shoal.core.errors import DataError
from shoal.evaluation.inspection import AttentionMaps, attention_maps, gradient_similarity, overlap
from shoal.models import ResNet18

pytestmark = pytest.mark.usefixtures("double")

MEMBERS, IMAGES, CLASSES = 3, 5, 4


class Pooled(nn.Module):
    """Features, their mean over the image, a linear layer: here w_c is W_yc over the pixels."""

    def __init__(self):
        super().__init__()
        self.features = nn.Conv2d(2, 6, 3, padding=1)
        self.head = nn.Linear(6, CLASSES)

    def forward(self, x):
        return self.head(self.features(x).mean((2, 3)))


def images(seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(IMAGES, 2, 6, 5, generator=generator)
    return x, torch.randint(CLASSES, (IMAGES,), generator=generator)


def test_maps_of_pooled_features_are_those_of_the_linear_layer():
    x, y = images()
    ensemble = shoal.Ensemble.init(Pooled, MEMBERS)
    found = attention_maps(ensemble, x, y)
    assert list(found.maps) == [(6, 5)]
    for i in range(MEMBERS):
        module = ensemble.member(i)
        A, W = module.features(x).detach(), module.head.weight.detach()
        for b in range(IMAGES):
            raw = sum(W[y[b], c] * A[b, c] for c in range(6)).clamp(min=0)
            torch.testing.assert_close(found.maps[6, 5][i, b], raw / raw.max())


def test_one_depth_for_each_size_of_the_image():
    ensemble = shoal.Ensemble.init(lambda: ResNet18((2, 3, 4, 4)).build((3, 16, 16), CLASSES), 2)
    x = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    before = {name: tensor.clone() for name, tensor in ensemble.buffers.items()}
    found = attention_maps(ensemble, x, torch.tensor([0, 3]))
    assert list(found.maps) == [(16, 16), (8, 8), (4, 4), (2, 2)]
    assert set(found.diversity) == set(found.maps)
    assert all(0 <= value <= 1 for value in found.diversity.values())
    for name, tensor in ensemble.buffers.items():
        assert torch.equal(tensor, before[name])


def test_diversity_of_equal_and_of_disjoint_maps():
    one, other = torch.zeros(2, 3, 4, 4), torch.rand(1, 3, 4, 4)
    one[0, :, :2], one[1, :, 2:] = 0.5, 1.0
    assert AttentionMaps({(4, 4): one}).diversity[4, 4] == pytest.approx(1)
    same = AttentionMaps({(4, 4): other.expand(3, 3, 4, 4)})
    assert same.diversity[4, 4] == pytest.approx(0)
    empty = torch.cat([other, other])
    empty[0, 0] = 0
    torch.testing.assert_close(overlap(empty), torch.ones(2, 2))


def test_gradients_of_linear_members_are_their_weights():
    ensemble = shoal.Ensemble.init(lambda: nn.Linear(7, CLASSES), MEMBERS)
    x = torch.randn(50, 7, generator=torch.Generator().manual_seed(0))
    y = torch.randint(CLASSES, (50,), generator=torch.Generator().manual_seed(1))
    matrix = gradient_similarity(ensemble, x, y, shoal.likelihoods.Categorical())
    W = ensemble.weights["weight"].detach()
    for i in range(MEMBERS):
        for j in range(MEMBERS):
            cosines = torch.cosine_similarity(W[i][y], W[j][y], dim=-1)
            torch.testing.assert_close(matrix[i, j], cosines.mean())


def test_what_is_no_image_is_answered():
    ensemble = shoal.Ensemble.init(lambda: nn.Linear(7, CLASSES), 2)
    with pytest.raises(DataError, match=r"need images \[B, C, H, W\]"):
        attention_maps(ensemble, torch.randn(3, 7), torch.tensor([0, 1, 2]))
    flat = shoal.Ensemble.init(lambda: nn.Sequential(nn.Flatten(), nn.Linear(12, CLASSES)), 2)
    with pytest.raises(DataError, match="no layer in common whose outputs are images"):
        attention_maps(flat, torch.randn(3, 3, 2, 2), torch.tensor([0, 1, 2]))

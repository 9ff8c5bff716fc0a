"""Images that look like photographs: smooth, coloured, with edges."""

import pytest
import torch

from shoal.core.random import generator


def pictures(count, channels, side, seed=0):
    """Smooth colours with a dark and a bright rectangle."""
    random = generator(seed, "pictures")
    coarse = torch.rand(count, channels, 4, 4, generator=random)
    x = torch.nn.functional.interpolate(coarse, (side, side), mode="bicubic").clamp(0, 1)
    x[:, :, side // 4 : side // 2, side // 4 : side // 2] *= 0.3
    x[:, :, side // 2 : -side // 8, side // 2 : -side // 4] = 0.9
    return x


@pytest.fixture(scope="session")
def colour():
    return pictures(24, 3, 32)


@pytest.fixture(scope="session", params=[(3, 32), (1, 28), (1, 8)], ids=["colour", "grey", "tiny"])
def images(request):
    return pictures(24, *request.param)

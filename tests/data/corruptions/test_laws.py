"""What every corruption must do, examined over the registry."""

import sys

import pytest
import torch

from shoal.core.errors import ConfigError, DataError
from shoal.core.random import generator
from shoal.data import corruptions
from shoal.data.corruptions import SEVERITIES, corrupt, registry
from shoal.data.corruptions import corrupt as function
from shoal.data.corruptions.shifts import check_images

MODULE = sys.modules[check_images.__module__]
STANDARD = (
    "gaussian-noise shot-noise impulse-noise defocus-blur glass-blur motion-blur zoom-blur snow "
    "frost fog brightness contrast elastic-transform pixelate jpeg-compression"
).split()
EXTRA = ["speckle-noise", "gaussian-blur", "spatter", "saturate"]
# frost, elastic, glass, spatter and saturate are published with constants that are not ordered in
# distance: their later severities change the picture in another way
ORDERED = sorted(
    {*STANDARD, *EXTRA} - {"frost", "elastic-transform", "glass-blur", "spatter", "saturate"}
)


def distance(x, name, severity):
    return float((corrupt(x, name, severity) - x).square().mean())


def test_the_published_ones_are_there_in_their_order():
    assert registry.names() == STANDARD + EXTRA
    assert [name for name in registry if registry[name].standard] == STANDARD
    assert all(len(registry[name].constants) == len(SEVERITIES) == 5 for name in registry)


@pytest.mark.parametrize("name", registry.names())
def test_shape_type_and_range_stay(name, images):
    for severity in SEVERITIES:
        for dtype in (torch.float32, torch.float64, torch.bfloat16):
            x = images[:3].to(dtype)
            before = x.clone()
            y = corrupt(x, name, severity)
            assert (y.shape, y.dtype, y.device) == (x.shape, dtype, x.device)
            assert y.min() >= 0 and y.max() <= 1
            assert torch.equal(x, before)


@pytest.mark.parametrize("extreme", [0.0, 1.0])
@pytest.mark.parametrize("name", registry.names())
def test_black_and_white_stay_numbers(name, extreme):
    for channels in (1, 3):
        y = corrupt(torch.full((2, channels, 16, 16), extreme), name, 5)
        assert y.isfinite().all()


@pytest.mark.parametrize("name", registry.names())
def test_an_image_depends_on_its_index_and_not_on_its_company(name, images, monkeypatch):
    whole = corrupt(images, name, 4, seed=3)
    parts = [corrupt(images[i : i + 5], name, 4, seed=3, first=i) for i in (20, 0, 5, 10, 15)]
    ordered = torch.cat([*parts[1:], parts[0]])
    torch.testing.assert_close(ordered, whole, atol=1e-5, rtol=0)
    monkeypatch.setattr(MODULE, "_AT_ONCE", 1)
    torch.testing.assert_close(corrupt(images, name, 4, seed=3), whole, atol=1e-5, rtol=0)


RANDOM = sorted(
    {*STANDARD, *EXTRA}
    - {"defocus-blur", "zoom-blur", "brightness", "contrast", "pixelate"}
    - {"jpeg-compression", "gaussian-blur", "saturate"}
)


@pytest.mark.parametrize("name", RANDOM)
def test_chance_follows_seed_and_index(name, colour):
    same = colour[:1].expand(2, -1, -1, -1)
    first, second = corrupt(same, name, 3)
    assert not torch.equal(first, second)
    assert not torch.equal(corrupt(same, name, 3, seed=1)[0], first)
    assert torch.equal(corrupt(same, name, 3)[0], first)


@pytest.mark.parametrize("name", sorted(set(registry) - set(RANDOM)))
def test_what_is_not_random_ignores_seed_and_index(name, colour):
    first = corrupt(colour[:2], name, 3)
    assert torch.equal(corrupt(colour[:2], name, 3, seed=1, first=9), first)


@pytest.mark.parametrize("name", ORDERED)
def test_severity_grows(name, colour):
    # coarse pixels of smooth images depend on where the edges fall, so those get noise
    x = torch.rand(24, 3, 32, 32, generator=generator(0)) if name == "pixelate" else colour
    found = [distance(x, name, severity) for severity in SEVERITIES]
    assert found[0] > 0
    assert found == sorted(found)


@pytest.mark.parametrize(
    "name", ["frost", "elastic-transform", "glass-blur", "spatter", "saturate"]
)
def test_every_severity_of_the_others_changes_the_picture(name, colour):
    assert all(distance(colour, name, severity) > 1e-5 for severity in SEVERITIES)


def test_memory_of_a_large_set_is_that_of_its_parts(monkeypatch):
    """Nothing is worked on that has more values than a part may have."""
    seen = []
    entry = registry["contrast"]
    monkeypatch.setattr(
        type(entry), "__call__", lambda self, part, chance, s: (seen.append(len(part)), part)[1]
    )
    monkeypatch.setattr(MODULE, "_AT_ONCE", 100 * 16)
    x = torch.rand(250, 1, 4, 4)
    assert torch.equal(corrupt(x, "contrast", 1), x)
    assert seen == [100, 100, 50]


@pytest.mark.parametrize("severity", [0, 6, 2.5, "3", None])
def test_a_severity_is_one_to_five(severity, colour):
    with pytest.raises(ConfigError, match="a severity is a whole number from 1 to 5"):
        corrupt(colour, "fog", severity)


def test_a_wrong_name_is_mended(colour):
    with pytest.raises(ConfigError, match="there is no corruption called 'foggy'; did you mean"):
        corrupt(colour, "foggy", 1)


@pytest.mark.parametrize(
    "x, sentence",
    [
        (torch.rand(3, 32, 32), "only images"),
        (torch.rand(2, 2, 32, 32), "only images"),
        (torch.rand(0, 3, 32, 32), "only images"),
        (torch.rand(1, 3, 3, 32), "at least 4 x 4 pixels"),
        (torch.zeros(1, 3, 8, 8, dtype=torch.uint8), "divide by 255"),
        (torch.full((1, 3, 8, 8), 1.5), r"not in \[1.5, 1.5\]"),
        (torch.full((1, 3, 8, 8), -0.1), "before normalisation"),
        (torch.full((1, 3, 8, 8), torch.nan), r"must lie in \[0, 1\]"),
    ],
)
def test_what_cannot_be_corrupted_is_refused(x, sentence):
    with pytest.raises(DataError, match=sentence):
        check_images(x)


def test_corrupt_is_offered_where_data_are():
    import shoal

    assert shoal.data.corrupt is function
    assert shoal.data.corruptions is corruptions

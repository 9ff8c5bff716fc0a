"""Crops and mirror images: drawn from the image, each member's own where wanted."""

import pytest
import torch
from torch import nn

import shoal
from shoal.core.errors import ConfigError
from shoal.core.random import generator, key
from shoal.data.batches.augment import CropFlip, augmented


def images(count=6, side=5):
    """Every pixel of every image has a number of its own."""
    return torch.arange(1.0, 1 + count * 2 * side * side).view(count, 2, side, side)


def test_a_crop_is_a_window_of_the_padded_image_or_its_mirror():
    x, padding = images(40), 2
    seen = CropFlip(padding)(x, key(0, "a", 0))
    padded = nn.functional.pad(x, (padding,) * 4)
    places = set()
    for before, after in zip(padded, seen, strict=True):
        windows = {
            (top, left): before[:, top : top + 5, left : left + 5]
            for top in range(2 * padding + 1)
            for left in range(2 * padding + 1)
        }
        found = [(*place, False) for place, w in windows.items() if torch.equal(after, w)]
        found += [(*place, True) for place, w in windows.items() if torch.equal(after, w.flip(-1))]
        assert len(found) == 1
        places.add(found[0])
    assert {mirrored for *_, mirrored in places} == {False, True}
    assert len(places) > 10


def test_members_share_their_crops_unless_told_otherwise():
    x, own = images(), key(0, "a", 3)
    assert torch.equal(augmented(CropFlip(), x, own, range(4)), CropFlip()(x, own))
    apart = augmented(CropFlip(per_member=True), x, own, range(4))
    assert apart.shape == (4, *x.shape)
    assert not torch.equal(apart[0], apart[1])
    more = augmented(CropFlip(per_member=True), x, own, range(6))
    assert torch.equal(more[:4], apart), "what a member sees depends on its index alone"


def network():
    return nn.Sequential(nn.Flatten(), nn.Linear(2 * 5 * 5, 3))


def run(engine, **options):
    x, y = images(12) / 600, torch.arange(12) % 3
    ensemble = shoal.Ensemble.init(network, members=3, seed=0)
    shoal.fit(ensemble, (x, y), optimizer="sgd", lr=0.1, epochs=2, batch_size=6, engine=engine,
              progress=False, **options)  # fmt: skip
    return ensemble


@pytest.mark.parametrize("method", ["ensemble", "kde"])
def test_crops_of_their_own_are_the_same_however_members_run(method):
    own = CropFlip(padding=1, per_member=True)
    together = run("vmap", method=method, augment=own).weights
    for engine in ("loop", "chunk:2"):
        apart = run(engine, method=method, augment=own).weights
        for name, tensor in together.items():
            torch.testing.assert_close(apart[name], tensor)
    shared = run("vmap", method=method, augment=CropFlip(padding=1)).weights
    assert any(not torch.equal(shared[name], tensor) for name, tensor in together.items())


def test_a_member_alone_trains_on_its_own_crops():
    """Member 2 of a plain ensemble moves as it does by hand, on the crops of member 2."""
    x, y = images(6) / 600, torch.arange(6) % 3
    ensemble = shoal.Ensemble.init(network, members=3, seed=0)
    module = ensemble.member(2).train()
    own = CropFlip(padding=1, per_member=True)
    shoal.fit(ensemble, (x, y), method="ensemble", prior="flat", optimizer="sgd", lr=0.1, steps=1,
              batch_size=6, augment=own, seed=7, progress=False)  # fmt: skip
    order = torch.randperm(6, generator=generator(7, "order", 0))
    seen = augmented(own, x[order], key(7, "augment", 0), range(3))[2]
    loss = nn.functional.cross_entropy(module(seen), y[order])
    loss.backward()
    for name, parameter in module.named_parameters():
        moved = parameter.detach() - 0.1 * parameter.grad
        torch.testing.assert_close(ensemble.weights[name][2].detach(), moved)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"method": "f-kde"}, "cannot be compared"),
        ({"method": "ensemble", "adversarial": 0.1}, "inputs that members share"),
    ],
)
def test_refuses_what_needs_shared_inputs(options, sentence):
    with pytest.raises(ConfigError, match=sentence):
        run("auto", augment=CropFlip(per_member=True), **options)

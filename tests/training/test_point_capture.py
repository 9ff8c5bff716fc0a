"""A step with points can be captured: nothing in it asks the host for a value."""

import dataclasses

import pytest
import torch
from host_questions import Questions, as_on_a_gpu
from small_runs import both, plain, points, quick, shoal_of
from triton_ready import needs_gpu

import shoal
from shoal.core.random import key, normal, uniform
from shoal.data.batches.augment import CropFlip
from shoal.data.batches.sources import ArrayBatches
from shoal.interaction import cloud
from shoal.interaction import points as kinds
from shoal.training.forces import forces
from shoal.training.mover.prepare import prepared
from shoal.training.options.points import resolved

KINDS = {
    "noise": lambda: shoal.points.Noise(),
    "uniform": lambda: shoal.points.Uniform(count=5),
    "mixup": lambda: shoal.points.Mixup(0.5, count=5),
    "unlabelled": lambda: shoal.points.Unlabelled(torch.linspace(-1, 1, 27).view(9, 3)),
}


def drawn_as_on_a_gpu(monkeypatch):
    as_on_a_gpu(monkeypatch)
    monkeypatch.setattr(cloud, "_fused", lambda leaves: None)
    monkeypatch.setattr(kinds, "many_normal", normal)
    monkeypatch.setattr(kinds, "many_uniform", lambda k, shape, dtype: uniform(k, shape).to(dtype))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["f-kde", "f-svgd", "forde"])
@pytest.mark.parametrize("build", [plain, both], ids=["one pass", "two passes"])
def test_the_host_is_asked_nothing(monkeypatch, build, name, kind):
    drawn_as_on_a_gpu(monkeypatch)
    x, y = points()
    ensemble = shoal_of(build).train()
    method = resolved(shoal.methods.get(name, points=KINDS[kind]()), ensemble, lambda: x)
    repulsion = prepared(method, ArrayBatches(x, y, 10), None, x.dtype)[0]
    likelihood = shoal.likelihoods.Categorical()
    target = shoal.Posterior(likelihood, shoal.priors.Gaussian(1.0), len(x))
    step = torch.tensor(3)

    def velocity():
        return forces(ensemble, target, repulsion, (x[:10], y[:10]), step=step)

    velocity()  # what is found out once is found out before a capture
    with Questions() as questions:
        velocity()
    assert not questions.asked, questions.asked[0]


def test_crops_ask_the_host_nothing():
    images = torch.randn(4, 1, 6, 6)
    augmented = dataclasses.replace(shoal.points.Augmented(), function=CropFlip(2))
    start = key(0, "points", torch.tensor(3))
    with Questions() as questions:
        augmented.draw(images, start)
    assert not questions.asked


@needs_gpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["f-kde", "f-svgd", "forde"])
def test_captured_steps_are_the_eager_ones(name, kind):
    runs = [
        quick(
            both, method={"name": name, "points": KINDS[kind]()}, engine=engine, device="cuda",
            precision="float64", steps=20,
        )
        for engine in ("vmap", "vmap+eager")
    ]  # fmt: skip
    for weight, tensor in runs[0].ensemble.weights.items():
        other = runs[1].ensemble.weights[weight]
        torch.testing.assert_close(other, tensor, rtol=1e-7, atol=1e-9)

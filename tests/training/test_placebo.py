"""The placebo: a random push with the norm of the true one, on the same drive."""

from dataclasses import replace

import pytest
import torch
from small_runs import (
    Fuse,
    assert_one_sentence,
    assert_same_folder,
    assert_same_run,
    both,
    plain,
    points,
    quick,
    shoal_of,
)
from torch import nn
from triton_ready import needs_gpu

import shoal
from shoal.core.errors import ConfigError
from shoal.core.tree import member_norms
from shoal.engine.members.member_runner import MemberRunner
from shoal.experiment.build import _method
from shoal.experiment.config import make_config
from shoal.inference.likelihoods.labels import Categorical
from shoal.inference.posterior import Posterior
from shoal.inference.priors import Gaussian
from shoal.interaction import methods
from shoal.training.forces import forces

METHODS = ["kde", "svgd", "f-kde", "f-svgd", "forde-identity"]


def velocities(ensemble, repulsion, **how):
    (x, y), posterior = points(), Posterior(Categorical(), Gaussian(), 40)
    return forces(ensemble, posterior, repulsion, (x.double(), y), **how)[0]


def parts(name, build=plain, **how):
    """The true push, and the placebos of some steps, each as one vector per member."""
    ensemble = build if isinstance(build, shoal.Ensemble) else shoal_of(build, members=4)
    ensemble = ensemble.to(dtype=torch.float64)
    repulsion = replace(methods.get(name).repulsion, strength=50.0)
    drive = velocities(ensemble, replace(repulsion, strength=0.0), **how)

    def push(**changes):
        step = changes.pop("step", 0)
        moved = velocities(ensemble, replace(repulsion, **changes), step=step, **how)
        return {n: tensor - drive[n] for n, tensor in moved.items()}

    return push(), lambda step: push(placebo=True, step=step), ensemble


@pytest.mark.parametrize("name", METHODS)
def test_the_norm_is_that_of_the_true_push(name):
    push, placebo, ensemble = parts(name)
    norms = member_norms(push)
    assert (norms > 0).all()
    torch.testing.assert_close(member_norms(placebo(1)), norms, rtol=1e-9, atol=1e-14)


@pytest.mark.parametrize("name", ["f-kde", "forde-identity"])
def test_members_of_several_architectures_have_their_norms(name):
    wide = lambda: nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 4))  # noqa: E731
    push, placebo, ensemble = parts(name, shoal.Ensemble.init([(wide, 2), (plain, 3)]))
    norms = member_norms(push, ensemble.spans)
    torch.testing.assert_close(member_norms(placebo(1), ensemble.spans), norms)


@pytest.mark.parametrize("name", ["kde", "f-kde"])
def test_no_direction_is_preferred(name):
    push, placebo, _ = parts(name)
    draws = [placebo(step) for step in range(100)]
    units = [torch.cat([t.flatten(1) for t in d.values()], 1) for d in draws]
    units = torch.stack([u / u.norm(dim=1, keepdim=True) for u in units])
    true = torch.cat([t.flatten(1) for t in push.values()], 1)
    true = true / true.norm(dim=1, keepdim=True)
    # the mean of 100 unit vectors has norm 0.1, its product with a fixed one 0.1 / sqrt(68)
    assert (units.mean(0).norm(dim=1) < 0.13).all()
    assert ((units * true).sum(2).mean(0).abs() < 0.05).all()
    assert (units[:, 0] * units[:, 1]).sum(1).mean().abs() < 0.05  # members differ


@pytest.mark.parametrize("method", ["kde", "svgd", "f-kde", "forde-identity"])
@pytest.mark.parametrize("how", ["loop", "chunk:2", "resident"])
def test_engines_agree(how, method):
    options = {"method": {"name": method, "placebo": True}, "strength": 50, "precision": "float64"}
    one = quick(both, **options)
    how = {"resident": 2} if how == "resident" else {"engine": how}
    other = quick(both, **how, **options)
    for name, weight in one.ensemble.weights.items():
        torch.testing.assert_close(other.ensemble.weights[name], weight, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("mapping", ["vmap", "loop"])
def test_recomputed_activations_give_the_same_push(mapping):
    _, placebo, _ = parts("f-kde")
    _, again, _ = parts("f-kde", mapping=MemberRunner(mapping, recompute=True))
    for name, tensor in placebo(3).items():
        torch.testing.assert_close(again(3)[name], tensor)


@pytest.mark.parametrize("method", ["kde", "f-kde"])
def test_a_resumed_run_has_the_same_bits(method, tmp_path):
    options = {"method": {"name": method, "placebo": True}, "strength": 50, "epochs": 3}
    one = quick(both, out=tmp_path / "one", schedule=Fuse(), **options)
    with pytest.raises(Fuse.Blown):
        quick(both, out=tmp_path / "two", schedule=Fuse(5), save_every=0.0, **options)
    again = shoal_of(both, seed=7)
    two = quick(again, out=tmp_path / "two", schedule=Fuse(), resume=True, **options)
    assert_same_run(one, two)
    assert_same_folder(tmp_path / "one", tmp_path / "two")
    assert one.config["method"] == {"name": method, "placebo": True}


def test_a_placebo_trains_otherwise_than_its_method_and_reports_its_push():
    true, random = quick(strength=50), quick(strength=50, method={"name": "f-kde", "placebo": True})
    assert random.history[0]["push"] == pytest.approx(true.history[0]["push"], rel=0.5)
    assert random.history[-1]["loss"] != true.history[-1]["loss"]


def test_a_composition_can_be_a_placebo():
    table = {"name": "f-kde", "kernel": "imq", "placebo": True}
    spec = _method(make_config({"data": "digits", "method": table}))
    assert isinstance(spec, dict) and spec["placebo"] is True and spec["kernel"] == "imq"
    made = shoal.Repulsion(kernel="imq", placebo=True)
    assert quick(method=made).config["method"]["placebo"] is True


@pytest.mark.parametrize(
    ("method", "words"),
    [
        ({"name": "ensemble", "placebo": True}, ["ensemble", "placebo"]),
        ({"name": "kde", "placebo": 2}, ["placebo", "2"]),
    ],
)
def test_what_cannot_be_a_placebo_is_said(method, words):
    with pytest.raises(ConfigError) as error:
        quick(method=method)
    assert_one_sentence(error.value, *words)


def test_members_that_train_tensors_together_have_no_placebo_of_outputs():
    ensemble = shoal.Ensemble.init(plain, 3, shared=("0.*",))
    with pytest.raises(ConfigError) as error:
        quick(ensemble, method={"name": "f-kde", "placebo": True})
    assert_one_sentence(error.value, "together")


@needs_gpu
@pytest.mark.parametrize("method", ["kde", "svgd", "f-kde", "forde-identity"])
def test_captured_steps_are_those_of_the_cpu(method):
    options = {"method": {"name": method, "placebo": True}, "strength": 50, "epochs": 4}
    options |= {"precision": "float64", "optimizer": "sgd", "lr": 0.01}
    one, other = quick(plain, **options), quick(plain, device="cuda", **options)
    for name, weight in one.ensemble.weights.items():
        found = other.ensemble.weights[name].cpu()
        torch.testing.assert_close(found, weight, rtol=1e-4, atol=1e-5)

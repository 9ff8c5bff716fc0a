"""References: the two ways to write a density agree, chains that disagree are refused."""

import math

import pytest
import torch

from shoal.analysis.fidelity import problems
from shoal.analysis.fidelity import reference as chains
from shoal.analysis.fidelity import reference as references
from shoal.core.errors import DataError, StorageError


def noise(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("name", list(problems.registry))
def test_the_network_of_a_flat_vector_is_the_network(name):
    problem = problems.make(name)
    module = problem.build()
    flat = torch.cat([p.detach().flatten() for p in module.parameters()])[None]
    with torch.no_grad():
        torch.testing.assert_close(problem.apply(flat, problem.on)[0], module(problem.on))


@pytest.mark.parametrize("name", list(problems.registry))
def test_the_sampler_sees_the_density_that_members_are_driven_by(name):
    jax = pytest.importorskip("jax", reason="the sampler is an optional library")
    problem = problems.make(name)
    flat = 0.5 * noise(2, sum(math.prod(shape) for shape in problem.shapes))
    ours = problem.log_density(flat)
    with jax.enable_x64(True):
        potential = chains.potential(problem)
        theirs = [float(potential(jax.numpy.asarray(row.numpy()))) for row in flat]
    difference = float(ours[0] - ours[1])
    assert abs(difference + theirs[0] - theirs[1]) < 1e-5 * abs(difference)


def test_the_closed_form_is_where_the_density_is_flat_and_as_curved():
    problem = problems.make("linear")
    mean, covariance = references.moments(problem)
    gradient = torch.func.grad(lambda w: problem.log_density(w[None])[0])(mean)
    assert gradient.abs().max() < 1e-4
    score = torch.func.grad(lambda w: problem.log_density(w[None])[0])
    curvature = torch.func.jacrev(score)(mean)
    torch.testing.assert_close(-curvature @ covariance, torch.eye(5).double(), rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", ["regression", "classification", "digits"])
def test_references_that_come_with_the_library_are_sound(name):
    reference = references.load(problems.make(name))
    assert reference.diagnostics["rhat"] < references.LIMIT
    assert reference.diagnostics["chains"] >= 4
    assert reference.diagnostics["divergences"] == 0
    assert reference.diagnostics["effective"] > 400


def test_written_and_read_again(tmp_path):
    made = references.closed_form(problems.make("linear"), draws=500)
    references.save(made, tmp_path / "linear.safetensors")
    again = references.read(tmp_path / "linear.safetensors")
    assert torch.equal(again.mean, made.mean) and torch.equal(again.quantiles, made.quantiles)
    torch.testing.assert_close(again.draws, made.draws, rtol=1e-3, atol=1e-3)
    assert again.diagnostics == made.diagnostics


def test_chains_that_disagree_are_refused(monkeypatch):
    problem = problems.make("regression")
    apart = noise(2, 50, 49).float() * torch.tensor([0.1, 2.0])[:, None, None]
    found = chains.Chains(apart, 0, "made up")
    monkeypatch.setattr(references, "sample_chains", lambda *_: found)
    with pytest.raises(DataError, match="R-hat is .* must be below 1.01; use more than 50 draws"):
        references.make(problem, draws=50, chains=2)


def test_a_missing_reference_says_what_to_type(monkeypatch, tmp_path):
    monkeypatch.setattr(references, "home", lambda: tmp_path)
    with pytest.raises(StorageError, match="type: shoal fidelity --reference"):
        references.load(problems.make("regression"))

"""The study of particles: its formulas, its plan and its tables."""

import pytest
import torch

import shoal
from shoal.core.random import generator
from shoal.data import targets
from studies.particles import claim_line, comparison, densities, make, networks, summary


@pytest.mark.parametrize("name", ["gaussian", "mixture", "funnel"])
def test_written_scores_are_the_gradients_of_the_densities(name):
    x = torch.randn(20, 2, generator=generator(0, name))
    found = densities.density(name).score(x)
    target = targets.registry.make(name)
    wanted = torch.func.vmap(torch.func.grad(target.log_density))(x)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("label", ["kde", "svgd", "sge+laplace", "svgd+linear"])
def test_the_flow_is_that_of_sample(label):
    start = torch.randn(8, 2, generator=generator(0, label))
    repel, target = densities.repulsion(label), targets.registry.make("mixture")
    wanted = shoal.sample(target.log_density, start, method=repel, steps=6, optimizer="adam")
    score = densities.density("mixture").score
    found = densities.flow(score, start, repel, 6, rates=(0.1, 0.1))
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


def test_the_linear_density_is_the_gradient_of_the_released_formula():
    z = torch.randn(5, 3, generator=generator(0, "linear"), dtype=torch.float64)
    live = z.clone().requires_grad_()
    (live @ z.T).sum(1).log().nansum().backward()  # the second argument is a constant
    _, B = networks.LinearDensity()(1 + z @ z.T, z, torch.tensor(5))
    positive = (z @ z.T).sum(1) > 0
    assert positive.any()
    torch.testing.assert_close((B[0] @ z)[positive], live.grad[positive])


def test_every_cell_is_planned_once():
    cells = [cell for part in make.CASES for cell in make.plan(part, 0)]
    assert len(cells) == len(set(cells)) > 200


def test_rows_are_read_as_they_are_written(tmp_path):
    cell = make.plan("convergence", 3)[0]
    make.append(tmp_path, cell, {"mmd": 0.25, "sliced": 0.5})
    assert make.done(tmp_path) == {cell}
    assert comparison.read(tmp_path)[cell.key, "mmd"] == {3: 0.25}


def test_a_difference_is_bold_only_if_it_survives_the_correction():
    one, other = ("part", "problem", "one", 5), ("part", "problem", "other", 5)
    rows = {
        (one, "nll"): {0: 1.0, 1: 1.01, 2: 0.99, 3: 1.0},
        (other, "nll"): {0: 0.0, 1: 0.0, 2: 0.01, 3: 0.01},
        (one, "ece"): {0: 1.0, 1: -1.0, 2: 0.5, 3: -0.4},
        (other, "ece"): dict.fromkeys(range(4), 0.0),
    }
    columns = [comparison.Column("nll", "NLL"), comparison.Column("ece", "ECE")]
    pair = comparison.Pair(("one − other",), one, other)
    line = comparison.differences(rows, [pair], columns, ["difference"]).splitlines()[-1]
    nll, ece = (cell.strip() for cell in line.strip("| ").split("|")[2:])
    assert nll.startswith("**+0.995") and not ece.startswith("**")


def test_the_exponent_of_a_power_law_is_found():
    sizes = (5, 20, 50, 200)
    assert summary.slope(sizes, [m**-0.5 for m in sizes]) == pytest.approx(-0.5)


def test_verdicts_follow_from_the_signs_of_significant_differences():
    one, other = ("part", "problem", "one", 5), ("part", "problem", "other", 5)
    noise = {0: 0.0, 1: 0.01, 2: -0.01, 3: 0.0}
    rows = {(one, "up"): {s: 1 + v for s, v in noise.items()}, (one, "flat"): noise}
    rows |= {(other, metric): dict.fromkeys(noise, 0.0) for metric in ("up", "flat")}

    def verdict(metrics, sign, always=False):
        tests = [claim_line.Expected(metric, one, other, metric, sign) for metric in metrics]
        return claim_line.line_of(rows, "claim", tests, always)[2]

    assert verdict(["up"], 1) == "confirmed"
    assert verdict(["up"], -1) == "refuted"
    assert verdict(["flat"], 1) == "cannot be told"
    assert verdict(["up", "flat"], 1).startswith("in part")
    assert verdict(["up", "flat"], -1, always=True) == "refuted"
    assert claim_line.line_of({}, "claim", [])[1:] == ("not measured", "cannot be told")


@pytest.mark.parametrize("kernel", ["rbf", "laplace", "imq"])
def test_few_particles_form_the_simplex_of_the_closed_form(kernel):
    """Side² = 4 l M |φ'(u)| / (1 + (M - 1) φ(u)) with l = ln(M + 1), u = 2 l, for N(0, 1)."""
    members = 4
    start = torch.randn(members, 5, generator=generator(0, "simplex"), dtype=torch.float64)
    found = densities.flow(lambda x: -x, start, densities.repulsion(f"kde+{kernel}"), 250)
    log = torch.tensor(members + 1.0, dtype=torch.float64).log()
    shape = densities.KERNELS[kernel]
    value, slope = shape.value(2 * log), shape.slope(2 * log)
    side = 4 * log * members * -slope / (1 + (members - 1) * value)
    squares = torch.nn.functional.pdist(found).square()
    torch.testing.assert_close(squares, side.expand_as(squares), rtol=2e-3, atol=0)

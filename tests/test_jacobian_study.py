"""The flows of the Jacobian study: their directions against autograd and against the library."""

import pytest
import torch

import shoal
from shoal.analysis.fidelity.problems import make
from studies.jacobian import flows


@pytest.mark.parametrize("name", ["linear", "regression", "classification"])
def test_the_jacobian_is_that_of_autograd(name):
    flow = flows.Flow(make(name), "legacy", "ntk", 0)
    J = flow.jacobian(flow.x)
    cotangent = torch.randn(J.shape[:3], generator=torch.Generator().manual_seed(0)).double()
    target = flow.pulled(cotangent, flow.x)
    torch.testing.assert_close(torch.einsum("mncd,mnc->md", J, cotangent), target)


@pytest.mark.parametrize("form", flows.FORMS)
@pytest.mark.parametrize("name", ["regression", "classification"])
def test_the_transpose_is_the_step_of_the_library(name, form):
    flow = flows.Flow(make(name), form, "transpose", 1)
    velocity, _ = shoal.forces(
        flow.ensemble, flow.posterior, flow.method.repulsion, (flow.x, flow.y), seed=1, step=3
    )
    flat = torch.cat([t.reshape(flows.MEMBERS, -1) for t in velocity.values()], 1)
    torch.testing.assert_close(flow.direction(3), len(flow.x) * flat, rtol=1e-9, atol=1e-9)


def test_preconditioned_outputs_move_along_the_velocity():
    """Without damping J J^+ v is the part of v that the weights can reach, here a projection."""
    flow = flows.Flow(make("linear"), "calibrated", "ntk", 0)
    J = flow.jacobian(flow.x)
    drive, push = flow.forces(0)
    velocity = (drive - push).squeeze(-1)
    direction = flow._preconditioned(J, flow.pulled(drive - push, flow.x)) * flow._stiffness() / 0.5
    reached = torch.einsum("mncd,md->mn", J, direction)
    projection = torch.einsum("mnd,mdk,mk->mn", J[:, :, 0], torch.linalg.pinv(J[:, :, 0]), velocity)
    assert (reached - projection).norm() < 0.02 * projection.norm()


@pytest.mark.parametrize("rule", ["transpose-flow", "ntk", "gauss-newton"])
def test_every_rule_rests_where_the_transpose_rests(rule):
    """At J^T v = 0 no rule moves; elsewhere each does."""
    flow = flows.Flow(make("linear"), "calibrated", rule, 0)
    J = flow.jacobian(flow.x)
    still = torch.zeros(flows.MEMBERS, J.shape[-1]).double()
    assert not flow._preconditioned(J, still).any()
    assert (flow._preconditioned(J, still + 1).norm(dim=1) > 0).all()

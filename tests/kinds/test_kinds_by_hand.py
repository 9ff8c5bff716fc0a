"""Outputs and steps of every kind of network, beside what one writes by hand with torch."""

import pytest
import torch
from kinds_table import Kind, cases

import shoal

pytestmark = pytest.mark.filterwarnings("ignore:members run:shoal.core.errors.ShoalWarning")

RATE = 0.1


def ensemble(kind: Kind) -> shoal.Ensemble:
    made = shoal.Ensemble.init(kind.build, kind.members, seed=2)
    made.use_output(kind.options.get("outputs"))
    return made


@pytest.mark.parametrize("kind", cases())
def test_outputs_are_those_of_each_member(kind):
    found = ensemble(kind)
    forces = kind.options.get("likelihood") if kind.name.startswith("energies") else None
    members = shoal.predict(found, kind.inputs, likelihood=forces).members
    for index in range(found.members):
        wanted = kind.by_hand(found.member(index)).detach()
        wanted = wanted.movedim(1, -1) if wanted.ndim == 4 else wanted
        torch.testing.assert_close(members[index], wanted)


def in_training(kind: Kind, member: torch.nn.Module) -> torch.nn.Module:
    """The member in training mode, except for layers that its factory keeps in evaluation mode."""
    member.train()
    if callable(kind.build):
        for name, layer in kind.build().named_modules():
            member.get_submodule(name).training = layer.training
    return member


@pytest.mark.parametrize("kind", cases())
def test_one_step_is_the_step_of_a_loop_in_torch(kind):
    """The loss of torch, its gradient and plain SGD, running statistics included.

    Tensors that all members train move by the mean of the members' gradients.
    """
    options = {"method": "ensemble", "prior": "flat", "optimizer": "sgd", "lr": RATE, "steps": 1}
    batches = [(kind.inputs, kind.y)]
    stepped = ensemble(kind)
    run = shoal.fit(stepped, batches, progress=False, **options, **kind.options)
    first = ensemble(kind)
    members = [in_training(kind, first.member(index)) for index in range(first.members)]
    for index, member in enumerate(members):
        loss = kind.loss(kind.by_hand(member), kind.y)
        loss.backward()
        assert run.history[0]["member_loss"][index] == pytest.approx(loss.item(), rel=1e-4)
    for name in first.trained_shared:
        mean = torch.stack([member.get_parameter(name).grad for member in members]).mean(0)
        for member in members:
            member.get_parameter(name).grad = mean
    for index, member in enumerate(members):
        torch.optim.SGD(member.parameters(), RATE).step()
        wanted, found = member.state_dict(), stepped.member(index).state_dict()
        assert wanted.keys() == found.keys()
        for name, tensor in wanted.items():
            torch.testing.assert_close(found[name], tensor, rtol=1e-4, atol=1e-5, msg=name)

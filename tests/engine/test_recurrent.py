"""Recurrent layers of all members at once equal torch's, with both derivatives."""

from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.func import functional_call, vmap
from torch.nn.utils.rnn import pack_padded_sequence

import shoal
from shoal.core.random import generator
from shoal.engine.members.member_runner import MemberRunner
from shoal.engine.members.recurrent import install_recurrent, own_recurrence

pytestmark = pytest.mark.usefixtures("double")

M, B, T, D, H = 3, 4, 5, 2, 6
KINDS = {
    "gru": (nn.GRU, {}),
    "lstm": (nn.LSTM, {}),
    "tanh": (nn.RNN, {}),
    "relu": (nn.RNN, {"nonlinearity": "relu"}),
}
FORMS = {
    "one": {},
    "two layers, both ways": {"num_layers": 2, "bidirectional": True},
    "batch first, no bias": {"batch_first": True, "bias": False, "num_layers": 2},
}


def drawn(*shape, name="x"):
    return torch.randn(*shape, generator=generator(0, f"{name}{shape}")).requires_grad_()


def ours(layer):
    """A layer with the same tensors that runs by one product per time step."""
    other = type(layer)(*_sizes(layer), **_settings(layer))
    other.load_state_dict(layer.state_dict())
    install_recurrent(other)
    return other


def _sizes(layer):
    return layer.input_size, layer.hidden_size


def _settings(layer):
    names = ["num_layers", "bias", "batch_first", "dropout", "bidirectional"]
    found = {name: getattr(layer, name) for name in names}
    if isinstance(layer, nn.RNN):
        found["nonlinearity"] = layer.nonlinearity
    return found


def states(layer, batch=B):
    directions = 2 if layer.bidirectional else 1
    shape = layer.num_layers * directions, batch, H
    if isinstance(layer, nn.LSTM):
        return drawn(*shape, name="h"), drawn(*shape, name="c")
    return drawn(*shape, name="h")


def derivatives(layer, x, hx):
    """Outputs, final states, input gradients and derivatives of a function of all of them."""
    outputs, last = layer(x, hx)
    last = last if isinstance(last, tuple) else (last,)
    value = outputs.sin().sum() + sum(each.square().sum() for each in last)
    (slope,) = torch.autograd.grad(value, x, create_graph=True)
    given = () if hx is None else hx if isinstance(hx, tuple) else (hx,)
    live = [x, *layer.parameters(), *given]
    second = torch.autograd.grad(slope.pow(3).sum() + value, live)
    return [outputs, *last, slope, *second]


@pytest.mark.parametrize("given", [False, True], ids=["zeros", "given states"])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", KINDS)
def test_values_and_both_derivatives_are_those_of_torch(kind, form, given):
    torch.manual_seed(0)
    build, settings = KINDS[kind]
    theirs = build(D, H, **settings, **FORMS[form])
    x = drawn(B, T, D) if theirs.batch_first else drawn(T, B, D)
    hx = states(theirs) if given else None
    wanted = derivatives(theirs, x, hx)
    with own_recurrence():
        found = derivatives(ours(theirs), x, hx)
    for mine, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("own_inputs", [False, True])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", KINDS)
def test_members_together_equal_members_alone(kind, form, own_inputs):
    build, settings = KINDS[kind]
    torch.manual_seed(0)
    layers = [build(D, H, **settings, **FORMS[form]) for _ in range(M)]
    shape = (B, T, D) if layers[0].batch_first else (T, B, D)
    x = drawn(M, *shape) if own_inputs else drawn(*shape)
    stacked = {n: torch.stack([dict(each.named_parameters())[n] for each in layers]).detach()
               .requires_grad_() for n, _ in layers[0].named_parameters()}  # fmt: skip
    skeleton = ours(layers[0])

    def one(tensors, x):
        return functional_call(skeleton, tensors, (x,))[0]

    with own_recurrence():
        together = vmap(one, in_dims=(0, 0 if own_inputs else None))(stacked, x)
    alone = [layer(x[i] if own_inputs else x)[0] for i, layer in enumerate(layers)]
    torch.testing.assert_close(together, torch.stack(alone), rtol=1e-12, atol=1e-12)
    (slope,) = torch.autograd.grad(together.sin().sum(), x, create_graph=True)
    found = torch.autograd.grad(slope.pow(3).sum(), list(stacked.values()))
    (slope,) = torch.autograd.grad(torch.stack(alone).sin().sum(), x, create_graph=True)
    for i, layer in enumerate(layers):
        wanted = torch.autograd.grad(
            slope.pow(3).sum(), list(layer.parameters()), retain_graph=True
        )
        for mine, other in zip(found, wanted, strict=True):
            torch.testing.assert_close(mine[i], other, rtol=1e-11, atol=1e-11)


def test_what_it_does_not_take_is_left_to_torch():
    x = drawn(T, B, D)
    lengths = torch.tensor([5, 4, 3, 1])
    for build, given in (
        (lambda: nn.GRU(D, H), pack_padded_sequence(x, lengths)),
        (lambda: nn.LSTM(D, H, proj_size=3), x),
        (lambda: nn.RNN(D, H), x[:, 0]),
    ):
        torch.manual_seed(0)
        theirs = build()
        torch.manual_seed(0)
        mine = build()
        install_recurrent(mine)
        with own_recurrence():
            found = mine(given)[0]
        wanted = theirs(given)[0]
        if isinstance(given, torch.Tensor):
            torch.testing.assert_close(found, wanted, rtol=0, atol=0)
        else:
            torch.testing.assert_close(found.data, wanted.data, rtol=0, atol=0)


class Reader(nn.Module):
    """The last output of a recurrent layer, read by a linear layer."""

    def __init__(self, dropout=0.0):
        super().__init__()
        self.layer = nn.GRU(D, H, num_layers=2, dropout=dropout, batch_first=True)
        self.last = nn.Linear(H, 3)

    def forward(self, x):
        return self.last(self.layer(x)[0][:, -1])


def test_masks_between_layers_are_drawn_by_keys():
    ensemble = shoal.Ensemble.init(lambda: Reader(0.5), M, seed=0).train()
    x = drawn(B, T, D).detach()
    with own_recurrence():
        together = ensemble(x, MemberRunner(), seed=1, step=2)
        alone = ensemble(x, MemberRunner("loop"), seed=1, step=2)
        later = ensemble(x, MemberRunner(), seed=1, step=3)
        still = ensemble.train(False)(x, MemberRunner())
    torch.testing.assert_close(together, alone, rtol=1e-12, atol=1e-12)
    assert not torch.allclose(together, later) and not torch.allclose(together, still)


@pytest.mark.parametrize("engine", ["vmap", "loop"])
def test_input_gradients_repel_as_with_torch(engine):
    x = drawn(8, T, D).detach()
    y = torch.randint(3, (8,), generator=generator(0, "y"))
    posterior = shoal.Posterior(shoal.likelihoods.Categorical(), shoal.priors.Gaussian(1.0), 8)
    repulsion = shoal.methods.get("forde-identity").repulsion
    found = []
    for block, kind in ((own_recurrence, engine), (nullcontext, "loop")):
        ensemble = shoal.Ensemble.init(Reader, M, seed=0).train()
        with block():
            found.append(
                shoal.forces(ensemble, posterior, repulsion, (x, y), mapping=MemberRunner(kind))
            )
    assert found[0][1].push > 1e-3 * found[0][1].drive
    for name, tensor in found[0][0].items():
        torch.testing.assert_close(tensor, found[1][0][name], rtol=1e-9, atol=1e-11)


def test_members_leave_as_layers_of_torch():
    ensemble = shoal.Ensemble.init(Reader, M, seed=0)
    member = ensemble.member(0)
    assert type(member.layer) is nn.GRU
    assert set(member.state_dict()) == set(Reader().state_dict())

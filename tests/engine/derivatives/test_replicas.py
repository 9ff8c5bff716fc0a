"""Layers of replicas that divide a batch, against the same layers at the whole batch."""

import copy
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn
from torch.func import functional_call, vmap

from shoal.core.errors import DataError
from shoal.core.random import chance, key
from shoal.engine.derivatives import fast_second_order
from shoal.engine.derivatives.replicas import Division, divided_batch, first_element
from shoal.engine.members.layers import install_dropout

ROWS = (slice(0, 4), slice(4, 7))


def on_replicas(run):
    """`run(division)` in one thread per replica; sums wait for all threads."""
    barrier, given = threading.Barrier(len(ROWS), timeout=20), {}

    def replica(place):
        def add(own):
            given[place] = own.detach()
            barrier.wait()
            found = sum(given[each] for each in range(len(ROWS)))
            barrier.wait()
            return found

        return run(Division(ROWS[place], add))

    with ThreadPoolExecutor(len(ROWS)) as pool:
        return list(pool.map(replica, range(len(ROWS))))


def layer_and_inputs(shape=(7, 3, 2, 2)):
    draw = torch.Generator().manual_seed(0)
    layer = nn.BatchNorm2d(3).double()
    for weight in layer.parameters():
        weight.data.normal_(generator=draw)
    return layer, 5 + torch.randn(shape, generator=draw, dtype=torch.float64)


def derivatives(layer, x, cotangent):
    """Outputs, first and second derivatives at the input, and running statistics."""
    x = x.clone().requires_grad_()
    outputs = layer(x)
    (first,) = torch.autograd.grad((outputs.tanh() * cotangent).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.square().sum(), x)
    return outputs.detach(), first.detach(), second, layer.running_mean, layer.running_var


@pytest.mark.parametrize("fast", [False, True])
def test_batch_norm_takes_the_statistics_of_all_replicas(fast):
    layer, x = layer_and_inputs()
    cotangent = torch.linspace(-1, 1, x.numel(), dtype=torch.float64).view_as(x)

    def run(division):
        mine, _ = layer_and_inputs()
        with divided_batch(division):
            if not fast:
                return derivatives(mine, x[division.rows], cotangent[division.rows])
            with fast_second_order():
                return derivatives(mine, x[division.rows], cotangent[division.rows])

    found, expected = on_replicas(run), derivatives(layer, x, cotangent)
    for parts, whole in zip(list(zip(*found, strict=True))[:3], expected[:3], strict=True):
        torch.testing.assert_close(torch.cat(parts), whole, rtol=1e-10, atol=1e-10)
    for replica in found:
        for statistics, whole in zip(replica[3:], expected[3:], strict=True):
            torch.testing.assert_close(statistics, whole, rtol=1e-12, atol=1e-12)


def test_members_of_a_vmap_exchange_their_sums_together():
    layer, x = layer_and_inputs()
    state = {n: torch.stack([t, 2 * t]) for n, t in layer.state_dict().items()}
    messages = []

    def run(division):
        own = {name: tensor.clone() for name, tensor in state.items()}

        def add(sums):
            messages.append(sums.shape)
            return division.add(sums)

        # The input has a member axis of its own, which is not the first.
        inputs = torch.stack([x, x.square()], 1)[division.rows]
        mine = copy.deepcopy(layer)  # a functional call changes its module for a moment
        call = vmap(lambda tensors, x: functional_call(mine, tensors, (x,)), in_dims=(0, 1))
        with divided_batch(Division(division.rows, add)):
            return call(own, inputs), own["running_var"]

    outputs = [(each[0].detach(), each[1]) for each in on_replicas(run)]
    assert len(messages) == 4 and all(shape[0] == 2 for shape in messages)
    for member, inputs in enumerate((x, x.square())):
        alone = {name: tensor[member].clone() for name, tensor in state.items()}
        whole = functional_call(layer, alone, (inputs,)).detach()
        parts = torch.cat([each[0][member] for each in outputs])
        torch.testing.assert_close(parts, whole, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(outputs[1][1][member], alone["running_var"])


def test_evaluation_mode_needs_no_other_replica():
    layer, x = layer_and_inputs()
    layer.eval()
    with divided_batch(Division(slice(4, 7), lambda _: pytest.fail("a message was sent"))):
        assert torch.equal(layer(x[4:]), layer(x)[4:])


@pytest.mark.parametrize("kind", [nn.Dropout, nn.Dropout2d])
def test_dropout_masks_are_rows_of_the_mask_of_the_batch(kind):
    network = nn.Sequential(kind(0.5))
    install_dropout(network)
    x = torch.ones(7, 3, 2, 2)
    whole, parts = network(x), []
    for rows in ROWS:
        with divided_batch(Division(rows, lambda own: own)):
            parts.append(network(x[rows]))
    assert torch.equal(torch.cat(parts), whole) and 0 < (whole > 0).float().mean() < 1


def test_dropout_that_does_not_begin_with_rows_is_refused():
    with divided_batch(Division(slice(4, 7), lambda own: own)):
        assert first_element(torch.Size([6, 5])) == 4 * 2 * 5
        with pytest.raises(DataError, match="mesh="):
            first_element(torch.Size([5, 3]))
    assert first_element(torch.Size([5, 3])) == 0


def test_a_mask_can_start_at_any_element():
    place = key(0, "mask", 1)
    assert torch.equal(chance(place, (20,), 0.5)[7:], chance(place, (13,), 0.5, first=7))

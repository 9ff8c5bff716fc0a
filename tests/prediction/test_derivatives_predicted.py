"""Derivatives of predictions by an input: autograd in a loop over modules, and differences."""

import pytest
import torch
from molecules import Molecules, gradients, molecules, potentials
from small_runs import assert_one_sentence, shoal_of
from torch import nn

import shoal
from shoal.core.errors import ConfigError, DataError

pytestmark = pytest.mark.usefixtures("double")

X = torch.linspace(-1, 1, 7 * 3).reshape(7, 3).double()
KNOWN = shoal.likelihoods.Gaussian()


def smooth(outputs=1):
    return lambda: nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, outputs))


class Atoms(nn.Module):
    """One output for each of the rows of an input [B, n, 3]."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1))

    def forward(self, pos, charge):
        return self.layers(pos) * charge.unsqueeze(-1)


def test_the_gradient_of_every_member_is_that_of_its_module_and_of_differences():
    ensemble = shoal_of(smooth(), 3)
    pred = shoal.predict(ensemble, X, likelihood=KNOWN, derivatives_of=True)
    assert pred.derivatives.shape == (3, 7, 3)
    for member, module in enumerate(ensemble):
        exact = gradients(module, X)[1][..., 0]
        torch.testing.assert_close(pred.derivatives[member], exact, rtol=0, atol=1e-12)
        step = torch.zeros_like(X)
        step[:, 1] = 1e-5
        with torch.no_grad():
            slope = (module(X + step) - module(X - step)) / 2e-5
        torch.testing.assert_close(pred.derivatives[member, :, 1], slope[:, 0], rtol=0, atol=1e-9)
    spread = pred.of_derivatives.stddev
    torch.testing.assert_close(spread, pred.derivatives.std(0, correction=0))
    torch.testing.assert_close(pred.of_derivatives.mean, pred.derivatives.mean(0))
    assert ensemble(X).shape == (3, 7, 1), "the ensemble gives outputs alone again"


def test_several_outputs_have_a_jacobian_in_any_batch_size_and_from_a_file(tmp_path):
    ensemble = shoal_of(smooth(2), 3)
    whole = shoal.predict(ensemble, X, likelihood=KNOWN, derivatives_of="x")
    exact = torch.stack([gradients(module, X)[1].mT for module in ensemble])
    torch.testing.assert_close(whole.derivatives, exact, rtol=0, atol=1e-12)
    file = tmp_path / "pred.safetensors"
    options = {"likelihood": KNOWN, "derivatives_of": True, "batch_size": 3, "out": file}
    parts = shoal.predict(ensemble, X, **options)
    torch.testing.assert_close(parts.derivatives, exact, rtol=0, atol=1e-12)
    again = shoal.Predictive.load(file)
    assert torch.equal(again.derivatives, parts.derivatives)
    assert torch.equal(again[2:4].derivatives, parts.derivatives[:, 2:4])


def test_the_derivatives_of_classes_are_of_their_probabilities():
    ensemble = shoal_of(smooth(4), 2)
    pred = shoal.predict(ensemble, X, derivatives_of=True)
    soft = [nn.Sequential(module, nn.Softmax(-1)) for module in ensemble]
    exact = torch.stack([gradients(module, X)[1].mT for module in soft])
    torch.testing.assert_close(pred.derivatives, exact, rtol=0, atol=1e-12)
    torch.testing.assert_close(pred.probs, shoal.predict(ensemble, X).probs)
    assert shoal.evaluate(pred, torch.zeros(7, dtype=torch.long))["nll"] > 0


def test_a_run_predicts_derivatives_in_the_unit_of_its_targets():
    ensemble = shoal_of(smooth(), 2)
    run = shoal.fit(
        ensemble, (X, 50 + 20 * X.sum(1)), epochs=1, precision="float64", progress=False
    )
    pred = shoal.predict(run, X, derivatives_of=True)
    step = torch.zeros_like(X)
    step[:, 2] = 1e-5
    up, down = (shoal.predict(run, X + sign * step).member_means for sign in (1, -1))
    slope = (up - down) / 2e-5
    torch.testing.assert_close(pred.derivatives[:, :, 2], slope, rtol=1e-8, atol=1e-6)
    assert pred.mean.shape == (7,)


def test_a_named_input_and_outputs_at_its_rows_which_are_summed():
    inputs = {"pos": torch.randn(4, 5, 3), "charge": torch.rand(4, 5)}
    ensemble = shoal_of(Atoms, 2)
    pred = shoal.predict(ensemble, inputs, likelihood=KNOWN, derivatives_of="pos")
    assert pred.mean.shape == (4, 5, 1)
    for member, module in enumerate(ensemble):
        pos = inputs["pos"].clone().requires_grad_()
        (exact,) = torch.autograd.grad(module(pos, inputs["charge"]).sum(), pos)
        torch.testing.assert_close(pred.derivatives[member], exact, rtol=0, atol=1e-12)
    with pytest.raises(DataError) as caught:
        shoal.predict(ensemble, inputs, likelihood=KNOWN, derivatives_of=True)
    assert_one_sentence(caught.value, "pos", "charge")
    with pytest.raises(DataError) as caught:
        shoal.predict(ensemble, inputs, likelihood=KNOWN, derivatives_of="position")
    assert_one_sentence(caught.value, "position")


@pytest.mark.filterwarnings("ignore:members run one after another")
def test_molecules_of_different_sizes_in_several_batches():
    batches = [molecules([3, 2]), molecules([1, 4, 2], seed=1)]
    ensemble = potentials()
    pred = shoal.predict(ensemble, batches, likelihood=KNOWN, derivatives_of="pos")
    assert pred.derivatives.shape == (2, 5, 4, 3)
    place = 0
    for batch in batches:
        for graph in range(int(batch.batch.max()) + 1):
            mine = batch.pos[batch.batch == graph].clone().requires_grad_()
            alone = Molecules(mine, torch.zeros(len(mine), dtype=torch.long))
            for member, module in enumerate(ensemble):
                found = pred.derivatives[member, place]
                (exact,) = torch.autograd.grad(module(alone).sum(), mine)
                torch.testing.assert_close(found[: len(mine)], exact, rtol=0, atol=1e-12)
                assert not found[len(mine) :].any()
            place += 1


@pytest.mark.filterwarnings("ignore:members run one after another")
def test_forces_turn_with_the_molecule_and_follow_the_order_of_its_atoms():
    data, ensemble = molecules([4]), potentials()
    turn = torch.linalg.qr(torch.randn(3, 3))[0]
    order = torch.tensor([2, 0, 3, 1])
    moved = Molecules(data.pos[order] @ turn, data.batch)
    one, other = (
        shoal.predict(ensemble, [each], likelihood=KNOWN, derivatives_of="pos")
        for each in (data, moved)
    )
    torch.testing.assert_close(one.mean, other.mean, rtol=0, atol=1e-12)
    turned = one.derivatives[:, :, order] @ turn
    torch.testing.assert_close(other.derivatives, turned, rtol=0, atol=1e-12)


def test_what_has_no_derivatives_says_so():
    ensemble = shoal_of(smooth(), 2)
    with pytest.raises(ConfigError) as caught:
        _ = shoal.predict(ensemble, X, likelihood=KNOWN).derivatives
    assert_one_sentence(caught.value, "derivatives_of")
    with pytest.raises(ConfigError) as caught:
        shoal.predict(ensemble, X, likelihood=KNOWN, derivatives_of=3)
    assert_one_sentence(caught.value, "derivatives_of")
    words = shoal_of(lambda: nn.Sequential(nn.Embedding(5, 3), nn.Flatten(), nn.Linear(6, 1)), 2)
    with pytest.raises(DataError) as caught:
        shoal.predict(words, torch.zeros(4, 2, dtype=torch.long), derivatives_of=True)
    assert_one_sentence(caught.value, "real input")

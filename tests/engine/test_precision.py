"""The types that a run calculates in, and that they are left as they were."""

from typing import ClassVar

import pytest
import torch
from torch import nn
from triton_ready import needs_gpu

import shoal
from shoal.engine.derivatives import torch_overrides
from shoal.engine.members.precision import calculating_in, full_precision, rough_products


def allowed():
    return torch.backends.cuda.matmul.allow_tf32


@pytest.fixture(params=[True, False], ids=["tensor float before", "none before"])
def before(request):
    kept, torch.backends.cuda.matmul.allow_tf32 = allowed(), request.param
    yield request.param
    torch.backends.cuda.matmul.allow_tf32 = kept


@pytest.mark.parametrize(("precision", "rough"), [("bfloat16", True), (None, False)])
def test_products_are_rough_only_where_the_networks_are(before, precision, rough):
    ensemble = shoal.Ensemble.init(lambda: nn.Linear(3, 2), 2, seed=0)
    with pytest.raises(ZeroDivisionError), calculating_in(precision, ensemble):
        assert not allowed()
        with rough_products(ensemble.compute):
            assert allowed() == rough
        assert not allowed()
        with rough_products(ensemble.compute):
            raise ZeroDivisionError
    assert allowed() == before
    assert ensemble.groups[0].compute is None


def test_tensor_float_that_was_asked_for_stays(before):
    ensemble = shoal.Ensemble.init(lambda: nn.Linear(3, 2), 2, seed=0)
    with calculating_in("tf32", ensemble), rough_products(ensemble.compute):
        assert allowed()


class Watched(nn.Module):
    """A network that notes the precision of float32 whenever it is called."""

    seen: ClassVar[set] = set()

    def __init__(self):
        super().__init__()
        self.stem, self.head = nn.Conv2d(1, 2, 3), nn.Linear(8, 2)

    def forward(self, x):
        self.seen.add((torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32))
        return self.head(torch.relu(self.stem(x)).flatten(-3))


X = torch.randn(12, 1, 4, 4, generator=torch.Generator().manual_seed(0))
Y = torch.arange(12) % 2
DATA = X, Y
SHORT = {"method": "forde", "steps": 2, "batch_size": 6, "progress": False}


@pytest.fixture
def watched():
    """A trained run; torch then allows TensorFloat everywhere."""
    run = shoal.fit(shoal.Ensemble.init(Watched, 2), DATA, **SHORT)
    Watched.seen.clear()
    with full_precision(tensor_float=True):
        yield run


CALLS = {
    "fit": lambda run: shoal.fit(run.ensemble, DATA, **SHORT),
    "grow": lambda run: shoal.grow(run, more=1, data=DATA, progress=False),
    "stepper": lambda run: shoal.Stepper(run.ensemble, n=12, method="f-kde")(DATA),
    "evaluate": lambda run: shoal.evaluate(run, DATA),
    "landscape": lambda run: shoal.landscape(run, DATA, test=DATA, parts=["curvature"], quick=True),
    "evidence": lambda run: shoal.evidence(run, DATA, priors=False),
    "adopt": lambda run: shoal.adopt([run.ensemble.member(0)], data=DATA, likelihood="categorical"),
}


@pytest.mark.parametrize("call", CALLS)
def test_float32_means_float32_wherever_networks_run(call, watched):
    CALLS[call](watched)
    assert Watched.seen == {(False, False)}
    assert torch.backends.cuda.matmul.allow_tf32 and torch.backends.cudnn.allow_tf32


def test_tensor_float_only_on_request(watched):
    shoal.fit(watched.ensemble, DATA, precision="tf32", **SHORT)
    assert (True, True) in Watched.seen


@needs_gpu
@pytest.mark.parametrize("what", ["fit", "predict"])
def test_a_gpu_computes_all_digits_of_float32(what, watched):
    """TensorFloat has three digits, float32 has seven."""
    if what == "fit":
        one, other = (
            shoal.fit(shoal.Ensemble.init(Watched, 2), DATA, device=device, **SHORT)
            for device in ("cpu", "cuda")
        )
        found = {name: t.cpu() for name, t in other.ensemble.weights.items()}
        expected = one.ensemble.weights
    else:
        found, expected = (
            {"": shoal.predict(watched, X, device=d).members} for d in ("cuda", "cpu")
        )
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=2e-5, atol=2e-6)


@needs_gpu
def test_videos_run_by_kernels_with_the_gradients_of_double_precision(monkeypatch):
    """Filters and videos have channels last on a GPU, so batch normalisation runs by kernels."""

    def network():
        filters = nn.Conv3d(2, 6, 3, padding=1, bias=False), nn.Conv3d(6, 4, 3, stride=2)
        norms = nn.BatchNorm3d(6), nn.BatchNorm3d(4)
        body = filters[0], norms[0], nn.ReLU(), filters[1], norms[1], nn.Sigmoid()
        return nn.Sequential(*body, nn.AdaptiveAvgPool3d(2), nn.Flatten(), nn.Linear(32, 3))

    generator = torch.Generator().manual_seed(0)
    data = torch.randn(24, 2, 5, 9, 8, generator=generator), torch.arange(24) % 3
    taken = []
    plain = torch_overrides.by_kernels
    note = lambda x: taken.append(plain(x)) or taken[-1]  # noqa: E731
    monkeypatch.setattr(torch_overrides, "by_kernels", note)

    def moved(device, precision):
        """How far a gradient step moves the weights, all in one."""
        ensemble = shoal.Ensemble.init(network, 2, seed=0)
        before = {name: t.detach().clone() for name, t in ensemble.weights.items()}
        how = {"optimizer": "sgd", "lr": 1.0, "steps": 1, "batch_size": 24, "progress": False}
        how |= {"engine": "loop", "device": device, "precision": precision}
        found = shoal.fit(ensemble, data, **how).ensemble.weights
        return torch.cat([(found[n].cpu().double() - t).flatten() for n, t in before.items()])

    expected = moved("cpu", "float64")
    assert not any(taken)
    found = moved("cuda", "bfloat16")
    assert all(taken) and len(taken) > 4
    assert (found - expected).norm() < 0.03 * expected.norm()

"""Every activation and every layer of `torch.nn`: which methods train it, and its derivatives."""

import warnings
from pathlib import Path

import pytest
import torch
from layers_table import ACTIVATIONS, LAYERS, markdown
from torch import nn
from torch.autograd import gradgradcheck
from torch.func import vmap
from torch.nn import functional as F

import shoal
from shoal.core.errors import DataError, ShoalWarning
from shoal.engine.derivatives.torch_overrides import hardsigmoid
from shoal.engine.members.member_runner import MemberRunner
from shoal.inference.network_pass import PassContext, TrackedInputs

PAGE = Path(__file__).parents[2] / "docs" / "second-order.md"
ALL = pytest.mark.parametrize("layer", ACTIVATIONS + LAYERS, ids=lambda layer: layer.label)
DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=[
            pytest.mark.gpu,
            pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
        ],
    ),
]


def test_no_layer_of_torch_is_missing():
    """Containers, losses, and lazy forms, which become another layer when they are called."""
    kinds = {
        kind for kind in vars(nn).values() if isinstance(kind, type) and issubclass(kind, nn.Module)
    }
    left_out = (nn.modules.loss._Loss, nn.modules.lazy.LazyModuleMixin)
    kinds -= {
        kind for kind in kinds if issubclass(kind, left_out) or kind.__name__.endswith("Loss")
    }
    kinds -= {
        nn.Module,
        nn.Container,
        nn.Sequential,
        nn.ModuleList,
        nn.ModuleDict,
        nn.ParameterList,
    }
    kinds -= {nn.ParameterDict, nn.DataParallel, nn.RNNBase, nn.RNNCellBase}
    assert {type(layer.make()) for layer in ACTIVATIONS + LAYERS} >= kinds


def test_the_page_shows_the_table():
    assert markdown() in PAGE.read_text()


@ALL
def test_which_methods_train_a_layer(layer):
    x, y = layer.x(), torch.tensor([0, 1, 1, 0])
    for method in ("ensemble", "f-kde", "forde-identity"):
        ensemble = shoal.Ensemble.init(layer.build, 2, seed=0)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", ShoalWarning)
            options = dict(method=method, steps=1, batch_size=len(x), engine="vmap", progress=False)
            if method == "forde-identity" and layer.refused:
                with pytest.raises(DataError) as refusal:
                    shoal.fit(ensemble, (x, y), **options)
                sentence = str(refusal.value)
                assert "cannot be differentiated twice" in sentence and layer.refused in sentence
                assert "\n" not in sentence and sentence.endswith("use a method such as 'f-kde'")
                continue
            run = shoal.fit(ensemble, (x, y), **options)
        in_turn = any("one after another" in str(warning.message) for warning in caught)
        assert in_turn != layer.together
        assert all(weight.isfinite().all() for weight in run.ensemble.weights.values())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("runner", ["loop", "vmap"])
@ALL
@pytest.mark.filterwarnings("ignore:members run one after another")
def test_input_gradients_differentiated_by_weights_are_finite_differences(layer, runner, device):
    if layer.refused:
        pytest.skip("has no second derivative")
    ensemble = shoal.Ensemble.init(layer.build, 2, seed=0).to(device, torch.float64).train()
    x = layer.x().to(device)
    x = x if layer.tokens else x.double()

    def gradients(live):
        torch.manual_seed(0)
        tracked = TrackedInputs.of(ensemble, x)
        outputs = tracked.run(
            ensemble.without_side_effects(), PassContext(mapping=MemberRunner(runner))
        )
        return tracked.gradients(outputs.sum(-1), live)

    weights = [weight.requires_grad_() for weight in ensemble.weights.values()]
    slopes, step = gradients(live=True), 1e-5
    ways = [torch.randn_like(weight) for weight in weights]
    cotangent = torch.randn_like(slopes)
    found = torch.autograd.grad((slopes * cotangent).sum(), weights, materialize_grads=True)
    along = sum((each * way).sum() for each, way in zip(found, ways, strict=True))
    sides = []
    for sign in (1, -1):
        with torch.no_grad():
            for weight, way in zip(weights, ways, strict=True):
                weight.add_(way, alpha=sign * step)
        sides.append((gradients(live=False) * cotangent).sum())
        with torch.no_grad():
            for weight, way in zip(weights, ways, strict=True):
                weight.sub_(way, alpha=sign * step)
    torch.testing.assert_close(along, (sides[0] - sides[1]) / (2 * step), rtol=1e-5, atol=1e-6)


def test_hardsigmoid_in_closed_form():
    x = torch.linspace(-5, 5, 24, dtype=torch.float64).reshape(2, 12).requires_grad_()
    assert gradgradcheck(hardsigmoid, x)
    assert gradgradcheck(lambda x: vmap(hardsigmoid)(x).square(), x)
    torch.testing.assert_close(hardsigmoid(x), F.hardsigmoid(x), rtol=0, atol=0)
    own, wanted = (
        torch.autograd.grad(f(x).square().sum(), x)[0] for f in (hardsigmoid, F.hardsigmoid)
    )
    torch.testing.assert_close(own, wanted, rtol=1e-7, atol=0)  # torch rounds 1/6 to float32
    kept = x.detach().clone()
    assert hardsigmoid(kept, inplace=True) is kept
    torch.testing.assert_close(kept, F.hardsigmoid(x.detach()))


def test_a_randomised_rectifier_draws_for_every_member_between_its_bounds():
    ensemble = shoal.Ensemble.init(
        lambda: nn.Sequential(nn.RReLU(0.2, 0.4), nn.Flatten(), nn.Linear(3, 3)), 2
    )
    layer = ensemble.groups[0].skeleton[0].train()
    x = -torch.ones(2, 1000, 3)
    drawn = vmap(layer, randomness="different")(x)
    assert drawn.max() <= -0.2 and drawn.min() >= -0.4 and drawn.std() > 0.05
    assert not torch.equal(drawn[0], drawn[1])
    layer.eval()
    torch.testing.assert_close(vmap(layer)(x), F.rrelu(x, 0.2, 0.4, training=False))

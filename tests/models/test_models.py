"""Architectures: shapes, sizes, laws over the registry."""

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, stack_module_state, vmap

from shoal.core.errors import ConfigError
from shoal.engine.members.member_runner import without_fallback_warnings
from shoal.models import (
    MLP,
    BatchEnsemble,
    LinearModel,
    MediumCNN,
    MultiHead,
    PreActResNet18,
    ResNet18,
    ResNet20,
    ResNet32,
    SmallCNN,
    TableMLP,
    TabM,
    WideResNet16x4,
    registry,
)
from shoal.models.parts import Block, PreActivated, Subsampled

EVERY = [registry.make(name) for name in registry.names()]
VARIANTS = [
    *EVERY,
    MLP(hidden=(), activation="tanh"),
    MLP(hidden=(7,), norm="batch"),
    MLP(hidden=(7, 5), norm="layer", dropout=0.2, activation="gelu"),
    SmallCNN(channels=(4,), activation="silu"),
    SmallCNN(channels=(4, 6), norm="batch", dropout=0.2),
    SmallCNN(channels=(4, 6, 8), norm="layer"),
    LinearModel(bias=False),
    ResNet18(widths=(4, 6), norm="layer"),
    ResNet20(widths=(4, 7), norm=None),
    ResNet32(widths=(4, 6, 8), norm="batch"),
    MultiHead(SmallCNN(channels=(4, 6), norm="batch")),
    BatchEnsemble(ResNet20(widths=(4, 7))),
    BatchEnsemble(MLP(hidden=(7,), norm="layer"), factors="normal"),
    TabM(hidden=(7, 5), dropout=0.0),
    TabM(hidden=(7,), mini=True),
    TableMLP(hidden=(7,), columns=3, embeddings=(40, 3)),
]


def parameters(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("config", VARIANTS, ids=repr)
@pytest.mark.parametrize("side", [8, 12, 28, 32])
def test_every_architecture_takes_small_images(config, side):
    model = config.build((3, side, side), 4)
    assert model(torch.rand(5, 3, side, side)).shape == (5, 4)


@pytest.mark.parametrize("config", VARIANTS, ids=repr)
def test_every_architecture_can_be_stacked(config):
    """Members mapped together with their buffers give what each gives alone."""
    models = [config.build((1, 8, 8), 3).double().eval() for _ in range(3)]
    stacked = stack_module_state(models)
    x = torch.rand(4, 1, 8, 8, dtype=torch.float64)

    def outputs(parameters, buffers):
        return functional_call(models[0], (parameters, buffers), (x,))

    with without_fallback_warnings():
        together = vmap(outputs)(*stacked)
        slopes = vmap(grad(lambda p, b: outputs(p, b).square().sum()))(*stacked)
    torch.testing.assert_close(together, torch.stack([model(x) for model in models]))
    models[1](x).square().sum().backward()
    for name, parameter in models[1].named_parameters():
        torch.testing.assert_close(slopes[name][1], parameter.grad)


@pytest.mark.parametrize("config", VARIANTS, ids=repr)
def test_every_architecture_is_repeated_from_its_table(config):
    table = registry.spec(config)
    lists = {k: list(v) if isinstance(v, tuple) else v for k, v in table.items()}
    assert registry.make(lists) == config


@pytest.mark.parametrize("config", EVERY, ids=registry.names())
def test_builds_are_seeded_and_independent(config):
    def weights():
        model = config.build((1, 8, 8), 10)
        return torch.cat([p.detach().flatten() for p in model.parameters()])

    torch.manual_seed(0)
    first, second = weights(), weights()
    torch.manual_seed(0)
    assert torch.equal(first, weights())
    assert not torch.equal(first, second)


@pytest.mark.parametrize(
    ("config", "shape", "outputs", "count"),
    [
        (LinearModel(), (1, 8, 8), 10, 650),
        (LinearModel(bias=False), (3,), 2, 6),
        (MLP(hidden=(100, 100, 100)), (1, 28, 28), 10, 99_710),
        (MLP(hidden=(7,), norm="batch"), (3,), 2, 4 * 7 + 2 * 7 + 8 * 2),
        (SmallCNN(channels=(4, 6)), (1, 8, 8), 10, 40 + (4 * 9 + 1) * 6 + (6 * 16 + 1) * 10),
        # As published: CIFAR-10 images, ten classes.
        (MediumCNN(), (3, 32, 32), 10, 971_146),
        (ResNet18(), (3, 32, 32), 10, 11_173_962),
        (ResNet20(), (3, 32, 32), 10, 269_722),
        (ResNet32(), (3, 32, 32), 10, 463_018),
        (ResNet32(norm="batch"), (3, 32, 32), 10, 464_154),
        (PreActResNet18(), (3, 32, 32), 10, 11_172_170),
        (WideResNet16x4(), (3, 32, 32), 10, 2_748_890),
        (MultiHead(MLP(hidden=(7,))), (3,), 2, 28 + 16),
        (BatchEnsemble(MLP(hidden=(7,))), (3,), 2, 28 + 10 + 16 + 9),
        (TabM(hidden=(7, 5)), (3,), 2, 28 + 10 + 40 + 12 + 12),
        (TabM(hidden=(7, 5), mini=True), (3,), 2, 3 + 28 + 40 + 12),
    ],
)
def test_number_of_parameters(config, shape, outputs, count):
    assert parameters(config.build(shape, outputs)) == count


def test_a_perceptron_is_what_it_says():
    model = MLP(hidden=(6,), activation="tanh").build((2, 3), 4)
    state = model.state_dict()
    (w1, b1, w2, b2) = state.values()
    x = torch.rand(5, 2, 3)
    torch.testing.assert_close(model(x), (x.flatten(1) @ w1.T + b1).tanh() @ w2.T + b2)


def test_dropout_acts_in_training_only():
    for config in (MLP(dropout=0.5), SmallCNN(dropout=0.5)):
        model = config.build((1, 8, 8), 10)
        x = torch.rand(4, 1, 8, 8)
        assert not torch.equal(model(x), model(x))
        model.eval()
        assert torch.equal(model(x), model(x))


def test_a_shifted_image_shifts_the_features():
    """Away from the border, convolutions move with the image by multiples of the halvings."""
    model = SmallCNN(channels=(3, 5, 4)).build((1, 32, 32), 2)
    features = model[:-2]
    x = torch.zeros(1, 1, 32, 32)
    x[..., 12:16, 12:16] = torch.rand(4, 4)
    moved = features(x.roll((4, 4), (2, 3)))
    torch.testing.assert_close(moved[..., 3:6, 3:6], features(x)[..., 2:5, 2:5])


RESIDUAL = [
    (ResNet20(), 19 + 1, [3, 3, 3]),
    (ResNet32(), 31 + 1, [5, 5, 5]),
    (ResNet18(), 17 + 1, [2, 2, 2, 2]),
    (PreActResNet18(), 17 + 1, [2, 2, 2, 2]),
    (WideResNet16x4(), 13 + 1, [2, 2, 2]),  # its name counts three shortcuts and no linear layer
]


@pytest.mark.parametrize(("config", "layers", "blocks"), RESIDUAL)
def test_residual_networks_have_the_depth_in_their_name(config, layers, blocks):
    """Layers with weights along the way, shortcuts aside; each stage works at half the size."""
    model = config.build((3, 32, 32), 10)
    along = [
        name
        for name, layer in model.named_modules()
        if isinstance(layer, (nn.Conv2d, nn.Linear)) and "shortcut" not in name
    ]
    assert len(along) == layers
    sizes = []
    for layer in model:
        if hasattr(layer, "shortcut"):
            layer.register_forward_hook(lambda _, __, out: sizes.append(out.shape[-1]))
    model(torch.rand(2, 3, 32, 32))
    assert sizes == [32 >> stage for stage, count in enumerate(blocks) for _ in range(count)]


def test_a_shortcut_without_weights_keeps_pixels_and_adds_zeros():
    x = torch.rand(2, 4, 6, 6)
    out = Subsampled(4, 7, 2)(x)
    assert out.shape == (2, 7, 3, 3)
    torch.testing.assert_close(out[:, 1:5], x[:, :, ::2, ::2])
    assert out[:, [0, 5, 6]].abs().sum() == 0


def test_residual_blocks_start_at_their_shortcut():
    """With the last filters at zero a block passes on what came in: rectified, or as it is."""
    x = torch.randn(3, 4, 5, 5)
    after, before = Block(4, 4, 1, norm=None).eval(), PreActivated(4, 4, 1).eval()
    for block in (after, before):
        for parameter in block.second.parameters():
            nn.init.zeros_(parameter)
    torch.testing.assert_close(after(x), x.relu())
    torch.testing.assert_close(before(x), x)


def test_the_medium_network_is_drawn_as_published():
    model = MediumCNN().build((3, 32, 32), 10)
    for layer in model:
        if isinstance(layer, (nn.Conv2d, nn.Linear)):
            fans = layer.weight[0].numel() + layer.weight[:, 0].numel()
            limit = (6 / fans) ** 0.5
            assert layer.weight.abs().max() <= limit
            torch.testing.assert_close(
                layer.weight.std().item(), limit / 3**0.5, rtol=0.05, atol=0.0
            )
            assert layer.bias.abs().sum() == 0
    kinds = [type(layer).__name__ for layer in model]
    assert kinds[:4] == ["Conv2d", "Dropout", "MaxPool2d", "ReLU"]
    assert kinds[-3:] == ["MaxPool2d", "Flatten", "Linear"]


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: MLP(activation="rleu"), "no activation called 'rleu'; did you mean 'relu'"),
        (lambda: MLP(norm="bacth"), "no norm called 'bacth'; did you mean 'batch'"),
        (lambda: MLP(dropout=1.0), "dropout must be a probability below 1, not 1.0"),
        (lambda: MLP(hidden=(10, 0)), "hidden must hold whole numbers of at least 1, not 0"),
        (lambda: MLP(hidden=10), "hidden must be a list of whole numbers"),
        (lambda: SmallCNN(channels=()), "channels must name at least one convolution"),
        (
            lambda: SmallCNN(channels=(2.5,)),
            "channels must be a list of whole numbers",
        ),
        (lambda: SmallCNN().build((64,), 10), r"needs images .* not inputs of shape \(64,\)"),
        (lambda: SmallCNN().build((1, 3, 8), 10), "of at least 4 x 4"),
        (lambda: MediumCNN().build((64,), 10), r"needs images .* not inputs of shape \(64,\)"),
        (lambda: MediumCNN(channels=()), "channels must name at least one convolution"),
        (lambda: ResNet20(norm="bacth"), "no norm called 'bacth'; did you mean 'batch'"),
        (lambda: ResNet18(widths=()), "at least one stage"),
        (lambda: PreActResNet18(widths=()), "at least one stage"),
        (lambda: WideResNet16x4().build((64,), 10), r"needs images \[C, H, W\], not \(64,\)"),
        (lambda: ResNet20(widths=(8, 4)).build((1, 8, 8), 2), "cannot go from 8 to 4"),
        (lambda: TabM(hidden=()), "at least one hidden layer"),
        (lambda: BatchEnsemble(factors="sings"), "no factors called 'sings'; did you mean 'signs'"),
        (lambda: BatchEnsemble(TabM()), "without shared tensors, such as 'mlp', not TabM"),
        (lambda: MultiHead(MultiHead()), "without shared tensors, such as 'mlp', not MultiHead"),
        (lambda: MultiHead(LinearModel()).build((3,), 2), "layers before its last one"),
    ],
)
def test_refuses_impossible_settings(make, sentence):
    with pytest.raises(ConfigError, match=sentence):
        make()

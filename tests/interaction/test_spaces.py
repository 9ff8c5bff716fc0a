"""Laws of every registered space: member i alone decides where member i is."""

import pytest
import torch

import shoal

pytestmark = pytest.mark.usefixtures("double")

spaces = shoal.spaces
BASES = {
    "weights": {"weight": (4, 3, 2), "bias": (4, 3), "scale": (4,)},
    "one": {"weight": (4, 3, 2)},
    "outputs": {"outputs": (4, 5, 3)},
    "gradients": {"gradients": (4, 5, 3, 2)},
}
GRADIENTS = spaces.InputGradients()


def every_space():
    """Each entry by itself, and each wrapper around each space of one leaf."""
    inner = {"outputs": spaces.Outputs(), "one": spaces.Weights(), "gradients": GRADIENTS}
    for name in spaces.registry:
        entry = spaces.registry[name]
        space = entry()
        yield pytest.param(space, space.base, id=name)
        if hasattr(space, "space"):
            for base, inside in inner.items():
                yield pytest.param(entry(space=inside), base, id=f"{name} around {base}")
    noise = torch.randn(15, 15, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    U = torch.linalg.qr(noise).Q[:, :4]
    factor = torch.linspace(1, 2, 15, dtype=torch.float64)
    turned = spaces.Rotated(spaces.Normalised(GRADIENTS), torch.linalg.qr(noise[:6, :6]).Q)
    yield pytest.param(turned, "gradients", id="rotated directions")
    yield pytest.param(spaces.Outputs(probabilities=True), "outputs", id="probabilities")
    yield pytest.param(spaces.Rotated(spaces.Outputs(), U), "outputs", id="rotated")
    yield pytest.param(spaces.Scaled(spaces.Outputs(), factor), "outputs", id="scaled")
    yield pytest.param(spaces.Normalised(spaces.Weights()), "weights", id="normalised weights")
    yield pytest.param(spaces.Scaled(spaces.Weights(), 0.3), "weights", id="scaled weights")


SPACES = list(every_space())


def tensors(kind, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in BASES[kind].items()}


@pytest.mark.parametrize(("space", "kind"), SPACES)
def test_leaves_are_members_by_sites_by_coordinates(space, kind):
    assert space.base == ("weights" if kind == "one" else kind)
    for leaf in space(tensors(kind)):
        assert leaf.ndim == 3
        assert len(leaf) == 4


@pytest.mark.parametrize(("space", "kind"), SPACES)
def test_each_member_alone(space, kind):
    base = tensors(kind)
    together = space(base)
    for i in range(4):
        alone = space({name: tensor[i : i + 1] for name, tensor in base.items()})
        for whole, leaf in zip(together, alone, strict=True):
            torch.testing.assert_close(whole[i : i + 1], leaf, rtol=1e-14, atol=1e-15)


@pytest.mark.parametrize(("space", "kind"), SPACES)
def test_coordinates_depend_on_the_own_tensors_alone(space, kind):
    base = {name: tensor.requires_grad_() for name, tensor in tensors(kind).items()}
    seen = torch.zeros(4)
    for leaf in space(base):
        gradients = torch.autograd.grad(
            leaf[2].square().sum(), list(base.values()), retain_graph=True, allow_unused=True
        )
        for gradient in gradients:
            if gradient is not None:
                seen += gradient.reshape(4, -1).abs().sum(1)
    assert (seen[[0, 1, 3]] == 0).all()
    assert seen[2] > 0


@pytest.mark.parametrize(("space", "kind"), SPACES)
def test_vmap_over_members_is_the_same(space, kind):
    base = tensors(kind)

    def one(own):
        leaves = space({name: tensor.unsqueeze(0) for name, tensor in own.items()})
        return [leaf.squeeze(0) for leaf in leaves]

    for mapped, leaf in zip(torch.vmap(one)(base), space(base), strict=True):
        torch.testing.assert_close(mapped, leaf, rtol=1e-14, atol=1e-15)


def test_weights_are_all_numbers_of_a_member():
    base = tensors("weights")
    leaves = spaces.Weights()(base)
    assert [tuple(leaf.shape) for leaf in leaves] == [(4, 1, 6), (4, 1, 3), (4, 1, 1)]
    for leaf, tensor in zip(leaves, base.values(), strict=True):
        assert torch.equal(leaf.flatten(), tensor.flatten())
        assert leaf.data_ptr() == tensor.data_ptr()


def test_outputs_are_one_vector_a_member():
    base = tensors("outputs")
    (leaf,) = spaces.Outputs()(base)
    assert torch.equal(leaf[:, 0], base["outputs"].reshape(4, 15))
    (leaf,) = spaces.Outputs(probabilities=True)(base)
    exponentials = base["outputs"].exp()
    target = exponentials / exponentials.sum(-1, keepdim=True)
    torch.testing.assert_close(leaf[:, 0], target.reshape(4, 15))


@pytest.mark.parametrize("kind", [kind for kind in BASES if kind != "gradients"])
def test_normalised_members_have_length_one_over_all_leaves(kind):
    inner = spaces.Outputs() if kind == "outputs" else spaces.Weights()
    leaves = spaces.Normalised(inner)(tensors(kind))
    squares = sum(leaf.square().sum(-1) for leaf in leaves)
    torch.testing.assert_close(squares, torch.ones(4, 1))


def test_every_point_is_a_site_of_the_input_gradients():
    base = tensors("gradients")
    (leaf,) = GRADIENTS(base)
    assert torch.equal(leaf, base["gradients"].reshape(4, 5, 6))
    (unit,) = spaces.Normalised(GRADIENTS)(base)
    torch.testing.assert_close(unit.norm(dim=-1), torch.ones(4, 5))


def test_a_vanishing_vector_stays_at_zero():
    base = {"outputs": torch.zeros(2, 3, 2, requires_grad=True)}
    (leaf,) = spaces.Normalised(spaces.Outputs())(base)
    (gradient,) = torch.autograd.grad(leaf.sum(), base["outputs"])
    assert (leaf == 0).all() and gradient.isfinite().all()


def test_rotation_by_an_orthonormal_basis_keeps_distances():
    base = tensors("outputs")
    U = torch.linalg.qr(torch.randn(15, 15, generator=torch.Generator().manual_seed(1))).Q
    (leaf,) = spaces.Rotated(spaces.Outputs(), U)(base)
    (plain,) = spaces.Outputs()(base)
    torch.testing.assert_close(
        torch.cdist(leaf[:, 0], leaf[:, 0]), torch.cdist(plain[:, 0], plain[:, 0])
    )
    torch.testing.assert_close(leaf[1, 0], U.mT @ plain[1, 0])

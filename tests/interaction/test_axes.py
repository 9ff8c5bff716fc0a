"""Axes of the inputs: against numpy's singular values and scipy's cosine transform."""

import numpy as np
import pytest
import torch

import shoal
from shoal.core.errors import ConfigError, DataError
from shoal.interaction import axes as bases
from shoal.interaction.axes import (
    Inputs,
    cosines,
    fitted,
    learned,
    needs_data,
    principal,
    variances,
    with_learned,
)

pytestmark = pytest.mark.usefixtures("double")

spaces = shoal.spaces


def data(points=60, shape=(2, 3, 4), seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(points, *shape, generator=generator)
    return 0.7 + x * torch.linspace(0.2, 3.0, x[0].numel()).reshape(shape)


def inputs(x, size=17):
    return Inputs(lambda: iter(x.split(size)))


@pytest.mark.parametrize("points", [60, 10], ids=["more points", "fewer points"])
@pytest.mark.parametrize("centred", [True, False])
def test_principal_components_are_singular_vectors(centred, points):
    x = data(points)
    U, values = principal(inputs(x), centred)
    X = x.flatten(1).numpy()
    X = X - X.mean(0) if centred else X
    singular, axes = np.linalg.svd(X, full_matrices=True)[1:]
    wanted = np.zeros(X.shape[1])
    wanted[: len(singular)] = singular**2 / (len(X) - 1)
    np.testing.assert_allclose(values, wanted, rtol=1e-9, atol=1e-10)
    torch.testing.assert_close(U.mT @ U, torch.eye(24), rtol=0, atol=1e-10)
    known = int((wanted > 1e-9).sum())  # the others have no axis of their own
    along = np.abs(np.sum(axes[:known] * U.numpy().T[:known], 1))
    np.testing.assert_allclose(along, 1, rtol=1e-8)


def test_leading_components_of_large_inputs(monkeypatch):
    noise = torch.randn(300, 40, generator=torch.Generator().manual_seed(0))
    x = 0.7 + noise @ torch.linalg.qr(noise[:40]).Q * 0.5 ** torch.arange(40)
    whole, values = principal(inputs(x))
    monkeypatch.setattr(bases, "EXACT", 20)
    monkeypatch.setattr(bases, "RANK", 5)
    monkeypatch.setattr(bases, "SPARE", 8)
    U, leading = principal(inputs(x))
    assert U.shape == (40, 5)
    torch.testing.assert_close(leading, values[:5], rtol=1e-6, atol=0)
    torch.testing.assert_close((U.mT @ whole[:, :5]).abs(), torch.eye(5), rtol=0, atol=1e-4)
    again, _ = principal(inputs(x))
    assert torch.equal(U, again)


@pytest.mark.parametrize("shape", [(7,), (5, 3), (2, 4, 6)])
def test_cosines_are_orthonormal_and_those_of_scipy(shape):
    fft = pytest.importorskip("scipy.fft")
    U = cosines(shape)
    D = len(U)
    torch.testing.assert_close(U.mT @ U, torch.eye(D), rtol=0, atol=1e-13)
    x = torch.randn(9, *shape, generator=torch.Generator().manual_seed(0))
    axes = {1: [1], 2: [1], 3: [2, 3]}[len(shape)]
    wanted = fft.dctn(x.numpy(), type=2, norm="ortho", axes=axes).reshape(9, D)
    np.testing.assert_allclose(x.flatten(1) @ U, wanted, atol=1e-12)


def test_variances_along_any_axes():
    x = data()
    U = torch.linalg.qr(torch.randn(24, 24, generator=torch.Generator().manual_seed(3))).Q[:, :5]
    flat = x.flatten(1)
    torch.testing.assert_close(variances(inputs(x), None), flat.var(0))
    torch.testing.assert_close(variances(inputs(x), U), (flat @ U).var(0))
    torch.testing.assert_close(
        variances(inputs(x), U, centred=False), (flat @ U).square().sum(0) / 59
    )


@pytest.mark.parametrize("name", ["forde", "forde-tuned", "forde-dct"])
def test_the_unit_of_the_data_does_not_matter(name):
    x = data()
    space = shoal.methods.get(name).repulsion.space
    one, other = (fitted(space, inputs(scale * x)) for scale in (1.0, 255.0))
    torch.testing.assert_close(one.factor, other.factor)
    squares = one.factor.square()
    if name != "forde-tuned":
        torch.testing.assert_close(squares.mean(), torch.tensor(1.0))
    assert squares.max() > 3 * squares.min()


@pytest.mark.parametrize("name", ["forde", "forde-dct", "forde-identity"])
def test_what_was_learned_can_be_kept_and_put_back(name):
    space = shoal.methods.get(name).repulsion.space
    assert needs_data(space) == (name != "forde-identity")
    whole = fitted(space, inputs(data()))
    assert not needs_data(whole)
    again = with_learned(space, learned(whole))
    gradients = {"gradients": torch.randn(3, 4, 2, 3, 4)}
    for one, other in zip(whole(gradients), again(gradients), strict=True):
        assert torch.equal(one, other)


def test_axes_of_the_users_own():
    x = data(shape=(6,))
    U = torch.linalg.qr(torch.randn(6, 6, generator=torch.Generator().manual_seed(1))).Q
    space = spaces.Scaled(spaces.Rotated(spaces.InputGradients(), U), "eigenvalues")
    whole = fitted(space, inputs(x))
    spread = (x @ U).var(0)
    torch.testing.assert_close(whole.factor.square(), spread / x.var(0).mean())
    with pytest.raises(ConfigError, match="columns of a basis must be orthonormal"):
        fitted(spaces.Rotated(spaces.InputGradients(), 2 * U), inputs(x))
    with pytest.raises(ConfigError, match=r"matrix \[6, R\], not of shape \(5, 5\)"):
        fitted(spaces.Rotated(spaces.InputGradients(), U[:5, :5]), inputs(x))


def test_names_that_nothing_has_and_axes_that_are_not_there_yet():
    with pytest.raises(ConfigError, match="no basis called 'pcaa'; did you mean 'pca'"):
        spaces.Rotated(spaces.InputGradients(), "pcaa")
    with pytest.raises(ConfigError, match="no scaling called 'tune'; did you mean 'tuned'"):
        spaces.Scaled(spaces.InputGradients(), "tune")
    gradients = {"gradients": torch.randn(2, 3, 6)}
    for space in (
        spaces.Rotated(spaces.InputGradients(), "pca"),
        spaces.Scaled(spaces.InputGradients(), "eigenvalues"),
    ):
        with pytest.raises(ConfigError, match="must be fitted to the training data"):
            space(gradients)
    tokens = torch.randint(9, (20, 6))
    with pytest.raises(DataError, match="'dct' needs real inputs, not integers"):
        fitted(spaces.Rotated(spaces.InputGradients(), "dct"), inputs(tokens))

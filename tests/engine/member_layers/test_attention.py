"""Attention under members equals attention of each member, with masks and all derivatives."""

import functools

import pytest
import torch
from torch.func import vmap
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import shoal
from shoal.core.random import generator
from shoal.engine.member_layers.attention import folded_attention
from shoal.engine.members import member_runner
from shoal.engine.members.member_runner import MemberRunner

M, B, H, T, D = 3, 2, 4, 5, 8


def drawn(*shape, name="x"):
    random = generator(0, f"{name}{shape}")
    return torch.randn(*shape, generator=random, dtype=torch.float64).requires_grad_()


def masks():
    some = torch.rand(B, 1, T, T, generator=generator(0, "mask")) > 0.3
    some |= torch.eye(T, dtype=torch.bool)
    own = torch.stack([some.roll(i, -1) | torch.eye(T, dtype=torch.bool) for i in range(M)])
    return {
        "none": None,
        "of data points": some,
        "for all": some[0, 0],
        "of members": own,
        "of members, for all data points": own[:, 0, 0],
    }


@pytest.mark.parametrize("kind", masks())
@pytest.mark.parametrize("leading", [(B, H), (H,)])
def test_members_are_folded(kind, leading):
    q, k = drawn(M, *leading, T, D, name="q"), drawn(M, *leading, T, D, name="k")
    v, mask = drawn(*leading, T, D, name="v"), masks()[kind]
    own = kind.startswith("of members")
    if leading == (H,) and kind in ("of data points", "of members"):
        mask = mask[..., 0, :, :, :] if mask.ndim > 4 else mask[0]

    def attend(q, k, mask):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)

    literal = torch.stack([attend(q[i], k[i], mask[i] if own else mask) for i in range(M)])
    with folded_attention():
        outputs = vmap(attend, in_dims=(0, 0, 0 if own else None))(q, k, mask)
    torch.testing.assert_close(outputs, literal, rtol=1e-12, atol=1e-14)
    found = torch.autograd.grad(outputs.sin().sum(), [q, k, v])
    wanted = torch.autograd.grad(literal.sin().sum(), [q, k, v])
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


def test_second_derivatives():
    q, k, v = (drawn(M, B, H, T, D, name=name) for name in "qkv")
    with sdpa_kernel(SDPBackend.MATH), folded_attention():
        outputs = vmap(F.scaled_dot_product_attention)(q, k, v)
    (slope,) = torch.autograd.grad(outputs.sin().sum(), q, create_graph=True)
    (second,) = torch.autograd.grad(slope.square().sum(), k)
    with sdpa_kernel(SDPBackend.MATH):
        literal = torch.stack([F.scaled_dot_product_attention(q[i], k[i], v[i]) for i in range(M)])
    (wanted,) = torch.autograd.grad(literal.sin().sum(), q, create_graph=True)
    (wanted,) = torch.autograd.grad(wanted.square().sum(), k)
    torch.testing.assert_close(second, wanted, rtol=1e-10, atol=1e-12)


def test_dropout_has_a_mask_of_its_own_for_every_member_and_leaves_the_mean():
    """Equal logits: a mean of T kept or dropped ones over 1 - p, so 1 in the mean."""
    q, ones, p, length = torch.zeros(M, B, H, 64, D), torch.ones(M, B, H, 64, D), 0.4, 64

    def attend(q, v):
        return F.scaled_dot_product_attention(q, q, v, dropout_p=p)

    with folded_attention():
        outputs = vmap(attend, randomness="different")(q, ones)
    assert outputs.shape == q.shape and not torch.equal(outputs[0], outputs[1])
    rows = outputs[..., 0]  # all D columns share the mask
    error = (p / (1 - p) / length / rows.numel()) ** 0.5
    assert abs(float(rows.mean()) - 1) < 5 * error
    torch.testing.assert_close(float(rows.var()), p / (1 - p) / length, rtol=0.2, atol=0)


def test_outside_of_vmap_nothing_is_different():
    q = drawn(B, H, T, D)
    plain = F.scaled_dot_product_attention
    with folded_attention():
        inside = F.scaled_dot_product_attention(q, q, q)
    assert F.scaled_dot_product_attention is plain
    torch.testing.assert_close(inside, plain(q, q, q))


def test_compiled_members_on_a_shared_trunk_are_the_same(monkeypatch):
    """Traced as for any compiler, and run without one, which not every machine has."""
    monkeypatch.setattr(
        member_runner.torch,
        "compile",
        functools.partial(torch.compile, backend="aot_eager"),
    )
    network = shoal.models.ViT(width=12, depth=1, heads=2).build((3, 8, 8), 5)
    ensemble = shoal.Ensemble.init(shoal.adapters.lora(network), 3).to(torch.float64)
    x = drawn(4, 3, 8, 8).detach()
    found = []
    for runner in (MemberRunner(), MemberRunner(compiled=True)):
        outputs = ensemble(x, runner)
        slopes = torch.autograd.grad(outputs.sin().sum(), list(ensemble.weights.values()))
        found.append([outputs, *slopes])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)

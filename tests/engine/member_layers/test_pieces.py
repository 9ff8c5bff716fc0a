"""Rows, parts and attention of one sequence with itself."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.autograd import gradcheck, gradgradcheck
from torch.nn import functional as F

from shoal.core.random import generator
from shoal.engine.member_layers.attention import self_attention
from shoal.engine.member_layers.parts import divided, mark_parts, unbound, whole_of
from shoal.engine.member_layers.pending import product
from shoal.engine.member_layers.rows import as_rows


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 4), min_size=0, max_size=3), st.integers(0, 5), st.booleans())
def test_rows_follow_memory_and_come_back(sizes, turn, expanded):
    x = torch.arange(2.0 * 3 * torch.Size(sizes).numel()).reshape(2, *sizes, 3)
    orders = list(torch.arange(len(sizes)).roll(turn)) if sizes else []
    x = x.permute(0, *(int(i) + 1 for i in orders), len(sizes) + 1)
    x = x[:1].expand(2, *x.shape[1:]) if expanded else x
    rows, order = as_rows(x)
    assert rows.shape == (2, x[0, ..., 0].numel(), 3)
    assert rows.data_ptr() == x.data_ptr()
    torch.testing.assert_close(order.restored(rows), x)
    torch.testing.assert_close(order.rows(x), rows)


def drawn(*sizes):
    random = generator(0, f"{sizes}")
    return torch.randn(*sizes, generator=random, dtype=torch.float64).requires_grad_()


@pytest.mark.parametrize("cut", [lambda x: unbound(x, 1), lambda x: divided(x, 2, 2)])
def test_parts_have_the_derivatives_of_torch(cut):
    def function(x):
        return sum(part.sin() * (i + 1) for i, part in enumerate(cut(x)))

    assert gradcheck(function, [drawn(2, 3, 4)])
    assert gradgradcheck(function, [drawn(2, 3, 4)])


def test_gradients_side_by_side_are_not_copied():
    x, places = drawn(2, 3, 4), []
    parts = unbound(x, 1)
    beside = torch.randn(2, 3, 4, dtype=torch.float64)
    x.register_hook(lambda gradient: places.append(gradient.data_ptr()))
    torch.autograd.backward(parts, beside.unbind(1))
    assert places == [beside.data_ptr()]
    torch.testing.assert_close(x.grad, beside)
    (apart,) = torch.autograd.grad(unbound(x, 1), x, [t.clone() for t in beside.unbind(1)])
    torch.testing.assert_close(apart, beside)


def test_the_whole_is_known_until_a_part_changes():
    whole = torch.randn(3, 2)
    parts = unbound(whole, 0)
    assert whole_of(parts) is None
    mark_parts(parts, whole)
    assert whole_of(parts) is whole
    assert whole_of((parts[1], parts[0], parts[2])) is None
    parts[1].add_(1)
    assert whole_of(parts) is None


def test_products_have_two_derivatives():
    given = drawn(2, 4, 3), drawn(2, 5, 3), drawn(2, 5)
    literal = torch.einsum("mni,moi->mno", *given[:2]) + given[2].unsqueeze(1)
    torch.testing.assert_close(product(*given), literal)
    assert gradcheck(product, given)
    assert gradgradcheck(product, given)


T, N, E = 5, 3, 8


def masks():
    random = generator(0, "masks")
    causal = nn.Transformer.generate_square_subsequent_mask(T, dtype=torch.float64)
    hidden = torch.rand(T, T, generator=random) > 0.7
    hidden.fill_diagonal_(False)
    late = torch.zeros(N, T, dtype=torch.bool)
    late[1:, -2:] = True
    return {
        "none": {},
        "causal": {"attn_mask": causal, "is_causal": True},
        "causal and padding": {
            "attn_mask": causal < 0,
            "is_causal": True,
            "key_padding_mask": late,
        },
        "booleans": {"attn_mask": hidden},
        "of heads": {"attn_mask": hidden.expand(2 * N, T, T)},
        "padding": {"key_padding_mask": late},
        "numbers for padding": {"key_padding_mask": torch.randn(N, T, generator=random).double()},
    }


@pytest.mark.parametrize("kind", masks())
def test_self_attention_is_that_of_torch(kind):
    layer, x = nn.MultiheadAttention(E, 2).double(), drawn(T, N, E)
    given = (E, 2, layer.in_proj_weight, layer.in_proj_bias, None, None, False, 0.0)
    given = (x, x, x, *given, layer.out_proj.weight, layer.out_proj.bias)
    found = self_attention(*given, need_weights=False, **masks()[kind])
    wanted, _ = F.multi_head_attention_forward(*given, need_weights=False, **masks()[kind])
    torch.testing.assert_close(found[0], wanted, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("change", ["other keys", "weights", "separate", "zeros"])
def test_other_attention_is_left_to_torch(change):
    layer, x = nn.MultiheadAttention(E, 2).double(), drawn(T, N, E)
    key = drawn(T, N, E) if change == "other keys" else x
    given = (E, 2, layer.in_proj_weight, layer.in_proj_bias, None, None, change == "zeros", 0.0)
    given = (x, key, key, *given, layer.out_proj.weight, layer.out_proj.bias)
    named = {"need_weights": change == "weights", "use_separate_proj_weight": change == "separate"}
    assert self_attention(*given, **named) is None

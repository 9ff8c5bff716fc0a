"""Formulas of torch in the place of kernels, so that a CPU can test what surrounds them."""

import functools

import torch
from torch.nn import functional as F

from shoal.engine.member_layers import attention, mode, pending
from shoal.engine.members import member_runner


def numbers(t):
    return 1.0 if t is None else t.unsqueeze(1)


def norm(s, weight, shift, how):
    centred = s - s.mean(-1, keepdim=True) if how.centred else s
    h = centred * (centred.square().mean(-1, keepdim=True) + how.eps).rsqrt()
    return h * numbers(weight) + (0.0 if shift is None else numbers(shift))


def add_norm(x, residual, bias, weight, shift, how):
    s = x if residual is None else x + residual
    s = s if bias is None else s + numbers(bias)
    return s, norm(s, weight, shift, how)


ACTIVATIONS = {
    "gelu": F.gelu,
    "gelu-tanh": functools.partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
    "silu": F.silu,
}


def activate(z, bias, kind):
    return ACTIVATIONS[kind](z if bias is None else z + numbers(bias))


def attend(parts, mask=None, causal=False, scale=None):
    q, k, v = parts[0].unbind(0) if len(parts) == 1 else parts
    return F.scaled_dot_product_attention(q, k, v, mask, 0.0, causal, scale=scale)


def use_formulas(monkeypatch):
    """Let the layers of members run on a CPU; returns what was called."""
    called = []

    def noted(function, name):
        def note(*given, **named):
            called.append((name, given))
            return function(*given, **named)

        return note

    monkeypatch.setattr(member_runner, "takes_device", lambda device: True)
    for module in (mode, pending):
        monkeypatch.setattr(module, "by_kernels", lambda *tensors: True)
    monkeypatch.setattr(attention, "takes_attention", lambda q, k, v, mask: q.ndim == 4)
    monkeypatch.setattr(attention, "attend", noted(attend, "attend"))
    monkeypatch.setattr(mode, "norm", noted(norm, "norm"))
    monkeypatch.setattr(pending, "add_norm", noted(add_norm, "add_norm"))
    monkeypatch.setattr(pending, "activate", noted(activate, "activate"))
    monkeypatch.setattr(pending, "add_bias_", lambda rows, bias: rows.add_(bias.unsqueeze(1)))
    monkeypatch.setattr(pending, "column_sums", lambda rows: rows.sum(1))
    return called


def distances(found, wanted):
    """Largest difference of each pair, over the size of what was wanted."""
    zero, both = torch.zeros(()), zip(found, wanted, strict=True)
    pairs = [(zero if a is None else a, zero if b is None else b) for a, b in both]
    return [((a - b).abs().max() / (1e-12 + b.abs().max())).item() for a, b in pairs]

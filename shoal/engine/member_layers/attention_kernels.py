"""Attention over short sequences, with first and second derivatives, as Triton kernels.

One program takes one head of one data point of one member: all its queries [T, D], keys and values
[S, D] fit into registers, so nothing but these is read and nothing but the results is written. The
probabilities are computed again in every pass, which is cheaper than to store them.

Tensors have any strides for batch, heads and tokens; the last axis is dense. MASKED is 0 without a
mask, 1 for a mask of booleans and 2 for one that is added to the logits.
"""

import triton
import triton.language as tl

__all__ = ["attend", "attend_back", "attend_twice"]


@triton.jit
def _place(batch, head, b, h, t, size, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Places of a tile [ROWS, COLUMNS] of one head, and which of them exist."""
    rows, columns = tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    place = batch * b + head * h + rows[:, None] * t + columns[None, :]
    return place, (rows < size)[:, None] & (columns < width)[None, :]


@triton.jit
def _probabilities(
    query, key, mask, batch, head, mb, mh, mt, ms, tokens, sources, scale, MASKED: tl.constexpr,
    CAUSAL: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """softmax(scale q k^T + mask) [T, S]; zero in rows that may look nowhere."""
    rows, columns = tl.arange(0, ROWS)[:, None], tl.arange(0, COLUMNS)[None, :]
    logits = tl.dot(query, tl.trans(key), input_precision="ieee") * scale
    seen = (rows < tokens) & (columns < sources)
    if MASKED > 0:
        place = batch * mb + head * mh + rows * mt + columns * ms
        given = tl.load(mask + place, mask=seen, other=0)
        if MASKED == 1:
            seen = seen & (given != 0)
        else:
            logits += given.to(tl.float32)
    if CAUSAL:
        seen = seen & (columns <= rows)
    logits = tl.where(seen, logits, float("-inf"))
    highest = tl.max(logits, 1)
    highest = tl.where(highest == float("-inf"), 0.0, highest)
    weights = tl.exp(logits - highest[:, None])
    total = tl.sum(weights, 1)
    return weights / tl.where(total == 0.0, 1.0, total)[:, None]


@triton.jit
def attend(
    q, k, v, mask, out, qb, qh, qt, kb, kh, kt, vb, vh, vt, mb, mh, mt, ms, ob, oh, ot,
    heads, tokens, sources, width, scale, MASKED: tl.constexpr, CAUSAL: tl.constexpr,
    T: tl.constexpr, S: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """P V with P = softmax(scale Q K^T)."""
    batch, head = (tl.program_id(0) // heads).to(tl.int64), tl.program_id(0) % heads
    place, inside = _place(batch, head, qb, qh, qt, tokens, width, T, D)
    query = tl.load(q + place, mask=inside, other=0.0)
    place, inside = _place(batch, head, kb, kh, kt, sources, width, S, D)
    key = tl.load(k + place, mask=inside, other=0.0)
    place, inside = _place(batch, head, vb, vh, vt, sources, width, S, D)
    value = tl.load(v + place, mask=inside, other=0.0)
    P = _probabilities(
        query, key, mask, batch, head, mb, mh, mt, ms, tokens, sources, scale, MASKED, CAUSAL, T, S
    )
    found = tl.dot(P.to(value.dtype), value, input_precision="ieee")
    place, inside = _place(batch, head, ob, oh, ot, tokens, width, T, D)
    tl.store(out + place, found.to(out.dtype.element_ty), mask=inside)


@triton.jit
def attend_back(
    q, k, v, mask, g, at_q, at_k, at_v, qb, qh, qt, kb, kh, kt, vb, vh, vt, mb, mh, mt, ms,
    gb, gh, gt, ab, ah, at, cb, ch, ct, heads, tokens, sources, width, scale,
    MASKED: tl.constexpr, CAUSAL: tl.constexpr, T: tl.constexpr, S: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """Gradients at queries, keys and values.

    dV = P^T dO, dP = dO V^T, dS = P (dP - rowsum(P dP)), dQ = scale dS K, dK = scale dS^T Q.
    """
    batch, head = (tl.program_id(0) // heads).to(tl.int64), tl.program_id(0) % heads
    place, inside = _place(batch, head, qb, qh, qt, tokens, width, T, D)
    query = tl.load(q + place, mask=inside, other=0.0)
    place, inside = _place(batch, head, kb, kh, kt, sources, width, S, D)
    key = tl.load(k + place, mask=inside, other=0.0)
    P = _probabilities(
        query, key, mask, batch, head, mb, mh, mt, ms, tokens, sources, scale, MASKED, CAUSAL, T, S
    )
    place, inside = _place(batch, head, gb, gh, gt, tokens, width, T, D)
    upper = tl.load(g + place, mask=inside, other=0.0)
    place, inside = _place(batch, head, vb, vh, vt, sources, width, S, D)
    value = tl.load(v + place, mask=inside, other=0.0)
    place, inside = _place(batch, head, cb, ch, ct, sources, width, S, D)
    found = tl.dot(tl.trans(P.to(upper.dtype)), upper, input_precision="ieee")
    tl.store(at_v + place, found.to(at_v.dtype.element_ty), mask=inside)
    dP = tl.dot(upper, tl.trans(value), input_precision="ieee")
    dS = (P * (dP - tl.sum(P * dP, 1)[:, None]) * scale).to(query.dtype)
    found = tl.dot(tl.trans(dS), query, input_precision="ieee")
    tl.store(at_k + place, found.to(at_k.dtype.element_ty), mask=inside)
    found = tl.dot(dS, key, input_precision="ieee")
    place, inside = _place(batch, head, ab, ah, at, tokens, width, T, D)
    tl.store(at_q + place, found.to(at_q.dtype.element_ty), mask=inside)


@triton.jit
def attend_twice(
    q, k, v, mask, g, a, b, e, at_g, at_q, at_k, at_v, qb, qh, qt, kb, kh, kt, vb, vh, vt,
    mb, mh, mt, ms, gb, gh, gt, ub, uh, ut, wb, wh, wt, ob, oh, ot, ab, ah, at, cb, ch, ct,
    heads, tokens, sources, width, scale, MASKED: tl.constexpr, CAUSAL: tl.constexpr,
    T: tl.constexpr, S: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """Derivative of `attend_back` at dO, Q, K and V, for cotangents a, b, e of dQ, dK, dV.

    With G = scale (a K^T + Q b^T) and r = rowsum(G P), the cotangent of dP is P (G - r) and that of
    P is C = dO e^T + G (dP - rowsum(P dP)) - r dP. That of the logits is P (C - rowsum(C P)).
    """
    batch, head = (tl.program_id(0) // heads).to(tl.int64), tl.program_id(0) % heads
    place, inside = _place(batch, head, qb, qh, qt, tokens, width, T, D)
    query = tl.load(q + place, mask=inside, other=0.0)
    place, inside = _place(batch, head, kb, kh, kt, sources, width, S, D)
    key = tl.load(k + place, mask=inside, other=0.0)
    P = _probabilities(
        query, key, mask, batch, head, mb, mh, mt, ms, tokens, sources, scale, MASKED, CAUSAL, T, S
    )
    place, inside = _place(batch, head, ub, uh, ut, tokens, width, T, D)
    u_q = tl.load(a + place, mask=inside, other=0.0)
    place, inside = _place(batch, head, wb, wh, wt, sources, width, S, D)
    u_k = tl.load(b + place, mask=inside, other=0.0)
    u_v = tl.load(e + place, mask=inside, other=0.0)
    G = tl.dot(u_q, tl.trans(key), input_precision="ieee")
    G = (G + tl.dot(query, tl.trans(u_k), input_precision="ieee")) * scale
    r = tl.sum(G * P, 1)[:, None]
    place, inside = _place(batch, head, gb, gh, gt, tokens, width, T, D)
    upper = tl.load(g + place, mask=inside, other=0.0)
    place, inside = _place(batch, head, vb, vh, vt, sources, width, S, D)
    value = tl.load(v + place, mask=inside, other=0.0)
    dP = tl.dot(upper, tl.trans(value), input_precision="ieee")
    centred = dP - tl.sum(P * dP, 1)[:, None]
    at_P = G * centred - r * dP + tl.dot(upper, tl.trans(u_v), input_precision="ieee")
    at_S = (P * (at_P - tl.sum(at_P * P, 1)[:, None]) * scale).to(query.dtype)
    dS = (P * centred * scale).to(query.dtype)
    place, inside = _place(batch, head, ab, ah, at, tokens, width, T, D)
    found = tl.dot(dS, u_k, input_precision="ieee") + tl.dot(at_S, key, input_precision="ieee")
    tl.store(at_q + place, found.to(at_q.dtype.element_ty), mask=inside)
    place, inside = _place(batch, head, cb, ch, ct, sources, width, S, D)
    found = tl.dot(tl.trans(dS), u_q, input_precision="ieee")
    found += tl.dot(tl.trans(at_S), query, input_precision="ieee")
    tl.store(at_k + place, found.to(at_k.dtype.element_ty), mask=inside)
    at_dP = (P * (G - r)).to(query.dtype)
    found = tl.dot(tl.trans(at_dP), upper, input_precision="ieee")
    tl.store(at_v + place, found.to(at_v.dtype.element_ty), mask=inside)
    found = tl.dot(at_dP, value, input_precision="ieee")
    found += tl.dot(P.to(u_v.dtype), u_v, input_precision="ieee")
    place, inside = _place(batch, head, ob, oh, ot, tokens, width, T, D)
    tl.store(at_g + place, found.to(at_g.dtype.element_ty), mask=inside)

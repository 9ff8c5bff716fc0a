"""The kernels of member-wise layers against formulas of torch, with both derivatives."""

import pytest
from derivatives_reference import run_kernels
from triton_ready import needs_triton

SETUP = """
import sys; sys.path.insert(0, "tests")
import torch
from itertools import product
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
import member_formulas as formulas
from shoal.engine.member_layers import activation, norm, short_attention
torch.manual_seed(0)
torch.backends.cuda.matmul.allow_tf32 = False
device = "cuda" if torch.cuda.is_available() else "cpu"

def draw(*sizes):
    return torch.randn(*sizes, device=device).requires_grad_()

def results(function, given, slope_of=0):
    given = [t for t in given if t is not None]
    with sdpa_kernel(SDPBackend.MATH):
        found = function(*given)
    found = found if isinstance(found, tuple) else (found,)
    total = sum((t.sin() * (i + 1)).sum() for i, t in enumerate(found))
    first = torch.autograd.grad(total, given, retain_graph=True)
    (slope,) = torch.autograd.grad(total, given[slope_of], create_graph=True)
    second = torch.autograd.grad(slope.sin().sum(), given, allow_unused=True)
    return [*found, *first, slope, *second]

def compare(ours, theirs, given):
    pairs = zip(results(ours, given), results(theirs, given), strict=True)
    for number, (a, b) in enumerate(pairs):
        a, b = (torch.zeros(()) if t is None else t.cpu() for t in (a, b))
        torch.testing.assert_close(a, b, rtol=2e-4, atol=2e-4, msg=lambda m: f"{number}: {m}")
"""

ATTENTION = """
sizes = [(5, 5, 8), (17, 17, 20), (5, 9, 16)]
for (tokens, sources, width), kind in product(sizes, ["none", "causal", "booleans", "numbers"]):
    q = draw(2, tokens, 3, width).detach().transpose(1, 2).requires_grad_()
    k, v, mask = draw(2, 3, sources, width), draw(2, 3, sources, width), None
    if kind == "booleans":
        mask = torch.rand(2, 1, tokens, sources, device=device) > 0.3
        mask[0, 0, 0] = False
    if kind == "numbers":
        mask = torch.randn(tokens, sources, device=device)
    causal = kind == "causal"
    compare(lambda *t: short_attention.attend(t, mask, causal, 0.4),
            lambda *t: formulas.attend(t, mask, causal, 0.4), [q, k, v])
whole = draw(3, 2, 3, 7, 8)
compare(lambda t: short_attention.attend((t,)), lambda t: formulas.attend((t,)), [whole])
"""

NORM = """
for width, centred, scaled, shifted in product([20, 33], *[(True, False)] * 3):
    how = norm.NormSettings(1e-5, centred)
    x, residual, bias = draw(3, 21, width), draw(3, 21, width), draw(3, width)
    gamma, beta = draw(3, width) if scaled else None, draw(3, width) if shifted else None
    learned = [t for t in (gamma, beta) if t is not None]
    def split(rest):
        rest = iter(rest)
        return next(rest) if scaled else None, next(rest) if shifted else None
    compare(lambda s, *rest: norm.norm(s, *split(rest), how),
            lambda s, *rest: formulas.norm(s, *split(rest), how), [x, *learned])
    compare(lambda x, r, b, *rest: norm.add_norm(x, r, b, *split(rest), how),
            lambda x, r, b, *rest: formulas.add_norm(x, r, b, *split(rest), how),
            [x, residual, bias, *learned])
    compare(lambda x, r, *rest: norm.add_norm(x, r, None, *split(rest), how)[1],
            lambda x, r, *rest: formulas.add_norm(x, r, None, *split(rest), how)[1],
            [x, residual, *learned])
"""

ACTIVATION = """
for kind, width in product(formulas.ACTIVATIONS, [20, 100]):
    z, bias = draw(3, 37, width), draw(3, width)
    compare(lambda z, b: activation.activate(z, b, kind),
            lambda z, b: formulas.activate(z, b, kind), [z, bias])
    compare(lambda z: activation.activate(z, None, kind),
            lambda z: formulas.activate(z, None, kind), [z])
    half = z.detach().half()
    fast = activation.activate(half, bias.detach().half(), kind).float()
    exact = formulas.activate(half.float(), bias.detach().half().float(), kind)
    torch.testing.assert_close(fast, exact, rtol=1e-3, atol=1e-3)
rows, bias = torch.randn(3, 37, 70, device=device), torch.randn(3, 70, device=device)
torch.testing.assert_close(activation.column_sums(rows), rows.sum(1), rtol=1e-4, atol=1e-4)
wanted = rows + bias.unsqueeze(1)
torch.testing.assert_close(activation.add_bias_(rows.clone(), bias), wanted)
"""

NETWORKS = """
sys.path.insert(0, "tests/engine/member_layers")
import shoal
from shoal.engine.members.member_runner import MemberRunner
from test_member_layers import NETWORKS, images
for name in ("vit", "encoder, normalised first", "encoder, two masks", "decoder", "mixed"):
    x = images().detach().float().to(device).requires_grad_()
    with torch.device(device):  # masks are made inside the networks
        ensemble = shoal.Ensemble.init(NETWORKS[name], 2, seed=1).to(device)
        runs = [results(lambda x, *_: ensemble(x, runner, True), [x, *ensemble.weights.values()])
                for runner in (MemberRunner(), MemberRunner("loop"))]
    for a, b in zip(*runs, strict=True):
        a, b = (torch.zeros(()) if t is None else t.cpu() for t in (a, b))
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3)
"""

SCRIPTS = {
    "attention": ATTENTION,
    "norm": NORM,
    "activation": ACTIVATION,
    "networks": NETWORKS,
}


@needs_triton
@pytest.mark.parametrize("what", SCRIPTS)
def test_by_kernels(what):
    run_kernels(SETUP + SCRIPTS[what])

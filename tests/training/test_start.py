"""A small run imports nothing that it does not use, and its optimiser is torch's."""

import inspect
import subprocess
import sys
import textwrap

import pytest
import torch

from shoal.training.options.optim import kind_of, make_optimizer, optimizers, uncompiled

SMALL = """
    import sys, torch, shoal
    from torch import nn
    build = lambda: nn.Sequential(nn.Linear(2, 4), nn.ReLU(), nn.Linear(4, 2))
    x, y = torch.randn(20, 2), torch.arange(20) % 2
    for method in ("ensemble", "kde", "svgd", "f-kde", "f-svgd", "forde"):
        run = shoal.fit(
            shoal.Ensemble.init(build, 3), (x, y), method=method, steps=2, progress=False
        )
    shoal.evaluate(shoal.predict(run, x), y)
    print([name for name in ("torch._dynamo", "sympy", "matplotlib") if name in sys.modules])
"""


def test_a_small_run_imports_no_compiler():
    """A compiler takes longer to import than such a run takes to train."""
    plain = subprocess.run(
        [sys.executable, "-c", "import sys, torch, torch.func; print('sympy' in sys.modules)"],
        check=True, capture_output=True, text=True,
    )  # fmt: skip
    if plain.stdout.strip() == "True":
        pytest.skip("this torch imports its compiler itself")
    found = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(SMALL)], check=True, capture_output=True, text=True
    )
    assert found.stdout.splitlines()[-1] == "[]", found.stderr


def stepped(optimizer, weight):
    for step in range(4):
        weight.grad = (weight.detach() + step).sin()
        optimizer.step()
        optimizer.zero_grad()
    return weight.detach()


@pytest.mark.parametrize("name", optimizers())
def test_every_optimiser_moves_as_that_of_torch(name):
    start = torch.linspace(-1, 1, 7, dtype=torch.float64)
    ours = start.clone().requires_grad_()
    optimizer = make_optimizer(name, {"w": ours}, lr=0.1)
    kind = kind_of(optimizer)
    theirs = start.clone().requires_grad_()
    known = inspect.signature(kind).parameters
    same = {setting: value for setting, value in optimizer.defaults.items() if setting in known}
    expected = stepped(kind([theirs], **same), theirs)
    assert kind.__name__.lower() == name and type(optimizer) is uncompiled(kind)
    assert torch.equal(stepped(optimizer, ours), expected)
    assert not torch.equal(expected, start)

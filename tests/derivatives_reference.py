"""Plain double backward, against which everything here is measured."""

import os
import subprocess
import sys
from contextlib import nullcontext

import torch

from shoal.engine.derivatives import fast_second_order


def second_order(module, x, fast, drive=1.0, push=1.0, fuse=None):
    """Outputs, input gradients, and what drive and push ask of the weights together."""
    x = x.detach().clone(memory_format=torch.preserve_format).requires_grad_()
    with fast_second_order(fuse) if fast else nullcontext():
        outputs = module(x)
    picked = outputs[torch.arange(len(x)), torch.arange(len(x)) % outputs.shape[1]]
    (slope,) = torch.autograd.grad(picked.sum(), x, create_graph=True)
    unit = slope / slope.square().flatten(1).sum(1).add(1e-12).sqrt().view(-1, *[1] * (x.ndim - 1))
    loss = push * unit.pow(3).sum() - drive * outputs.log_softmax(1)[:, 0].mean()
    found = torch.autograd.grad(loss, list(module.parameters()), allow_unused=True)
    names = [name for name, _ in module.named_parameters()]
    return outputs.detach(), slope.detach(), dict(zip(names, found, strict=True))


def distance(found, wanted):
    """Length of the difference over the length of what was wanted."""
    return ((found - wanted).norm() / wanted.norm().clamp(min=1e-30)).item()


def run_kernels(script):
    """Run a script that starts kernels, on a GPU or on the CPU in Triton's interpreter.

    On a GPU, torch would compute the convolutions around the kernels in TensorFloat. A difference
    in the last digit of float32 then becomes one in the third digit. The process ends at once:
    threads of autograd that still hold Python objects would abort an ordinary exit.
    """
    environment = os.environ | ({} if torch.cuda.is_available() else {"TRITON_INTERPRET": "1"})
    full = "import torch; torch.backends.cudnn.allow_tf32 = False\n"
    done = subprocess.run(
        [sys.executable, "-c", f"{full}{script}\nimport os; os._exit(0)"],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr

"""Forward pass and input gradient of one member as one compiled function, with its own backward.

The networks are traced below autograd, with the second derivatives of `fast_second_order`. The
compiler then sees forward pass, input gradient and the backward pass through both, and fuses the
operations between the convolutions. Autograd sees a function with a first derivative.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call

from shoal.engine.derivatives import fast_second_order
from shoal.engine.members.member_runner import lanes
from shoal.engine.members.precision import lowered
from shoal.inference.ensemble import Ensemble

__all__ = ["WholeGraph"]


class WholeGraph:
    """Computes what `forward_with_gradients` computes, each member by a compiled function."""

    def __init__(self, ensemble: Ensemble, streams: int) -> None:
        (self.group,) = ensemble.groups
        self.streams, self.names = streams, list(self.group.weights | self.group.buffers)
        self._run: Callable[..., Any] | None = None

    def __call__(self, inputs: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Outputs [M, B, C] and input gradients [M, B, ...]."""
        group = self.group
        state = group.weights | group.buffers
        if group.compute is not None:
            state = lowered(group.skeleton, state, group.compute)
        split = [tensor.unbind(0) for tensor in state.values()]
        found = []
        self._run = self._run or self._compiled()
        with lanes(self.streams, inputs.device, [inputs]) as side:
            for i in range(group.members):
                with torch.cuda.stream(side[i % len(side)]):
                    found.append(
                        self._run(*[tensors[i] for tensors in split], inputs[i].detach(), y)
                    )
        outputs, input_gradients = zip(*found, strict=True)
        return torch.stack(outputs), torch.stack(input_gradients)

    def _one(self, *given: Tensor) -> tuple[Tensor, Tensor]:
        *tensors, x, y = given
        x = x.detach().requires_grad_()
        state = dict(zip(self.names, tensors, strict=True))
        with fast_second_order(fuse=False):
            outputs = functional_call(self.group.skeleton, state, (x,))
        picked = outputs.gather(-1, y.unsqueeze(-1)).sum()
        (input_gradient,) = torch.autograd.grad(picked, x, create_graph=True)
        return outputs, input_gradient

    def _compiled(self) -> Callable[..., Any]:
        from functorch.compile import aot_function, min_cut_rematerialization_partition
        from torch._inductor.compile_fx import compile_fx_inner
        from torch._inductor.decomposition import select_decomp_table

        return aot_function(
            self._one,
            fw_compiler=compile_fx_inner,
            bw_compiler=compile_fx_inner,
            partition_fn=min_cut_rematerialization_partition,
            decompositions=select_decomp_table(),
            keep_inference_input_mutations=True,
        )

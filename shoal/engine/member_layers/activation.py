"""f(z + bias) of members' rows [M, N, C] with a bias [M, C], twice differentiable."""

import importlib
from typing import Any

import torch
from torch import Tensor

from shoal.engine.derivatives.demand import refuse_third, wanted
from shoal.engine.functorch import Operation
from shoal.engine.member_layers.rows import Strips

__all__ = ["activate", "add_bias_", "column_sums"]

PROGRAMS, TILE = 1056, 2048
"""Programs of a pass, eight for each multiprocessor of a large GPU; numbers that each holds."""


def activate(z: Tensor, bias: Tensor | None, kind: str) -> Tensor:
    """f(z + bias), with f named "gelu", "gelu-tanh", "relu" or "silu"."""
    return _Activation.apply(z, bias, kind)  # pyright: ignore[reportReturnType]


def add_bias_(rows: Tensor, bias: Tensor) -> Tensor:
    """Rows [M, N, C] plus a bias [M, C], in place."""
    strips, launch = _strips(rows)
    _kernels().activate[_grid(strips, launch)](
        rows, bias, rows, *strips.size, **_kind(rows, "none"), BIASED=True, **launch
    )
    return rows


def column_sums(rows: Tensor) -> Tensor:
    """Sums over rows [M, C] in float32."""
    strips, launch = _strips(rows)
    shares = strips.shares(1, rows)
    _kernels().column_sums[_grid(strips, launch)](rows.contiguous(), shares, *strips.size, **launch)
    return strips.summed(shares)[0]


class _Activation(Operation):
    @staticmethod
    def forward(z: Tensor, bias: Tensor | None, kind: str) -> Tensor:
        strips, launch = _strips(z)
        y = torch.empty_like(z)
        _kernels().activate[_grid(strips, launch)](
            z, z if bias is None else bias, y, *strips.size, **_kind(z, kind),
            BIASED=bias is not None, **launch,
        )  # fmt: skip
        return y

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
        z, bias, ctx.kind = inputs
        ctx.save_for_backward(z, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple:
        z, bias = ctx.saved_tensors
        asked = bias is not None and wanted(ctx, 1)
        summed = asked and not torch.is_grad_enabled()
        at_inputs: Any = _ActivationBack.apply(z, bias, gradients[0].contiguous(), ctx.kind, summed)
        at_z, total = at_inputs
        if asked and not summed:  # a sum that may be differentiated again is left to torch
            total = at_z.sum(1)
        return at_z, total.to(bias.dtype) if asked and bias is not None else None, None


class _ActivationBack(Operation):
    """g f'(z + bias), and its sum over rows."""

    @staticmethod
    def forward(z: Tensor, bias: Tensor | None, g: Tensor, kind: str, summed: bool) -> tuple:
        strips, launch = _strips(z)
        at_z = torch.empty_like(z)
        shares = strips.shares(1, z) if summed else z
        _kernels().activate_back[_grid(strips, launch)](
            z, z if bias is None else bias, g, at_z, shares, *strips.size,
            **_kind(z, kind), BIASED=bias is not None, SUMMED=summed, **launch,
        )  # fmt: skip
        return at_z, strips.summed(shares)[0] if summed else None

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: tuple) -> None:
        z, bias, g, ctx.kind, _ = inputs
        ctx.save_for_backward(z, bias, g)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> tuple:
        refuse_third()
        u = cotangents[0]
        if u is None:
            return (None,) * 5
        z, bias, g = ctx.saved_tensors
        strips, launch = _strips(z)
        u, at_g, at_z = u.contiguous(), torch.empty_like(z), torch.empty_like(z)
        shares = strips.shares(1, z)
        _kernels().activate_twice[_grid(strips, launch)](
            z, z if bias is None else bias, g, u, at_g, at_z, shares, *strips.size,
            **_kind(z, ctx.kind), BIASED=bias is not None, **launch,
        )  # fmt: skip
        total = None if bias is None else strips.summed(shares)[0].to(bias.dtype)
        return at_z, total, at_g, None, None


def _kind(z: Tensor, kind: str) -> dict[str, Any]:
    return {"KIND": _kernels().KINDS[kind], "FAST": z.dtype != torch.float32}


def _strips(rows: Tensor) -> tuple[Strips, dict[str, int]]:
    columns = min(64, max(16, 1 << (rows.shape[-1] - 1).bit_length()))
    height = TILE // columns
    launch = {"ROWS": height, "COLUMNS": columns, "num_warps": 2}
    return Strips(rows, height, PROGRAMS), launch


def _grid(strips: Strips, launch: dict[str, int]) -> tuple[int, int, int]:
    return strips.programs, -(-strips.width // launch["COLUMNS"]), strips.members


def _kernels() -> Any:
    return importlib.import_module("shoal.engine.member_layers.activation_kernels")

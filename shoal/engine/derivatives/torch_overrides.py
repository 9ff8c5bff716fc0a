"""Fast second derivatives for an unchanged module: functions of torch, replaced while it is called.

    with fast_second_order():
        outputs = module(x)
    (gradients,) = torch.autograd.grad(outputs.sum(), x, create_graph=True)

Every convolution and every batch normalisation in training mode that the module calls, by itself or
by the layers of `torch.nn`, becomes a function whose second derivative runs on fast kernels. Batch
normalisation in evaluation mode and the bias of a convolution become one where that pays. An
activation without a second derivative gets one, as in the smaller block `second_order()`.
Everything else is left to autograd, and outside of the block nothing is different.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from shoal.engine.derivatives.affine import Channels, affine
from shoal.engine.derivatives.backend import arithmetic, by_kernels, is_mapped
from shoal.engine.derivatives.convolution import Geometry, convolve
from shoal.engine.derivatives.deferred import Deferred, Waiting, computed
from shoal.engine.derivatives.normalisation import normalise
from shoal.engine.derivatives.replicas import current_division
from shoal.engine.functorch import Operation

__all__ = ["BatchNorm", "fast_second_order", "fused_layers", "hardsigmoid", "second_order"]


class BatchNorm(NamedTuple):
    """What `F.batch_norm` is called with."""

    input: Tensor
    running_mean: Tensor | None
    running_var: Tensor | None
    weight: Tensor | None = None
    bias: Tensor | None = None
    training: bool = False
    momentum: float = 0.1
    eps: float = 1e-5


def hardsigmoid(input: Tensor, inplace: bool = False) -> Tensor:
    """`F.hardsigmoid`, the one activation whose gradient torch cannot differentiate.

    y = min(max(x + 3, 0), 6) / 6 has the slope 1/6 between its kinks. Its gradient g / 6 depends on
    x by nothing but the side of a kink, so the second derivative ends there.
    """
    outputs: Any = _Hardsigmoid.apply(input)
    return input.copy_(outputs) if inplace else outputs


class _Hardsigmoid(Operation):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return F.hardsigmoid(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
        ctx.save_for_backward(output)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (y,) = ctx.saved_tensors
        return gradients[0] * ((y > 0) & (y < 1)) / 6


class second_order(TorchFunctionMode):  # noqa: N801
    """A block within which every activation of torch can be differentiated twice."""

    def __torch_function__(
        self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        """Replace the function that has no second derivative, and call all others."""
        if func is F.hardsigmoid:
            return hardsigmoid(*computed(args), **computed(kwargs or {}))
        return func(*args, **(kwargs or {}))


class fast_second_order(second_order):  # noqa: N801
    """A block within which convolution and batch normalisation have fast second derivatives.

    Values and derivatives are those of plain double backward, and running statistics are updated as
    always. Third derivatives of batch normalisation are refused. On a GPU, for images with channels
    last, batch normalisation or a bias is one pass with a shortcut and a rectifier that follow it.

    >>> layer, x = torch.nn.Conv2d(1, 2, 3), torch.ones(1, 1, 4, 4, requires_grad=True)
    >>> with fast_second_order():
    ...     outputs = layer(x)
    >>> (slope,) = torch.autograd.grad(outputs.sum(), x, create_graph=True)
    >>> (second,) = torch.autograd.grad(slope.sum(), layer.weight)
    >>> second.unique()
    tensor([4.])

    Args:
        fuse: join what follows a normalised layer to it; None to do so where it pays.
        light: outputs of normalised layers are computed again in the backward pass, which then has
            no second derivative.
    """

    def __init__(self, fuse: bool | None = None, light: bool = False) -> None:
        super().__init__()
        self.fuse, self.light = fuse, light

    def __torch_function__(
        self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        """Replace the functions that are known, and call all others."""
        kwargs = kwargs or {}
        if func in _AXES:
            return self._convolution(func, *computed(args), **computed(kwargs))
        if func is F.batch_norm and current_division() is None:
            return self._batch_norm(BatchNorm(*computed(args), **computed(kwargs)))
        return super().__torch_function__(func, types, args, kwargs)

    def _batch_norm(
        self, called: BatchNorm, note: Callable[[tuple[Tensor, Tensor]], None] | None = None
    ) -> Tensor:
        input, running_mean, running_var, weight, bias, training, momentum, eps = called
        running, count = (running_mean, running_var), input.numel() // input.shape[1]
        fuse = self._fuses(input)
        if not training and fuse and running_mean is not None and running_var is not None:
            fixed = Channels(weight, bias, running_mean, (running_var + eps).rsqrt())
            return self._waiting(input, functools.partial(affine, input, fixed))
        # One value has no variance, which torch says best.
        if not training or count < 2 or (weight is None) != (bias is None):
            return F.batch_norm(*called)
        with torch.no_grad():
            moments = arithmetic(input, "batchnorm").moments(input, eps, running, momentum)
        layer = functools.partial(
            normalise, input, weight, bias, moments, note=note, light=self.light
        )
        return self._waiting(input, layer) if fuse else layer()

    def _convolution(
        self,
        func: Callable,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        stride: Any = 1,
        padding: Any = 0,
        dilation: Any = 1,
        groups: int = 1,
    ) -> Tensor:
        axes = _AXES[func]
        plain = input.ndim != axes + 2 or isinstance(padding, str)
        if plain or torch.is_autocast_enabled(input.device.type):
            return func(input, weight, bias, stride, padding, dilation, groups)
        geometry = Geometry.of(stride, padding, dilation, groups, axes)
        if bias is None or not self._fuses(input):
            return self._convolved(input, weight, bias, geometry)
        return self._biased(input, weight, bias, geometry)

    def _convolved(
        self, input: Tensor, weight: Tensor, bias: Tensor | None, geometry: Geometry
    ) -> Tensor:
        return convolve(input, weight, bias, geometry)

    def _biased(self, input: Tensor, weight: Tensor, bias: Tensor, geometry: Geometry) -> Tensor:
        """A convolution whose bias waits for what follows."""
        outputs = convolve(input, weight, None, geometry)
        return self._waiting(outputs, functools.partial(affine, outputs, Channels(bias=bias)))

    def _waiting(self, input: Tensor, layer: Waiting) -> Tensor:
        return Deferred.of(input, layer)

    def _fuses(self, x: Tensor) -> bool:
        """What follows a layer with this input joins it."""
        return not is_mapped() and (by_kernels(x) if self.fuse is None else self.fuse)


class _Joined(NamedTuple):
    """Tensors that were joined along an axis, and the result."""

    parts: list[Tensor]
    dim: int
    result: Tensor
    versions: list[int]

    @classmethod
    def of(cls, parts: list[Tensor], dim: int, result: Tensor) -> "_Joined":
        return cls(parts, dim, result, [t._version for t in (*parts, result)])

    def leads(self, parts: list[Tensor], dim: int) -> bool:
        """Whether these tensors begin with those, and nobody has written to any of them."""
        count = len(self.parts)
        if dim != self.dim or len(parts) <= count:
            return False
        same = all(mine is other for mine, other in zip(self.parts, parts, strict=False))
        return same and self.versions == [t._version for t in (*self.parts, self.result)]


class fused_layers(fast_second_order):  # noqa: N801
    """A block within which layers that have kernels take one pass with what follows them.

    Those are the same kernels, for the sake of the first derivative: where there are none, as on a
    CPU or for images with channels first, everything is left to torch.

    Tensors that were joined before and are joined again, with more behind them, are taken as the
    whole that they are. In a dense network the gradient of every layer is then added to that of all
    earlier layers at once, instead of one by one.
    """

    _joined: _Joined | None = None

    def __torch_function__(
        self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        """Replace the functions that are known where kernels take their input."""
        if func in _AXES or func is F.batch_norm:
            args = computed(args)
            if args and by_kernels(args[0]):
                return super().__torch_function__(func, types, args, kwargs)
        if func is torch.cat and torch.is_grad_enabled() and not is_mapped():
            return self._cat(*computed(args), **computed(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def _cat(self, tensors: Sequence[Tensor], dim: int = 0, **named: Any) -> Tensor:
        parts, known = list(tensors), self._joined
        if known is not None and known.leads(parts, dim):
            result = torch.cat([known.result, *parts[len(known.parts) :]], dim, **named)
        else:
            result = torch.cat(parts, dim, **named)
        self._joined = None if named else _Joined.of(parts, dim, result)
        return result


_AXES: dict[Callable, int] = {F.conv1d: 1, F.conv2d: 2, F.conv3d: 3}

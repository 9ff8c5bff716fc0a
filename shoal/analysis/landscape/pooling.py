"""Maxima over 2 x 2 pixels as three comparisons of whole images.

On a CPU torch's pooling also notes where each maximum was, which only a gradient asks for, and
takes several times as long: of a plane of small networks it would be the largest part.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["Halving", "install_pooling"]

_PLAIN = {"padding": 0, "dilation": 1, "ceil_mode": False, "return_indices": False}


class Halving(nn.MaxPool2d):
    """Stands in for `nn.MaxPool2d(2)`; with gradients, or on a GPU, it is the same."""

    def forward(self, input: Tensor) -> Tensor:
        """The largest of four neighbours; a last odd row or column is left out."""
        if torch.is_grad_enabled() or input.device.type != "cpu":
            return F.max_pool2d(input, 2)
        height, width = (size // 2 * 2 for size in input.shape[-2:])
        x = input[..., :height, :width]
        rows = torch.maximum(x[..., ::2, :], x[..., 1::2, :])
        return torch.maximum(rows[..., ::2], rows[..., 1::2])


def install_pooling(module: nn.Module) -> None:
    """Let the layers of `module` that halve an image do so by comparisons, in place."""
    for layer in module.modules():
        if type(layer) is not nn.MaxPool2d:
            continue
        sizes = {layer.kernel_size, layer.stride}
        plain = all(getattr(layer, name) == value for name, value in _PLAIN.items())
        if plain and sizes <= {2, (2, 2)}:
            layer.__class__ = Halving

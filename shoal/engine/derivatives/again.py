"""Outputs of normalised layers that are computed once more in the backward pass.

A convolution keeps its input for the gradient of its filters. Behind a normalised layer that input
follows from the layer's own input, which is kept anyway, by one cheap pass. A sum with a shortcut
follows from the shortcut too: every other block of a residual network then keeps its output.
"""

from torch import Tensor

from shoal.engine.derivatives.backend import arithmetic
from shoal.engine.derivatives.formulas import Layer

__all__ = ["Again", "again_of", "remember"]

DEEPEST = 2
"""Layers that are computed again for one output: a normalised layer, and its shortcut."""


class Again:
    """How to compute the output of a normalised layer again.

    The output is kept from its first use in the backward pass until the layer's own.

    Args:
        layer: the layer.
        residual: what is added to it, if anything.
    """

    def __init__(self, layer: Layer, residual: Tensor | None) -> None:
        self.layer, self.value, self.version = layer, None, 0
        self.residual: Tensor | Again | None = None
        if residual is not None:
            self.residual = again_of(residual) or residual.detach()
        beneath = self.residual.depth if isinstance(self.residual, Again) else 0
        self.depth = 1 + (beneath if residual is not None else 0)

    def __call__(self) -> Tensor:
        """The output."""
        if self.value is None:
            beside = self.residual() if isinstance(self.residual, Again) else self.residual
            self.value = arithmetic(self.layer.x, "batchnorm").normalise(self.layer, beside)
        return self.value

    def forget(self) -> None:
        """The layer's own backward pass is over."""
        self.value = None


def remember(output: Tensor, again: Again) -> None:
    """From now on the output need not be kept, unless somebody changes it."""
    again.version = output._version
    setattr(output, "_shoal_again", again)  # noqa: B010


def again_of(tensor: Tensor) -> Again | None:
    """How to compute a tensor again; None if it has to be kept."""
    again = getattr(tensor, "_shoal_again", None)
    return again if again is not None and again.version == tensor._version else None

"""Parts that the architectures share: activations, normalisations, and their names."""

from torch import nn

from shoal.core.errors import ConfigError
from shoal.core.registry import nearest

__all__ = ["ACTIVATIONS", "check_parts", "check_widths", "normalisation"]

ACTIVATIONS: dict[str, type[nn.Module]] = {
    "relu": nn.ReLU,
    "tanh": nn.Tanh,
    "gelu": nn.GELU,
    "silu": nn.SiLU,
    "elu": nn.ELU,
    "softplus": nn.Softplus,
}
"""Names of the activations that an architecture can be built with."""

_NORMS = ("batch", "layer")
_MOST_LAYERS = 1000


def check_parts(activation: str, norm: str | None, dropout: float) -> None:
    """Refuse settings from which no layer can be made."""
    if activation not in ACTIVATIONS:
        raise ConfigError(
            f"there is no activation called '{activation}'; {nearest(str(activation), ACTIVATIONS)}"
        )
    if norm is not None and norm not in _NORMS:
        raise ConfigError(f"there is no norm called '{norm}'; {nearest(str(norm), _NORMS)}")
    if not 0 <= dropout < 1:
        raise ConfigError(f"dropout is a probability below 1, not {dropout}")


def check_widths(name: str, widths: tuple[int, ...]) -> None:
    """Refuse widths of layers that are not positive whole numbers."""
    if not isinstance(widths, (tuple, list)):
        raise ConfigError(f"{name} must be a tuple of widths such as ({widths!r},)")
    if len(widths) > _MOST_LAYERS:
        raise ConfigError(f"{name} has {len(widths):,} layers; at most {_MOST_LAYERS:,} are made")
    for width in widths:
        if not isinstance(width, int) or width < 1:
            raise ConfigError(f"{name} must hold whole numbers from 1 on, not {width!r}")


def normalisation(norm: str | None, width: int, images: bool = False) -> list[nn.Module]:
    """The layer, if any, that normalises `width` features or channels."""
    if norm is None:
        return []
    if norm == "batch":
        return [nn.BatchNorm2d(width) if images else nn.BatchNorm1d(width)]
    return [nn.GroupNorm(1, width) if images else nn.LayerNorm(width)]

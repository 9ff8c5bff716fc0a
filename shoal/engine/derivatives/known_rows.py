"""Results of layers for a batch, from which the same layers read the results of its first rows.

A forward pass of some rows would compute again what the pass of the whole batch has just computed.
Here a layer's function of autograd gets its value from the batch, and computes only derivatives.
Two passes of one network call the same layers in the same order. A result that has been changed in
place since it was noted is not read.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from shoal.core.errors import ConfigError

__all__ = ["Known", "KnownRows", "Results", "draws_numbers"]


class Known:
    """The value of a function of autograd that need not be computed.

    A tensor among the arguments would become an input of the function; inside of this it does not.
    """

    def __init__(self, value: Tensor) -> None:
        self.value = value

    def here(self) -> Tensor:
        """The value as a new tensor on the same memory, without history."""
        return self.value.detach()


class Results:
    """Results of one layer for the batch: alone, with a residual, rectified or both.

    Attributes:
        kind: what kind of layer this is, to recognise it.
    """

    def __init__(self, kind: Any) -> None:
        self.kind = kind
        self._noted: dict[Any, tuple[Tensor, int]] = {}

    def add(self, result: Tensor, form: Any = None) -> Tensor:
        """Note a result, and return it."""
        self._noted[form] = result, result._version
        return result

    def first(self, rows: int) -> dict[Any, Known]:
        """The first rows of the results that nobody has changed since."""
        return {
            form: Known(result.detach()[:rows])
            for form, (result, version) in self._noted.items()
            if result._version == version
        }


class KnownRows:
    """Results of all layers for a batch, and the same results for its first rows.

    Attributes:
        rows: number of rows.
        reliable: no layer has drawn random numbers, which other rows would not have.
    """

    def __init__(self, rows: int) -> None:
        self.rows, self.reliable = rows, True
        self._noted: list[Results] = []
        self._read = 0

    def note(self, kind: Any) -> Results:
        """Add the next layer."""
        self._noted.append(Results(kind))
        return self._noted[-1]

    def read(self, kind: Any) -> dict[Any, Known]:
        """The results of the next layer for the rows; none if they have to be computed."""
        results = self._noted[self._read] if self._read < len(self._noted) else None
        self._read += 1
        if results is None or results.kind != kind:
            raise ConfigError(
                "the network calls other layers for some rows than for the batch; set fraction=1"
            )
        return results.first(self.rows) if self.reliable else {}


def draws_numbers(func: Callable) -> bool:
    """Whether a function of torch draws random numbers, by its name."""
    name = getattr(func, "__name__", "")
    return any(part in name for part in _RANDOM)


_RANDOM = ("dropout", "rand", "bernoulli", "normal_", "uniform_", "rrelu", "gumbel", "poisson",
           "multinomial", "exponential_")  # fmt: skip

"""What has been found out about tensors that will never change again.

A grid trains hundreds of runs on the same data. Whoever holds such data and knows that nobody will
write to them says so once by `settle`; digests and checks are then made once and recalled, for as
long as the tensors live. Of all other tensors nothing is remembered.
"""

import functools
from collections.abc import Callable
from typing import Any, TypeVar

from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

__all__ = ["recalled", "settle"]

T = TypeVar("T")

_settled: Any = WeakTensorKeyDictionary()


def settle(*tensors: Tensor | None) -> None:
    """Promise that these tensors keep their values from now on."""
    for tensor in tensors:
        if tensor is not None and tensor not in _settled:
            _settled[tensor] = {}


def recalled(find: Callable[[Tensor], T]) -> Callable[[Tensor], T]:
    """Decorator: what `find` says of a settled tensor is found once.

    >>> import torch
    >>> calls = []
    >>> total = recalled(lambda tensor: calls.append(1) or float(tensor.sum()))
    >>> x = torch.ones(3)
    >>> settle(x)
    >>> total(x), total(x), total(torch.ones(3)), len(calls)
    (3.0, 3.0, 3.0, 2)
    """

    @functools.wraps(find)
    def wrapped(tensor: Tensor) -> T:
        known = _settled.get(tensor)
        if known is None:
            return find(tensor)
        if wrapped not in known:
            known[wrapped] = find(tensor)
        return known[wrapped]

    return wrapped

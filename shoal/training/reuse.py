"""Memory that a step frees and the next step asks for again."""

import torch

__all__ = ["keep_freed"]

_LARGEST = 2**25 - 2**14
"""Bytes in the largest block that glibc learns from, less room for its own notes."""


def keep_freed() -> None:
    """Let the C library keep up to 64 MiB that have been freed, for what is allocated next.

    Otherwise glibc gives memory back as soon as twice its largest block so far lies free, which is
    at the end of most steps. In the next step the system has to find and clear it again page by
    page, which takes longer than a matrix product writes to it. The C library goes by the largest
    block that it has seen freed: this is one, which costs nothing since nobody touches it. With
    other C libraries nothing happens.
    """
    torch.empty(_LARGEST, dtype=torch.uint8, device="cpu")

"""Kernels that are built side by side, before the first step needs them one after another.

Triton builds a kernel when it is first launched, with one core and for a third of a second. The
first step of a network launches up to sixty kernels for the first time.
"""

import os
import sys
import threading
import time
from collections.abc import Callable, Hashable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from types import SimpleNamespace
from typing import Any

import torch

AsyncCompileMode: Any = None
JITFunction: Any = None
driver: Any = None
libraries: Any = None
triton_key: Any = None
with suppress(Exception):  # Triton is missing, does not work, or builds one kernel after another
    from triton.runtime import build as libraries  # pyright: ignore[reportMissingImports]
    from triton.runtime import driver  # pyright: ignore[reportMissingImports]
    from triton.runtime.jit import JITFunction  # pyright: ignore[reportMissingImports]

    assert hasattr(libraries, "_load_module_from_path")
    from triton import AsyncCompileMode  # pyright: ignore[reportMissingImports]
with suppress(Exception):
    from triton.runtime.cache import triton_key  # pyright: ignore[reportMissingImports]

__all__ = ["Builders", "beginning_triton", "libraries_apart", "only_building"]

_MOST = 16
"""Largest number of threads that build."""

_SLOW = 0.1
"""A kernel that takes as many seconds was built, and not read from the disk."""

_ALIGNED = 16
"""Kernels differ for numbers and places in memory that are multiples of it."""

_TURN = 1e-4
"""Seconds of a turn of a thread beside those that build."""

_one_at_a_time = threading.Lock()
_begun: list[Future[None]] = []


@contextmanager
def _short_turns() -> Iterator[None]:
    """A block in which Python's threads take shorter turns.

    torch lets go of the interpreter in every operation. While another thread is busy, it gets it
    back a turn later: after 5 ms, a hundred times as long as the operation takes.
    """
    before = sys.getswitchinterval()
    sys.setswitchinterval(_TURN)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


@contextmanager
def beginning_triton(device: torch.device) -> Iterator[None]:
    """A block beside which a thread does what Triton does before its first kernel.

    It compiles the code with which it reaches the GPU, and reads all its files for a digest, by
    which kernels are found on the disk: half a second. Operations of torch leave two cores, since
    they wait for the slowest of their threads.
    """
    if device.type != "cuda" or triton_key is None or _begun:
        yield
        return
    pool = ThreadPoolExecutor(1, initializer=torch.cuda.set_device, initargs=(device,))
    _begun.append(pool.submit(_begin))
    pool.shutdown(wait=False)
    threads = torch.get_num_threads()
    torch.set_num_threads(max(threads - 2, 1))
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _begin() -> None:
    with _short_turns(), suppress(Exception):  # the first launch reports the reason
        driver.active.get_current_target()
        triton_key()


@contextmanager
def libraries_apart(loader: Any, backend: Any) -> Iterator[None]:
    """A block in which threads may compile and load at the same time what launches kernels.

    All these libraries have the same name, for which Python has one module. To load a library once
    more overwrites the module, maybe before another thread has taken its function from it. And
    Python knows a library by the number of its file, which can become another's while two threads
    write the same file. Either way a kernel would be launched with the arguments of another.

    Args:
        loader: the module of Triton that compiles and loads libraries.
        backend: the module of Triton that has them compiled for a GPU.
    """
    load, compiled = loader._load_module_from_path, backend.compile_module_from_src
    loading, sources = threading.Lock(), {}

    def load_alone(name: str, path: str) -> Any:
        with loading:
            return SimpleNamespace(**vars(load(name, path)))

    def compile_once(src: str, *args: Any, **kwargs: Any) -> Any:
        with sources.setdefault(src, threading.Lock()):
            return compiled(src, *args, **kwargs)

    loader._load_module_from_path, backend.compile_module_from_src = load_alone, compile_once
    try:
        yield
    finally:
        loader._load_module_from_path, backend.compile_module_from_src = load, compiled


class Builders(ThreadPoolExecutor):
    """Threads that build kernels and the host's code which launches them.

    Attributes:
        asked: number of kernels that this process did not have.
        built: number of kernels that were not on the disk either.
    """

    def __init__(self, device: torch.device) -> None:
        count = min(os.cpu_count() or 1, _MOST)
        super().__init__(count, initializer=torch.cuda.set_device, initargs=(device,))
        self.asked = self.built = 0

    def submit(self, build: Callable[[], Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """See `Executor`."""

        def built() -> Any:
            begun = time.perf_counter()
            kernel = build(*args, **kwargs)
            getattr(kernel, "run", None)  # makes what launches it
            self.built += time.perf_counter() - begun > _SLOW
            return kernel

        self.asked += 1
        return super().submit(built)


@contextmanager
def only_building(device: torch.device) -> Iterator[Builders | None]:
    """A block in which this thread builds Shoal's kernels side by side, and launches none of them.

    What these kernels would compute is undefined within the block, so its results are good for
    shapes and memory alone. All kernels are built when the block ends. Backward passes run in this
    thread as well; other threads launch as usual. Nothing changes without a GPU that has Triton,
    and while another thread is in such a block: None is given then.
    """
    if device.type != "cuda" or AsyncCompileMode is None or not _one_at_a_time.acquire(False):
        yield None
        return
    wait(_begun)
    launch, here = JITFunction.run, threading.get_ident()
    asked: set[Hashable] = set()

    def run(kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        own = threading.get_ident() == here and kernel.fn.__module__.startswith("shoal.")
        if own:
            form = id(kernel), *map(_form, args), *((n, _form(v, n)) for n, v in kwargs.items())
            if form in asked:  # Triton would find its digest anew
                return None
            asked.add(form)
        return launch(kernel, *args, grid=grid, warmup=warmup or own, **kwargs)

    try:
        with (
            _short_turns(),
            libraries_apart(libraries, sys.modules[driver.active.launcher_cls.__module__]),
            Builders(device) as builders,
            torch.autograd.set_multithreading_enabled(False),
            AsyncCompileMode(builders, ignore_errors=True),  # a launch reports the error
        ):
            JITFunction.run = run
            try:
                yield builders
            finally:
                JITFunction.run = launch
    finally:
        _one_at_a_time.release()


def _form(value: Any, name: str = "") -> Hashable:
    """What a kernel depends on of an argument, or more; a constant has a name."""
    if isinstance(value, torch.Tensor):
        return value.dtype, value.data_ptr() % _ALIGNED == 0
    if isinstance(value, int) and not name:
        return value == 1, value % _ALIGNED == 0, value.bit_length() > 31
    return value

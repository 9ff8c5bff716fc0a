"""What the figures were taken on."""

import os
import platform
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

__all__ = ["load", "machine", "versions"]


def machine(device: torch.device) -> dict[str, Any]:
    """Processor, cores, threads and GPU, with how many queues lead to it."""
    found: dict[str, Any] = {
        "system": platform.platform(terse=True),
        "processor": _processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "device": str(device),
        "load": load(),
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        found |= {"gpu": properties.name, "gpu_memory_gib": properties.total_memory / 2**30}
        found["gpu_connections"] = os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS")
    return found


def load() -> list[float] | None:
    """Processes that wanted a core in the last 1, 5 and 15 minutes; None where nobody counts."""
    with suppress(OSError, AttributeError):
        return [round(average, 2) for average in os.getloadavg()]
    return None


def versions() -> dict[str, str | None]:
    """Of everything that has a say in the speed."""
    return {
        "shoal": _installed("shoal"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": _installed("numpy"),
        "safetensors": _installed("safetensors"),
        "cuda": torch.version.cuda,
    }


def _installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _processor() -> str:
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()

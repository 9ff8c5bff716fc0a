"""`shoal doctor`: versions, devices, memory, data, and what is missing with the command to get it.

Nothing here needs torch to be imported first, so that a broken torch is reported like the rest.
"""

import importlib
import importlib.metadata
import os
import platform
import re
import shutil
import sys
import tomllib
from argparse import Namespace
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoal.core.display.text import counted, size
from shoal.core.errors import first_line

__all__ = ["EXTRAS", "Diagnosis", "Requirement", "diagnose", "requirements", "run"]

EXTRAS = {
    "report": "reports, figures, the digits demo, progress bars",
    "sklearn": "estimators for scikit-learn",
    "frames": "predictions as pandas tables",
    "loggers": "TensorBoard, Weights & Biases, MLflow",
    "export": "ONNX files",
    "adapters": "adapters of peft",
    "evidence": "log evidence and member weights",
    "fidelity": "reference samples of the posterior",
    "botorch": "Bayesian optimisation",
    "ase": "committees of interatomic potentials",
    "cluster": "jobs on a Slurm cluster",
}
"""What each extra gives."""

_MODULES = {"scikit-learn": "sklearn", "pillow": "PIL"}
"""Names to import, where they differ from the name to install."""

_PYTORCH = "https://pytorch.org/get-started"


@dataclass(frozen=True)
class Requirement:
    """A library with its lowest version.

    Attributes:
        library: the name to install.
        lowest: the lowest version, or "".
        extra: the extra that needs the library; "" if Shoal itself does.
    """

    library: str
    lowest: str = ""
    extra: str = ""

    @property
    def module(self) -> str:
        """The name to import."""
        return _MODULES.get(self.library, self.library)


@dataclass(frozen=True)
class Diagnosis:
    """The result of the command.

    Attributes:
        value: everything that was found, as plain values.
    """

    value: dict[str, Any]

    @property
    def status(self) -> int:
        """2 if Shoal cannot work as it is; a missing extra does not count."""
        return 2 if self.value["problems"] else 0

    @property
    def text(self) -> str:
        """The result in lines, and at the end what to do."""
        facts = self.value
        lines = [
            f"shoal     {facts['shoal'] or 'not installed'} ({facts['folder']})",
            f"python    {facts['python']} ({facts['executable']})",
            f"system    {facts['system']}",
            *_column("needs", [_library_line(each) for each in facts["required"]]),
            *_column("devices", [_device_line(each) for each in facts["devices"]]),
            f"memory    {_free(facts['memory'])}",
            f"disk      {_free(facts['disk'])} in {facts['disk']['folder']}",
            f"compiler  {facts['compiler'] or 'none found: no torch.compile, no compiled export'}",
            *_column("data", [_data_line(each) for each in facts["data"]]),
            *_column("extras", [_extra_line(name, each) for name, each in facts["extras"].items()]),
        ]
        todo = [*facts["problems"], *facts["advice"]]
        return "\n".join([*lines, "", *(todo or ["Nothing is missing."])])


def run(options: Namespace) -> Diagnosis:
    """Look at this machine and this environment."""
    return diagnose(requirements(), thorough=options.thorough)


def requirements() -> list[Requirement]:
    """What Shoal and its extras need: from pyproject.toml in a checkout, else as installed."""
    source = Path(__file__).parents[3] / "pyproject.toml"
    with suppress(OSError, tomllib.TOMLDecodeError, KeyError):
        project = tomllib.loads(source.read_text(encoding="utf-8"))["project"]
        if project["name"] == "shoal":
            extras = project["optional-dependencies"]
            pairs = [(line, "") for line in project["dependencies"]]
            pairs += [(line, name) for name in extras for line in extras[name]]
            return [_parsed(line, name) for line, name in pairs if name in {"", *EXTRAS}]
    with suppress(importlib.metadata.PackageNotFoundError):
        lines = importlib.metadata.requires("shoal") or []
        named = [(line, re.search(r"extra == ['\"]([\w-]+)", line)) for line in lines]
        pairs = [(line, name[1] if name else "") for line, name in named]
        return [_parsed(line, name) for line, name in pairs if name in {"", *EXTRAS}]
    return []


def _parsed(line: str, extra: str) -> Requirement:
    """A requirement from its line.

    >>> _parsed("torch>=2.9", "")
    Requirement(library='torch', lowest='2.9', extra='')
    """
    name = re.match(r"[\w.-]+", line)
    lowest = re.search(r">=\s*([\w.]+)", line)
    return Requirement(name[0] if name else line, lowest[1] if lowest else "", extra)


def diagnose(needed: Sequence[Requirement], thorough: bool = False) -> Diagnosis:
    """Everything that the command tells.

    Args:
        needed: libraries of Shoal and its extras.
        thorough: also import every library, and compile a small function.
    """
    required = [_library(each, True) for each in needed if not each.extra]
    extras: dict[str, Any] = {}
    for name, gives in EXTRAS.items():
        libraries = [_library(each, thorough) for each in needed if each.extra == name]
        complete = bool(libraries) and all(not each["problem"] for each in libraries)
        command = f"pip install 'shoal[{name}]'"
        extras[name] = {"gives": gives, "complete": complete, "libraries": libraries}
        extras[name] |= {"install": None if complete else command}
    problems = [
        f"{each['library']} {each['problem']}; type: pip install '{each['library']}"
        f"{'>=' + each['lowest'] if each['lowest'] else ''}'"
        for each in required
        if each["problem"]
    ]
    devices, advice = _devices()
    compiler, compiler_advice = _compiler(thorough)
    return Diagnosis(
        {
            "shoal": _version("shoal"),
            "folder": str(Path(__file__).parents[2]),
            "python": platform.python_version(),
            "executable": sys.executable,
            "system": platform.platform(),
            "required": required,
            "devices": devices,
            "memory": _memory(),
            "disk": _disk(),
            "compiler": compiler,
            "data": _data(),
            "extras": extras,
            "problems": problems,
            "advice": [*advice, *compiler_advice, *_missing_extras(extras)],
        }
    )


def _library(needed: Requirement, imported: bool) -> dict[str, Any]:
    """Version and problem of a library; any exception of an import counts."""
    version = _version(needed.library)
    problem = "is missing" if version is None else ""
    if version is not None and _numbers(version) < _numbers(needed.lowest):
        problem = f"{version} is older than {needed.lowest}"
    elif version is not None and imported:
        try:
            importlib.import_module(needed.module)
        except Exception as error:
            problem = f"cannot be imported ({first_line(error)})"
    about = {"library": needed.library, "version": version, "lowest": needed.lowest}
    return {**about, "problem": problem}


def _version(library: str) -> str | None:
    try:
        return importlib.metadata.version(library)
    except importlib.metadata.PackageNotFoundError:
        return None


def _numbers(version: str) -> list[int]:
    """The release of a version, to compare it.

    >>> _numbers("2.13.0+cpu") >= _numbers("2.9"), _numbers("1.4rc1")
    (True, [1, 4])
    """
    release = re.match(r"\d+(\.\d+)*", version)
    return [int(part) for part in release[0].split(".")] if release else []


def _devices() -> tuple[list[dict[str, Any]], list[str]]:
    """The devices that torch can use, and why there is no GPU where one is expected."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    devices: list[dict[str, Any]] = [{"device": "cpu", "name": platform.machine(), "cores": cores}]
    try:
        import torch
    except Exception:
        return devices, []
    devices[0]["threads"] = torch.get_num_threads()
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        about: dict[str, Any] = {"device": f"cuda:{index}"}
        with suppress(RuntimeError):
            about["name"] = torch.cuda.get_device_name(index)
            about["free"], about["total"] = torch.cuda.mem_get_info(index)
        devices.append(about)
    if torch.backends.mps.is_available():
        devices.append({"device": "mps", "name": "Apple GPU"})
    card = shutil.which("nvidia-smi") is not None
    if len(devices) > 1 or not (card or torch.version.cuda):
        return devices, []
    if torch.version.cuda is None:
        return devices, [f"This torch is built without CUDA; get another build: {_PYTORCH}"]
    return devices, [
        f"torch is built for CUDA {torch.version.cuda} but finds no GPU; type: nvidia-smi"
    ]


def _memory() -> dict[str, int | None]:
    """Bytes of main memory: free and total, within the limit of a container."""
    from shoal.core.storage.disk import machine_memory

    total, free = machine_memory(), None
    with suppress(OSError, ValueError, IndexError):
        free = 1024 * int(Path("/proc/meminfo").read_text().split("MemAvailable:")[1].split()[0])
    with suppress(OSError, ValueError):
        limit = int(Path("/sys/fs/cgroup/memory.max").read_text())
        used = int(Path("/sys/fs/cgroup/memory.current").read_text())
        total = limit if total is None else min(total, limit)
        free = limit - used if free is None else min(free, limit - used)
    return {"free": free, "total": total}


def _disk() -> dict[str, Any]:
    usage = shutil.disk_usage(Path.cwd())
    return {"folder": str(Path.cwd()), "free": usage.free, "total": usage.total}


def _compiler(thorough: bool) -> tuple[str | None, list[str]]:
    """The C++ compiler that torch.compile and compiled exports use."""
    named = os.environ.get("CXX", "")
    compiler = next(filter(None, map(shutil.which, (named, "g++", "clang++", "c++"))), None)
    if compiler is None:
        how = {"Darwin": "xcode-select --install", "Linux": "apt install g++"}
        command = how.get(platform.system())
        return None, [f"For torch.compile type: {command}"] if command else []
    if thorough:
        try:
            import torch

            torch.compile(lambda x: x.sin() + 1)(torch.ones(3))
        except Exception as error:
            return compiler, [f"torch.compile fails with {compiler}: {first_line(error)}"]
    return compiler, []


def _data() -> list[dict[str, Any]]:
    """Every folder of data files, with the data sets that are complete in one of them."""
    try:
        from shoal.data.catalogue import COLLECTIONS
        from shoal.data.files.store import folders, present, shared
    except Exception:  # without torch
        return []
    here = [name for name in COLLECTIONS if present(name) == "here"]
    return [
        {
            "folder": str(folder),
            "from": "SHOAL_DATA" if folder == shared() else "cache",
            "exists": folder.is_dir(),
            "complete": here,
        }
        for folder in folders()
    ]


def _missing_extras(extras: Mapping[str, Any]) -> list[str]:
    missing = [each for each in extras.values() if not each["complete"]]
    return [f"For {each['gives']} type: {each['install']}" for each in missing]


def _column(title: str, lines: Sequence[str]) -> list[str]:
    starts = [title.ljust(10), *[" " * 10] * len(lines)]
    return [f"{start}{line}" for start, line in zip(starts, lines, strict=False)]


def _library_line(about: Mapping[str, Any]) -> str:
    wanted = f"(at least {about['lowest']})" if about["lowest"] else ""
    words = [about["library"], about["version"], wanted, about["problem"]]
    return " ".join(filter(None, words))


def _device_line(about: Mapping[str, Any]) -> str:
    parts = [f"{about['device']}: {about.get('name', 'cannot be used')}"]
    if about.get("cores"):
        parts.append(counted(about["cores"], "core"))
    if about.get("threads"):
        parts.append(counted(about["threads"], "thread"))
    if about.get("total"):
        parts.append(_free(about))
    return ", ".join(parts)


def _data_line(about: Mapping[str, Any]) -> str:
    if not about["exists"]:
        return f"{about['folder']} ({about['from']}): empty"
    return f"{about['folder']} ({about['from']}): {', '.join(about['complete']) or 'no data set'}"


def _extra_line(name: str, about: Mapping[str, Any]) -> str:
    flaws = [f"{each['library']} {each['problem']}" for each in about["libraries"]]
    bad = [flaw for flaw, each in zip(flaws, about["libraries"], strict=True) if each["problem"]]
    state = "ok" if about["complete"] else "; ".join(bad) or "unknown: shoal is not installed"
    return f"{name.ljust(9)} {state}"


def _free(about: Mapping[str, Any]) -> str:
    free, total = about.get("free"), about.get("total")
    words = [f"{size(free)} free"] if free is not None else []
    return " of ".join([*words, *([size(total)] if total is not None else [])]) or "unknown"

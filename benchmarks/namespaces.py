"""Processes with a network card each: Linux network namespaces on a bridge, with limited bandwidth.

Needs root, `ip` and `tc`. Every namespace has one card. A token bucket (tbf) limits what the card
sends, as the card of a machine in a cluster would be limited.
"""

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence

__all__ = ["namespaces", "refusal", "run_in"]

OWN = f"sh{os.getpid()}"
"""Names begin with the process's number, so that cleaning up removes nothing of another process."""

BRIDGE = f"{OWN}-br"


def refusal() -> str | None:
    """Why namespaces cannot be made here; None if they can."""
    missing = [name for name in ("ip", "tc") if shutil.which(name) is None]
    if missing:
        return f"there is no command {missing[0]}; install iproute2"
    return None if os.geteuid() == 0 else "network namespaces need root"


@contextlib.contextmanager
def namespaces(count: int, megabits: float) -> Iterator[list[str]]:
    """Names of connected namespaces, each with the address 10.77.0.(1 + index) on `eth0`.

    Args:
        count: number of namespaces.
        megabits: bandwidth of each card in Mbit/s.
    """
    names = [f"{OWN}-{index}" for index in range(count)]
    try:
        _run("ip", "link", "add", BRIDGE, "type", "bridge")
        _run("ip", "link", "set", BRIDGE, "up")
        for index, name in enumerate(names):
            _connect(index, name, megabits)
        yield names
    finally:
        for index, name in enumerate(names):
            # The kernel removes the cards of a namespace later, and their names are used again.
            subprocess.run(["ip", "link", "del", f"{OWN}-v{index}"], stderr=subprocess.DEVNULL)
            subprocess.run(["ip", "netns", "del", name], stderr=subprocess.DEVNULL)
        subprocess.run(["ip", "link", "del", BRIDGE], stderr=subprocess.DEVNULL)


def run_in(
    names: Sequence[str], words: Sequence[str], environment: dict[str, str], timeout: float
) -> str:
    """Run one Python process in each namespace, as ranks of one group; the output of rank 0."""
    ranks = {"WORLD_SIZE": str(len(names)), "MASTER_ADDR": "10.77.0.1", "MASTER_PORT": "29555"}
    common = os.environ | ranks | {"GLOO_SOCKET_IFNAME": "eth0"} | environment
    started = [
        subprocess.Popen(
            ["ip", "netns", "exec", name, sys.executable, *words],
            env=common | {"RANK": str(index), "LOCAL_RANK": str(index)},
            stdout=subprocess.PIPE if index == 0 else subprocess.DEVNULL,
            text=True,
        )
        for index, name in enumerate(names)
    ]
    try:
        text, _ = started[0].communicate(timeout=timeout)
        for process in started[1:]:
            process.wait(timeout=timeout)
    finally:
        for process in started:
            process.kill()
    statuses = [process.wait() for process in started]
    if any(statuses):
        raise SystemExit(f"the processes ended with {statuses}")
    return text


def _connect(index: int, name: str, megabits: float) -> None:
    outside = f"{OWN}-v{index}"
    _run("ip", "netns", "add", name)
    _run("ip", "link", "add", outside, "type", "veth", "peer", "name", "eth0", "netns", name)
    _run("ip", "link", "set", outside, "master", BRIDGE, "up")
    inside = ("ip", "-n", name)
    _run(*inside, "addr", "add", f"10.77.0.{index + 1}/24", "dev", "eth0")
    _run(*inside, "link", "set", "eth0", "up")
    _run(*inside, "link", "set", "lo", "up")
    bucket = ("burst", f"{max(64, int(megabits / 8))}kb", "latency", "1000ms")
    rate = ("rate", f"{int(megabits * 1000)}kbit")
    _run(*("tc", "-n", name, "qdisc", "add", "dev", "eth0", "root", "tbf"), *rate, *bucket)


def _run(*words: str) -> None:
    subprocess.run(words, check=True)

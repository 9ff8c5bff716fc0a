"""Ranks without a process group: threads of one process, and processes joined by sockets."""

import json
import threading
from collections.abc import Callable
from socket import socket
from typing import Any


class ThreadExchange:
    """One rank of several threads; a thread that ends in an error breaks the barrier for all."""

    def __init__(self, rank: int, world: int, barrier: threading.Barrier, slots: list) -> None:
        self.rank, self.world = rank, world
        self.barrier, self.slots = barrier, slots

    def gather(self, value: Any, /) -> list[Any]:
        self.slots[self.rank] = json.dumps(value)
        self.barrier.wait(20)
        found = [json.loads(slot) for slot in self.slots]
        self.barrier.wait(20)
        return found


def in_threads(world: int, work: Callable[[ThreadExchange], Any]) -> list[Any]:
    """What the work of every rank returns or raises."""
    barrier, slots = threading.Barrier(world), [None] * world
    results: list[Any] = [None] * world

    def run(rank: int) -> None:
        try:
            results[rank] = work(ThreadExchange(rank, world, barrier, slots))
        except Exception as error:
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


class PeerGone(Exception):
    """The other process has died."""


class SocketExchange:
    """One rank of two processes with a pair of sockets."""

    world = 2

    def __init__(self, rank: int, line: socket) -> None:
        self.rank = rank
        self.file = line.makefile("rwb")

    def gather(self, value: Any, /) -> list[Any]:
        try:
            self.file.write(json.dumps(value).encode() + b"\n")
            self.file.flush()
            answer = self.file.readline()
        except OSError:
            answer = b""
        if not answer:
            raise PeerGone
        other = json.loads(answer)
        return [value, other] if self.rank == 0 else [other, value]

"""The processes of a search: all of them train every arm, and the first one decides.

Short trainings exchange through process groups of their own. A process whose arm fails gives these
groups up, so that no other process waits for it. All processes then meet in the groups of the run,
where every arm ends: each process says whether its training failed, and why.
"""

import gc
import json
import traceback
from collections.abc import Callable
from typing import Any, TypeVar

from shoal.core.errors import PeerLost, first_line
from shoal.core.storage.formats import to_json
from shoal.engine.processes.groups import fresh_groups, give_up, same_error
from shoal.engine.processes.mesh import Mesh
from shoal.training.folder.choice import Choice

__all__ = ["SearchProcesses"]

T = TypeVar("T")


class SearchProcesses:
    """What one process and several do alike in a search.

    Attributes:
        mesh: the processes of the run; None for one process.
    """

    def __init__(self, mesh: Mesh | None) -> None:
        self.mesh = mesh
        self._short: Mesh | None = None

    @property
    def first(self) -> bool:
        """Whether this process shows progress."""
        return self.mesh is None or self.mesh.first

    def for_training(self) -> Mesh | None:
        """The mesh of a short training; None for one process."""
        if self._short is None and (m := self.mesh) is not None:
            groups = fresh_groups(m.grid, m.timeout)
            self._short = Mesh(m.total, m.grid, m.rank, groups, timeout=m.timeout)
        return self._short

    def leave(self) -> None:
        """Give up the groups of short trainings."""
        if self._short is not None:
            groups, self._short.groups = self._short.groups, ()  # pyright: ignore
            self._short = None
            give_up(groups)
            del groups
            gc.collect()  # a group ends with its last reference

    def tried(
        self, act: Callable[[], T], loses: Callable[[Exception], bool]
    ) -> tuple[T | None, str | None]:
        """What `act` returns, or None and the reason if it failed on any process.

        Args:
            act: trains and scores an arm.
            loses: whether an error makes the arm lose; all processes raise other errors.
        """
        found, error = None, None
        try:
            found = act()
        except Exception as caught:
            if self.mesh is None and not loses(caught):
                raise
            error = caught
        if self.mesh is None:
            return found, None if error is None else first_line(error)
        failed = self._agreed(self.mesh, error, loses)
        return (found, None) if failed is None else (None, failed)

    def _agreed(
        self, mesh: Mesh, error: Exception | None, loses: Callable[[Exception], bool]
    ) -> str | None:
        """Why an arm failed on any process; None if it failed on none."""
        own = None
        if error is not None:
            _forget_frames(error)
            self.leave()
            if not isinstance(error, PeerLost):  # the reason is another process's
                own = [loses(error), f"{type(error).__name__}: {error}"]
        said = [json.loads(text) for text in mesh.texts(json.dumps([error is not None, own]))]
        if not any(failed for failed, _ in said):
            return None
        self.leave()
        whys = [why for _, why in said if why is not None]
        if error is not None and (not whys or (own is not None and not own[0])):
            raise error
        for lost, told in whys:
            if not lost:
                raise same_error(told, "another process")
        if not whys:
            raise PeerLost("a connection to another process was lost; start all processes again")
        return whys[0][1].partition(": ")[2].partition("\n")[0] or whys[0][1].partition(":")[0]

    def broadcast_from_first(self, make: Callable[[], T]) -> T:
        """What `make` returns on the first process, in types that JSON has; its errors too."""
        if self.mesh is None:
            return make()
        kept: list[Any] = [None]

        def act() -> None:
            kept[0] = make()

        self.mesh.on_first(act)
        return json.loads(self.mesh.from_first(to_json(kept[0])))

    def choice(self, make: Callable[[], Choice | None]) -> Choice | None:
        """The choice that `make` returns on the first process."""
        if self.mesh is None:
            return make()

        def table() -> dict[str, Any] | None:
            found = make()
            return None if found is None else found.table()

        told = self.broadcast_from_first(table)
        return None if told is None else Choice.of(told)


def _forget_frames(error: BaseException | None) -> None:
    """Drop the variables of the frames that an error passed: they may hold process groups."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__

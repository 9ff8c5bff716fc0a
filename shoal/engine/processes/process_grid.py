"""How members and batches are divided over a grid of processes, and what a step then receives."""

from shoal.core.errors import ConfigError

__all__ = ["layout_of", "shares", "traffic"]


def shares(total: int, parts: int) -> list[slice]:
    """Consecutive shares of `total` things, the larger shares first.

    >>> shares(7, 2)
    [slice(0, 4, None), slice(4, 7, None)]
    """
    least, larger = divmod(total, parts)
    ends = [0]
    for part in range(parts):
        ends.append(ends[-1] + least + (part < larger))
    return [slice(*pair) for pair in zip(ends, ends[1:], strict=False)]


def layout_of(text: str | None, members: int, processes: int) -> tuple[int, int]:
    """Processes along members and along data, as typed ("2x2") or the default.

    By default members are divided first. More processes than members become replicas.

    >>> layout_of(None, 7, 2), layout_of(None, 2, 4), layout_of("2x2", 7, 4)
    ((2, 1), (2, 2), (2, 2))
    """
    if text is None:
        rows = max(r for r in range(1, min(members, processes) + 1) if processes % r == 0)
        return rows, processes // rows
    words = text.lower().split("x")
    rows, columns = (int(w) if w.strip().isdecimal() else 0 for w in (*words, "", "")[:2])
    if len(words) != 2 or rows < 1 or columns < 1:
        raise ConfigError(f'mesh must be members x data, such as "{processes}x1", not {text!r}')
    if rows * columns != processes:
        raise ConfigError(
            f"mesh = {text!r} needs {rows * columns} processes, and there are {processes}; "
            f"type --nproc-per-node={rows * columns}"
        )
    if rows > members:
        raise ConfigError(
            f"mesh = {text!r} divides {members} members over {rows} processes; "
            f"use at most {members} along members"
        )
    return rows, columns


def traffic(
    base: str | None,
    members: int,
    processes: int,
    rank: int = 0,
    *,
    numbers: int = 0,
    outputs: int = 0,
    mixes: bool = False,
    size: int = 4,
) -> dict[str, int]:
    """Bytes that a process receives in a step, by kind, if members are divided and batches not.

    Args:
        base: "outputs", "gradients" or "weights"; None for a plain ensemble.
        members: M, trained by all processes.
        processes: R along members.
        rank: which of them.
        numbers: coordinates of a member: B C outputs, B D input gradients, or its weights.
        outputs: B C, for the drives that a Stein flow mixes at the outputs.
        mixes: the flow mixes drives.
        size: bytes of a number.
    """
    shard = shares(members, processes)[rank]
    own, longest = shard.stop - shard.start, -(-members // processes)
    found = {"agreement": 2 * (processes - 1) * 68 * 8 // processes}
    if base in ("outputs", "gradients"):
        found["gather"] = (processes - 1) * longest * (numbers + 1) * size
        if mixes:
            found["drives"] = (processes - 1) * longest * (outputs + 1) * size
    if base == "weights":
        part = shares(numbers, processes)[rank]
        columns = part.stop - part.start
        there, back = (members - own) * (columns + 1) * size, own * (numbers - columns) * size
        ahead = (members - own) * columns * size  # the flags follow by themselves
        found |= {"weights": ahead, "push": back, "flags": (processes - 1) * longest * size}
        found["gram"] = 2 * (processes - 1) * members**2 * size // processes
        found |= {"drives": there, "mixed drives": back} if mixes else {}
    return found

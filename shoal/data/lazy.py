"""Parts of a data set that are made when they are looked at."""

from collections.abc import Callable, Iterator, Mapping

from shoal.data.dataset import Split

__all__ = ["LazySplits", "sizes"]


class LazySplits(Mapping[str, Split]):
    """Splits by name, each made anew when it is looked at, and not kept.

    Whoever goes through `items()` has one of them in hand at a time; names, their number and the
    counts cost nothing.

    Args:
        makers: a function for each name.
        counts: how many points each will have.
    """

    def __init__(
        self, makers: Mapping[str, Callable[[], Split]], counts: Mapping[str, int]
    ) -> None:
        self._makers, self.counts = dict(makers), dict(counts)

    def __getitem__(self, name: str) -> Split:
        return self._makers[name]()

    def __contains__(self, name: object) -> bool:
        return name in self._makers

    def __iter__(self) -> Iterator[str]:
        return iter(self._makers)

    def __len__(self) -> int:
        return len(self._makers)

    def __repr__(self) -> str:
        return f"LazySplits({', '.join(self._makers)})"


def sizes(parts: Mapping[str, Split]) -> dict[str, int]:
    """Number of points in each part; nothing is made to count it.

    >>> sizes(LazySplits({"fog-1": lambda: 1 / 0}, {"fog-1": 500}))
    {'fog-1': 500}
    """
    if isinstance(parts, LazySplits):
        return dict(parts.counts)
    return {name: len(split) for name, split in parts.items()}

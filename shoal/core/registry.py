"""Registries: one decorator adds a class to the library, the command line and the tests."""

import dataclasses
import difflib
import functools
import inspect
import typing
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

from shoal.core.errors import ConfigError

__all__ = ["Registry", "later_field", "nearest", "nested_field", "unstored_field"]

T = TypeVar("T")


def nearest(word: str, choices: Iterable[str]) -> str:
    """A phrase that suggests the closest name, or lists all names.

    >>> nearest("kdee", ["kde", "svgd"])
    "did you mean 'kde'?"
    """
    choices = sorted(choices)
    close = difflib.get_close_matches(word, choices, n=1, cutoff=0.6)
    return f"did you mean '{close[0]}'?" if close else f"choose from: {', '.join(choices)}"


class Registry:
    """Named classes of one kind, with instances from a name or from a table of settings.

    >>> shapes = Registry("shape")
    >>> @shapes.register("square")
    ... @dataclasses.dataclass(frozen=True)
    ... class Square:
    ...     "Four equal sides."
    ...     side: float = 1.0
    >>> shapes.make({"name": "square", "side": 2.0})
    Square(side=2.0)
    >>> shapes.spec(Square(3.0)), shapes.summary("square")
    ({'name': 'square', 'side': 3.0}, 'Four equal sides.')
    """

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._entries: dict[str, Any] = {}
        self._citations: dict[str, tuple[str, ...]] = {}

    def register(self, name: str, cite: tuple[str, ...] = ()) -> Callable[[T], T]:
        """Decorator that registers a class or function under `name`, with bibliography keys."""

        def register(registered: T) -> T:
            if name in self._entries:
                raise ConfigError(f"there is already a {self.kind} called '{name}'")
            self._entries[name] = registered
            self._citations[name] = cite
            kind: Any = registered
            if isinstance(kind, type) and dataclasses.is_dataclass(kind):
                _check_when_made(kind)
            return registered

        return register

    def __getitem__(self, name: str) -> Any:
        if not isinstance(name, str) or name not in self._entries:
            raise ConfigError(
                f"there is no {self.kind} called '{name}'; {nearest(str(name), self._entries)}"
            )
        return self._entries[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def has_kind(self, kind: type) -> bool:
        """Whether a class is registered here."""
        return kind in self._entries.values()

    def names(self) -> list[str]:
        """All names, in the order of registration."""
        return list(self._entries)

    def cite(self, name: str) -> tuple[str, ...]:
        """Bibliography keys of a name."""
        self[name]
        return self._citations[name]

    def summary(self, name: str) -> str:
        """First sentence of the docstring of a name."""
        return (inspect.getdoc(self[name]) or "").split("\n\n")[0].replace("\n", " ")

    def make(self, spec: Any, **defaults: Any) -> Any:
        """An instance from a name, a table `{"name": ..., **settings}` or an instance."""
        if isinstance(spec, str):
            spec = {"name": spec}
        if not isinstance(spec, dict):
            return spec
        settings = {**defaults, **spec}
        name = settings.pop("name", None)
        if name is None:
            raise ConfigError(f"a {self.kind} needs a name; {nearest('', self._entries)}")
        registered = self[name]
        known = inspect.signature(registered).parameters
        for key in settings:
            if key not in known:
                raise ConfigError(
                    f"{self.kind} '{name}' has no setting '{key}'; {nearest(key, known)}"
                )
        inner = _inner_registries(registered)
        return registered(
            **{
                key: inner[key].make(value) if key in inner else _as_tuple(value)
                for key, value in settings.items()
            }
        )

    def spec(self, instance: object) -> dict[str, Any]:
        """The table of settings of `instance`; the inverse of `make`."""
        for name, registered in self._entries.items():
            if type(instance) is registered:
                inner = _inner_registries(registered)
                values = {f.name: getattr(instance, f.name) for f in _settable(registered)
                          if not _is_left_out(f, instance)}  # fmt: skip
                nested = {key: inner[key].spec(values[key]) for key in inner if key in values}
                return {"name": name} | values | nested
        raise ConfigError(
            f"{type(instance).__name__} is not a registered {self.kind}; "
            f"add it with @registry.register, so that a run can be repeated from its folder"
        )


def _check_when_made(kind: Any) -> None:
    """Let a dataclass refuse settings that do not fit its annotations, before it uses them.

    A nested setting may be an object, or the name or table that its registry makes it from.
    """
    make = kind.__init__
    names = [name for name in inspect.signature(make).parameters if name != "self"]
    known = {field.name: field for field in dataclasses.fields(kind)}
    inner = _inner_registries(kind)
    hints = functools.cache(lambda: typing.get_type_hints(kind))

    def valid(name: str, value: Any) -> Any:
        if name not in known or value is known[name].default or "unstored" in known[name].metadata:
            return value
        if name in inner and inner[name].has_kind(type(value)):
            return value  # it was checked when it was made; a step may replace a strength beside it
        from shoal.core.values import check_value, fits

        made = inner[name].make(value) if name in inner else value
        if getattr(made, "ndim", 0) == 1 and not fits(made, hints()[name]):
            made = tuple(made.tolist())  # an array where a list is wanted
        check_value(name, made, hints()[name])
        return made

    @functools.wraps(make)
    def checked(self: Any, *args: Any, **settings: Any) -> None:
        ordered = [valid(name, value) for name, value in zip(names, args, strict=False)]
        named = {name: valid(name, value) for name, value in settings.items()}
        make(self, *ordered, *args[len(names) :], **named)

    kind.__init__ = checked


def nested_field(registry: Registry, default: Callable[[], Any], later: bool = False) -> Any:
    """A dataclass field with an instance of another registry.

    It allows nested tables, such as {"name": "wasserstein", "estimator": {"name": "sge"}}. A field
    that came `later` is left out of a spec at its default, as by `later_field`.
    """
    metadata = {"registry": registry, **({"later": True} if later else {})}
    return dataclasses.field(default_factory=default, metadata=metadata)


def unstored_field(default: Any = None) -> Any:
    """A dataclass field with arrays or functions: no spec, comparison or repr includes it."""
    metadata = {"unstored": True}
    return dataclasses.field(default=default, repr=False, compare=False, metadata=metadata)


def later_field(default: Any) -> Any:
    """A dataclass field that came later: a spec omits its default, so that older specs are equal.

    >>> shapes = Registry("shape")
    >>> @shapes.register("square")
    ... @dataclasses.dataclass(frozen=True)
    ... class Square:
    ...     angle: float = later_field(0.0)
    >>> shapes.spec(Square()), shapes.spec(Square(0.5))
    ({'name': 'square'}, {'name': 'square', 'angle': 0.5})
    """
    return dataclasses.field(default=default, metadata={"later": True})


def _is_left_out(field: dataclasses.Field, instance: object) -> bool:
    if "unstored" in field.metadata:
        return True
    if "later" not in field.metadata:
        return False
    make = field.default_factory
    default = field.default if make is dataclasses.MISSING else make()
    return getattr(instance, field.name) == default


def _settable(registered: Any) -> list[dataclasses.Field]:
    return [f for f in dataclasses.fields(registered) if f.init]


def _inner_registries(registered: Any) -> dict[str, "Registry"]:
    if not dataclasses.is_dataclass(registered):
        return {}
    fields = _settable(registered)
    return {f.name: f.metadata["registry"] for f in fields if "registry" in f.metadata}


def _as_tuple(value: Any) -> Any:
    return tuple(_as_tuple(v) for v in value) if isinstance(value, list) else value

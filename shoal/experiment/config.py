"""Config files: TOML with the options of `shoal.fit`, the data set and the network.

A file holds names, numbers and tables, and never an import path. This module loads no torch, so
that an error in a config appears at once.
"""

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, replace
from importlib import resources
from pathlib import Path
from typing import Any, get_type_hints

from shoal.core.errors import ConfigError, StorageError
from shoal.core.registry import nearest
from shoal.core.storage.disk import size_of, storage_errors
from shoal.core.storage.formats import MAX_BYTES, MAX_DEPTH, parse_toml
from shoal.core.values import check_value
from shoal.training.options.annealing import stored_annealing
from shoal.training.options.options import (
    DEFAULT_METHOD,
    EXCLUDES,
    NAMES,
    RETIRED,
    Options,
    Spec,
    option,
    stored_method,
    warn_retired,
)

__all__ = [
    "DEFAULTS",
    "KEYS",
    "Config",
    "apply_override",
    "experiments",
    "keys",
    "load_config",
    "parse_value",
    "summary",
]

_OPENING = ("[", "{", '"', "'")


def apply_override(
    table: Mapping[str, Any], override: str, defaults: Mapping[str, Any]
) -> dict[str, Any]:
    """The table with one key changed.

    A dotted key changes a setting inside a table, and turns a bare name into a table: `prior.std=2`
    turns "gaussian" into {"name": "gaussian", "std": 2}. The value `none` removes the key.

    >>> apply_override({"prior": "gaussian"}, "prior.std=2", {})
    {'prior': {'name': 'gaussian', 'std': 2}}

    Args:
        table: the table, which is not modified.
        override: "key=value".
        defaults: default values by key; they also define the known keys.
    """
    key, equals, text = override.partition("=")
    path = [word.strip() for word in key.split(".")]
    if not equals or not all(path) or len(path) > MAX_DEPTH:
        raise ConfigError(f"a setting is typed as key=value, such as lr=0.01, not {override!r}")
    if path[0] in RETIRED:
        warn_retired(path[0])
        return dict(table)
    if defaults and path[0] not in defaults:
        raise ConfigError(f"there is no key {path[0]!r} in a config; {nearest(path[0], defaults)}")
    changed = dict(table)
    if len(path) == 1:
        changed.pop(EXCLUDES.get(key, key), None)
    elif path[0] not in changed and isinstance(defaults.get(path[0]), str):
        changed[path[0]] = defaults[path[0]]
    return _changed(changed, path, parse_value(text.strip(), key), key)


def parse_value(text: str, key: str) -> Any:
    """A TOML value; a bare word is text, and `none` is None.

    >>> parse_value("[50, 50]", "hidden"), parse_value("f-kde", "method"), parse_value(".5", "lr")
    ([50, 50], 'f-kde', 0.5)
    """
    if text == "none":
        return None
    if text.startswith(_OPENING):
        table = parse_toml(f"value = {text}", f"the value of {key}")
        if table.keys() != {"value"}:
            raise ConfigError(f"the value of {key} is not one TOML value")
        return table["value"]
    try:
        table = tomllib.loads(f"value = {text}")
    except ValueError:
        table = {}
    return table["value"] if table.keys() == {"value"} else _number_or_word(text)


def _number_or_word(text: str) -> float | str:
    """A number without a digit before or after its point, which TOML refuses; or a word."""
    if text[:1] in set("0123456789+-."):
        try:
            return float(text)
        except ValueError:
            pass
    return text


def _changed(table: dict[str, Any], path: list[str], value: Any, key: str) -> dict[str, Any]:
    first, *rest = path
    if not rest:
        new = {name: setting for name, setting in table.items() if name != first}
        return new if value is None else new | {first: value}
    inner = table.get(first, {})
    if isinstance(inner, list):
        if len(inner) != 1 or not isinstance(inner[0], dict):
            raise ConfigError(f"{key} cannot be changed in a list of {len(inner)}; edit the file")
        return table | {first: [_changed(inner[0], rest, value, key)]}
    if isinstance(inner, str):
        inner = {"name": inner}
    elif first == "adversarial" and isinstance(inner, int | float):
        inner = {"epsilon": inner}
    if not isinstance(inner, dict):
        raise ConfigError(f"{key} cannot be set, since {first} is {inner!r} and not a table")
    return table | {first: _changed(inner, rest, value, key)}


@dataclass(frozen=True)
class Config(Options):
    """The settings of one run as plain values: the options of `shoal.fit`, the data and the model.

    Attributes:
        name: name of the experiment, the file or the data, from which the run is named.
    """

    name: str
    data: Spec = option(MISSING, "name of a data set, or a table with its name and settings.")
    model: Spec | list[dict[str, Any]] = option(
        "mlp", "name of an architecture, a table, or a list of tables, each with its `members`."
    )
    members: int = option(5, "ensemble size: number of networks that train together.")
    init_seed: int | None = option(None, "seed of the initial members; by default `seed`.")
    out: str | None = option(None, "folder of the run.")

    @property
    def table(self) -> dict[str, Any]:
        """The keys that are set, as in a file."""
        values = {key: getattr(self, key) for key in KEYS}
        return {key: value for key, value in values.items() if value is not None}


_FIELDS = {field.name: field for field in fields(Config) if field.name != "name"}

_TYPES = get_type_hints(Config)

KEYS = ("data", "model", "members", *NAMES, "init_seed", "out")
"""The keys of a config file."""

DEFAULTS = {key: _FIELDS[key].default for key in KEYS}
"""The default value of each key."""


def keys() -> dict[str, str]:
    """A description of every key, by the key and its default as they are typed.

    >>> keys()["lr=0.001"]
    'learning rate.'
    """
    return {_typed(key): _FIELDS[key].metadata["doc"] for key in KEYS}


def load_config(source: str | Path, overrides: Sequence[str] = ()) -> Config:
    """The config of a file or of a built-in experiment, with overrides.

    >>> load_config("digits", ["method=kde", "prior.std=0.5"]).prior
    {'name': 'gaussian', 'std': 0.5}

    Args:
        source: path of a TOML file, or a name from `shoal list experiments`.
        overrides: "key=value", where the value is TOML or a bare word. Dots change settings inside
            tables, and the word `none` removes a key.
    """
    text, name = _read(source)
    table = parse_toml(text, str(source))
    if {"init_seed", "legacy", "calibrated", "method"} <= table.keys():  # the config of a run
        table["method"] = stored_method(table["method"])
        if "annealing" in table:
            table["annealing"] = stored_annealing(table["annealing"])
        table.pop("asked", None)  # method and strength are what a search chose
    for override in overrides:
        table = apply_override(table, override, DEFAULTS)
    changed = {override.partition("=")[0] for override in overrides}
    if table.get("method") == DEFAULT_METHOD and "method" in changed and "strength" not in changed:
        table.pop("strength", None)  # it was that of the replaced method; the plain one has none
    config = make_config(table, name)
    return replace(config, name=_data_name(config.data)) if name == "config" else config


def make_config(table: Mapping[str, Any], name: str = "config") -> Config:
    """A config from a table of plain values; an error names the first wrong key or value."""
    for key, value in table.items():
        if key in RETIRED:
            warn_retired(key)
            continue
        if key == "draws":
            raise ConfigError(
                "a config cannot repeat this run: its members are draws of chains that begin at "
                "another run; type: shoal draw RUN, with that run"
            )
        if key not in KEYS:
            raise ConfigError(f"there is no key {key!r} in a config; {nearest(key, KEYS)}")
        check_value(key, value, _TYPES[key])
    if "data" not in table:
        raise ConfigError("a config needs a data set; write data = 'digits', for example")
    known = {key: value for key, value in table.items() if key in KEYS}
    config = Config(**{"name": name, **known})
    _check_members(config.model, config.members, "members" in table)
    return config


def experiments() -> dict[str, str]:
    """The text of every built-in experiment, by name."""
    folder = resources.files("shoal.experiment") / "experiments"
    files = [file for file in folder.iterdir() if file.name.endswith(".toml")]
    by_name = {file.name.removesuffix(".toml"): file for file in files}
    return {name: by_name[name].read_text(encoding="utf-8") for name in sorted(by_name)}


def summary(text: str) -> str:
    """The description in the first line of a config."""
    return text.partition("\n")[0].removeprefix("#").strip()


def _typed(key: str) -> str:
    default = DEFAULTS[key]
    if default is None or default is MISSING:
        return key
    if isinstance(default, bool):
        return f"{key}={str(default).lower()}"
    return f"{key}={default:g}" if isinstance(default, float) else f"{key}={default}"


def _read(source: str | Path) -> tuple[str, str]:
    path = Path(source)
    with storage_errors("read", path):
        if path.is_file():
            return _read_file(path), path.stem
        if path.is_dir():
            raise StorageError(f"{path} is a folder; give a file in it, such as config.toml")
    known = experiments()
    if str(source) in known:
        return known[str(source)], str(source)
    if path.suffix or len(path.parts) > 1:
        raise StorageError(f"there is no file called {path}")
    raise ConfigError(
        f"there is no experiment and no file called {str(source)!r}; {nearest(str(source), known)}"
    )


def _read_file(path: Path) -> str:
    if size_of(path) > MAX_BYTES:
        raise ConfigError(f"{path} has more than {MAX_BYTES:,} bytes, the limit of a config")
    with path.open("rb") as file:
        data = file.read(MAX_BYTES)
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise ConfigError(f"{path} is not text in UTF-8") from None


def _data_name(data: Spec) -> str:
    """The name of a run whose config file is called `config`, such as that of another run."""
    if isinstance(data, str):
        return data
    name = str(data.get("name", "run"))
    return Path(str(data.get("train"))).stem if name == "file" else name


def _check_members(model: Any, members: int, named: bool) -> None:
    """Check the numbers of members in a list of networks; their sum must equal `members`."""
    if members < 1:
        raise ConfigError(f"members must be 1 or more, not {members}")
    if not isinstance(model, list):
        return
    if not model:
        raise ConfigError("model is an empty list; name an architecture, such as model = 'mlp'")
    for table in model:
        check_value("members of a network in the list of models", table.get("members"), int)
    total = sum(table["members"] for table in model)
    if len(model) > 1 and named and total != members:
        raise ConfigError(
            f"the networks in the list of models have {total} members together, but members is "
            f"{members}; change the numbers in the list"
        )

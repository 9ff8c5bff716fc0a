"""What to type to repeat the runs of a page: commands, or Python for the user's network."""

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from shoal.core.storage.disk import read_plain
from shoal.core.storage.formats import parse_toml, to_toml
from shoal.experiment.equal_cost import load_plan
from shoal.experiment.variants import Variant, options_of, variant_of
from shoal.inference.priors import registry as priors
from shoal.interaction.methods import METHODS
from shoal.page.report_data import RunRecord, shown_path
from shoal.training.folder.own_data import has_own_data, has_own_network
from shoal.training.folder.run_folder import DRAWS
from shoal.training.options.options import DEFAULTS

__all__ = [
    "call",
    "commands",
    "estimator_call",
    "fit_call",
    "init_call",
    "is_from_estimator",
    "settings_arguments",
]

_FITS = 20
_WIDTH = 80


def commands(records: Sequence[RunRecord]) -> Iterator[str]:
    """One `shoal compare` per grid, one `shoal fit` per other run.

    A run with the user's own network or data gets Python code instead.
    """
    grids: dict[Path, list[RunRecord]] = {}
    alone = []
    for record in records:
        folder = None if record.folder is None else record.folder.resolve().parent
        if folder is not None and (folder / "grid.toml").exists():
            grids.setdefault(folder, []).append(record)
        else:
            alone.append(record)
    for folder, runs in grids.items():
        yield _compare(folder, runs)
    for record in alone[:_FITS]:
        yield _fit(record)
    if len(alone) > _FITS:
        yield f"# and {len(alone) - _FITS} more runs"


def _fit(record: RunRecord) -> str:
    if record.adopted:
        return _adopt(record)
    if is_from_estimator(record):
        return f"import shoal.sklearn\n\n{estimator_call(record)}"
    if DRAWS in record.config:
        return _draw(record)
    frozen = int(record.config.get("frozen") or 0)
    if frozen:
        return (
            f"# the first {frozen} members come from another run, RUN:\n"
            f"shoal grow RUN --more {record.members - frozen}"
        )
    by_user = has_own_network(record.config) or has_own_data(record.config)
    if record.folder is None or by_user:
        return fit_call(record.config)
    return f"shoal fit {shlex.quote(str(shown_path(record.folder) / 'config.toml'))}"


def _adopt(record: RunRecord) -> str:
    """The adoption: from files its command, of networks in memory the Python call."""
    sources, named = record.provenance.get("sources"), not has_own_data(record.config)
    likelihood = record.config.get("likelihood")
    if not isinstance(sources, Mapping):
        data = f", data={_short(record.config['data'])!r}" if named else ""
        return (
            "import shoal\n\n# networks: a list of your own trained networks\n"
            f"run = shoal.adopt(networks, likelihood={_short(likelihood)!r}{data})"
        )
    files = [*(shlex.quote(str(file)) for file in sources)]
    few = " ".join(files) if len(files) <= _FITS else f"{files[0]} ... {files[-1]}"
    words = [
        "--likelihood",
        _short(likelihood),
        *(["--data", _short(record.config["data"])] if named else []),
    ]
    options = [word if isinstance(word, str) else _toml(word) for word in words]
    options = [shlex.quote(word) if word[0] != "-" else word for word in options]
    return f"shoal adopt {few} \\\n  --model MODULE:FUNCTION {' '.join(options)}"


def _draw(record: RunRecord) -> str:
    """The sampling, by command or by Python call; both begin at a trained run."""
    table = record.config[DRAWS]
    lengths = {name: table[name] for name in ("draws", "warmup", "thin")}
    known = ("seed", "precision", "batch_size", "temperature", "of")
    others = {name: table[name] for name in known if name in table}
    if record.folder is None or has_own_network(record.config) or has_own_data(record.config):
        settings = {"sampler": _short(table["sampler"])} | lengths | others
        arguments = [f"{name}={value!r}" for name, value in settings.items()]
        told = call("drawn = shoal.draw", ["run", *arguments])
        return f"# run: the trained run at whose members the chains begin\n{told}"
    sampler = dict(table["sampler"])
    words = [f"--sampler {sampler.pop('name')}"]
    words += [f"--{name} {value}" for name, value in lengths.items()]
    words += [f"sampler.{name}={value}" for name, value in sampler.items()]
    of = others.pop("of", None)
    words += [f"{name}={value}" for name, value in others.items()]
    words += [] if of is None else [shlex.quote(f"of={_toml(of)}")]
    told = " ".join(words)
    return f"# the chains begin at the members of another run, RUN:\nshoal draw RUN {told}"


def _toml(table: Any) -> str:
    return to_toml({"value": table}).partition("=")[2].strip()


def fit_call(config: Mapping[str, Any]) -> str:
    """The Python code that trains a run; comments name what the user provides.

    >>> print(fit_call({"data": "digits", "members": 5, "model": [{"custom": "net"}], "lr": 0.1}))
    import shoal
    <BLANKLINE>
    # build: your own net
    ensemble = shoal.Ensemble.init(build, members=5)
    run = shoal.fit(ensemble, shoal.data.load('digits'), lr=0.1)
    """
    settings = settings_arguments(config)
    build, _ = _network(config)
    has_data = has_own_data(config)
    data = "(x, y)" if has_data else f"shoal.data.load({config['data']!r})"
    lines = ["import shoal", "", *build, *(["# x, y: the training data"] if has_data else [])]
    lines.append(f"ensemble = {init_call(config)}")
    return "\n".join([*lines, call("run = shoal.fit", ["ensemble", data, *settings])])


def init_call(config: Mapping[str, Any]) -> str:
    """The Python code that makes the members of a run."""
    _, network = _network(config)
    seeded = f", seed={config['init_seed']}" if config.get("init_seed") else ""
    members = "" if network.startswith("[") else f", members={config.get('members')}"
    return f"shoal.Ensemble.init({network}{members}{seeded})"


def estimator_call(
    record: RunRecord, changes: Mapping[str, Any] | None = None, width: int = _WIDTH
) -> str:
    """The Python code that fits the estimator of a run again, with changed parameters."""
    made = record.provenance["made_by"]
    parameters = {name: text for name, text in made["parameters"].items() if name != "out"}
    parameters |= {name: repr(value) for name, value in (changes or {}).items()}
    arguments = [f"{name}={text}" for name, text in parameters.items() if text != "None"]
    made_again = call(f"model = shoal.sklearn.{made['name']}", arguments, width)
    return f"{made_again}.fit(X_train, y_train)"


def is_from_estimator(record: RunRecord) -> bool:
    """Whether an estimator of `shoal.sklearn` made the run."""
    made = record.provenance.get("made_by") or {}
    sound = isinstance(made.get("parameters"), Mapping) and isinstance(made.get("name"), str)
    return made.get("interface") == "estimator" and sound


def call(head: str, arguments: Sequence[str], width: int = _WIDTH) -> str:
    """The call on one line if it fits, else with its arguments below."""
    line = f"{head}({', '.join(arguments)})"
    if len(line) <= width:
        return line
    rows: list[str] = []
    for argument in arguments:
        if rows and len(rows[-1]) + len(argument) + 2 <= width:
            rows[-1] += f" {argument},"
        else:
            rows.append(f"    {argument},")
    return "\n".join([f"{head}(", *rows, ")"])


def _network(config: Mapping[str, Any]) -> tuple[list[str], str]:
    """Comments about the user's networks, and the argument that makes them."""
    models = config.get("model")
    models = [models] if isinstance(models, Mapping) else models
    tables = (
        [table for table in models if isinstance(table, Mapping)]
        if isinstance(models, list)
        else []
    )
    named = [_own(table["custom"]) if "custom" in table else f"{table}" for table in tables]
    if len(tables) <= 1:
        return [f"# build: {named[0] if named else 'a function that makes one network'}"], "build"
    letters = [f"build_{index}" for index in range(len(tables))]
    notes = [f"# {letter}: {what}" for letter, what in zip(letters, named, strict=True)]
    pairs = [f"({letter}, {t.get('members')})" for letter, t in zip(letters, tables, strict=True)]
    return notes, f"[{', '.join(pairs)}]"


def _own(name: str) -> str:
    """A function of the user, without where it was written down."""
    last = str(name).rpartition(".")[2]
    return "your own function that makes one network" if last == "<lambda>" else f"your own {last}"


def settings_arguments(config: Mapping[str, Any]) -> list[str]:
    """The arguments of `fit` that differ from the defaults."""
    defaults = dict(DEFAULTS)
    usual = priors.make(defaults["prior"])
    method = config.get("method")
    known = METHODS.get(method) if isinstance(method, str) else None
    if known is not None and known.repulsion is not None:
        defaults["strength"] = known.repulsion.strength
    settings = []
    for name, default in defaults.items():
        value = config.get(name)
        if name == "prior" and value is not None and _same_prior(value, usual):
            continue
        if value is None or value == default or value == {"name": default}:
            continue
        if name == "validation" and isinstance(value, Mapping):
            settings.append("validation=(x_val, y_val)")
        elif isinstance(value, Mapping) and "custom" in value:
            settings.append(f"{name}={value['custom']}")
        else:
            settings.append(f"{name}={_short(value)!r}")
    return settings


def _same_prior(spec: Any, usual: object) -> bool:
    custom = isinstance(spec, Mapping) and "custom" in spec
    return not custom and priors.make(spec) == usual


def _short(value: Any) -> Any:
    """The name of a table that holds only a name; any other value unchanged."""
    alone = isinstance(value, Mapping) and value.keys() == {"name"}
    return value["name"] if alone else value


def _compare(folder: Path, runs: Sequence[RunRecord]) -> str:
    shared = parse_toml(read_plain(folder / "grid.toml").decode(), "grid.toml")
    usual, plan = shared.get("strength", 1.0), load_plan(folder)
    methods = list(dict.fromkeys(_variant(record, usual).label for record in runs))
    free = [record for record in runs if "members" not in dict(options_of(record.name))]
    sizes = sorted({record.members for record in free or runs})
    arms = "" if plan is None else ",".join(plan.asked["arms"])
    methods = methods if plan is None else plan.asked["methods"]
    seeds = sorted({int(record.seed) for record in runs})
    count, where = 1 + seeds[-1] - seeds[0], shown_path(folder)
    again = where.with_name(f"{where.name}-again")
    if has_own_network(shared) or has_own_data(shared):
        first = [f"seed={seeds[0]}"] if seeds[0] else []
        grid = [f"methods={methods}", f"sizes={sizes}", f"seeds={count}", *first]
        grid += [f"equal_cost={arms!r}"] if arms else []
        arguments = ["build", "(x, y)", "test=(x_test, y_test)", *grid, *settings_arguments(shared)]
        return "\n".join(
            [*_network(shared)[0], call("shoal.compare", [*arguments, f"out={str(again)!r}"])]
        )
    first = [] if seeds[0] == 0 else [f"seed={seeds[0]}"]
    file = shlex.quote(str(where / "grid.toml"))
    parts = [" ".join([f"shoal compare {file}", *first]), f"--methods {','.join(methods)}"]
    listed = ",".join(map(str, sizes))
    parts.append(f"--sizes {listed} --seeds {count} -o {shlex.quote(str(again))}")
    parts += [f"--equal-cost {arms}"] if arms else []
    return " \\\n  ".join(parts)


def _variant(record: RunRecord, usual: float) -> Variant:
    """The method as it is typed; a strength that all runs share is in grid.toml."""
    if record.asked:
        return record.asked_for
    strength = record.config.get("strength")
    changed = None if record.plain or strength in (None, usual) else float(strength)
    variant = variant_of(record.config.get("method"), changed)
    return replace(variant, options=options_of(record.name))

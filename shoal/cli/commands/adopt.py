"""`shoal adopt`: a run of networks that were trained elsewhere."""

from argparse import Namespace
from pathlib import Path
from shlex import quote

from shoal.cli.outcome import Outcome
from shoal.cli.own_network import network_functions
from shoal.core.display.text import counted
from shoal.core.errors import ConfigError
from shoal.experiment.config import parse_value
from shoal.training.adopt import adopt
from shoal.training.folder.run import Run, RunFolder

__all__ = ["run"]


def run(options: Namespace) -> Outcome:
    """Read the networks, write the run, and print its folder and what to type next."""
    folder = Path(options.out or Path("runs") / _name(Path(options.paths[0])))
    if RunFolder(folder).holds_run:
        raise ConfigError(f"{folder} already holds a run; add -o RUN to choose another folder")
    asked = {name: getattr(options, name) for name in ("likelihood", "data", "outputs")}
    arguments = {name: parse_value(text, f"--{name}") for name, text in asked.items() if text}
    builds = network_functions(options.model)
    return _outcome(adopt(options.paths, build=builds, out=folder, **arguments), options)


def _name(path: Path) -> str:
    """The name of a folder; of a file, the name of its folder or its own."""
    whole = path.resolve()
    return whole.name if path.is_dir() else whole.parent.name or whole.stem


def _outcome(adopted: Run, options: Namespace) -> Outcome:
    ensemble, sources = adopted.ensemble, adopted.provenance["sources"]
    likelihood = adopted.config["likelihood"]
    name = likelihood.get("name", "custom") if isinstance(likelihood, dict) else likelihood
    members = "\n".join(f"  member {i}: {file}" for i, file in enumerate(sources))
    model = " ".join(f"--model {quote(text)}" for text in options.model)
    where = quote(str(adopted.folder))
    data = "" if options.data else " --data DATA"
    text = [
        f"{counted(ensemble.members, 'network')} adopted, likelihood {name}:\n{members}",
        *adopted.notes,
        f"Kept in {adopted.folder}; to evaluate it type: shoal evaluate {where} {model}{data}",
    ]
    value = {
        "folder": str(adopted.folder),
        "config": adopted.config,
        "sources": sources,
        "notes": adopted.notes,
    }
    return Outcome("\n\n".join(text), value)

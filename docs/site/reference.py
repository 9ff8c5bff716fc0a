"""The pages of the reference: one per group of names in `shoal/__init__.py`, one per module.

The groups are the comments of the table of names there, so a new public name is in the reference
without further work.
"""

import argparse
import importlib
import re
from pathlib import Path
from types import ModuleType

HOME = Path(__file__).parents[2]
EXTRA_MODULES = ("sklearn",)
"""Public modules that are imported by their path."""

HEAD = "# {title}\n\n{text}\n\n"


def groups():
    """The names of each group, in the order of `shoal/__init__.py`."""
    found, title = {}, ""
    source = (HOME / "shoal/__init__.py").read_text(encoding="utf-8")
    for line in source.partition("_HOMES = {")[2].partition("\n}")[0].splitlines():
        if comment := re.fullmatch(r"\s*# (.+)", line):
            title = comment[1]
        elif name := re.match(r'\s*"(\w+)":', line):
            found.setdefault(title, []).append(name[1])
    return found


def slug(title):
    """The title as the name of a file.

    >>> slug("Predict, evaluate and compare")
    'predict-evaluate-and-compare'
    """
    return re.sub(r"\W+", "-", title.lower()).strip("-")


def public_members(module):
    """Names of `__all__` that are defined below the package of the module, sorted by kind."""
    names = [name for name in module.__all__ if name != "registry"]
    return [name for name in names if getattr(module, name).__class__ is not ModuleType]


def entry(path, **options):
    """The line that mkdocstrings replaces by the documentation of an object."""
    lines = "".join(f"        {key}: {value}\n" for key, value in options.items())
    return f"::: {path}\n" + ("    options:\n" + lines if lines else "") + "\n"


def home_of(value, path):
    """Where a name is written: the path that griffe finds in the sources."""
    module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    if module and name and module.startswith("shoal."):
        return f"{module}.{name}"
    return path


def module_page(module, title, elsewhere):
    """A page about a module: what it says of itself, then the names that no other page has."""
    text = (module.__doc__ or "").strip()
    page = HEAD.format(title=f"`{title}`", text=text)
    paths = [
        home_of(getattr(module, name), f"{module.__name__}.{name}")
        for name in public_members(module)
    ]
    found = [path for path in dict.fromkeys(paths) if path not in elsewhere]
    elsewhere.update(found)
    return page + "".join(entry(path) for path in found)


def pages():
    """Every page of the reference: its title in the menu, its path and its text."""
    import shoal

    found, modules, written = [], [], set()
    for title, names in groups().items():
        page = HEAD.format(title=title, text="Each name is an attribute of `shoal`.")
        for name in names:
            value = getattr(shoal, name)
            if isinstance(value, ModuleType):
                modules.append((name, value))
                page += f"## `shoal.{name}` {{ #shoal-{name} }}\n\n{first_line(value)}\n"
                page += f"All names: [`shoal.{name}`]({name}.md).\n\n"
            else:
                path = home_of(value, f"shoal.{name}")
                written.add(path)
                page += entry(path)
        found.append((title, f"reference/{slug(title)}.md", page))
    for name in EXTRA_MODULES:
        if (HOME / "shoal" / f"{name}.py").is_file():
            modules.append((name, importlib.import_module(f"shoal.{name}")))
    for name, module in modules:
        page = module_page(module, f"shoal.{name}", written)
        found.append((f"shoal.{name}", f"reference/{name}.md", page))
    found.append(("Command line", "reference/command-line.md", command_page()))
    return found


def first_line(module):
    """The first sentence of a module's docstring."""
    return (module.__doc__ or "").strip().partition("\n\n")[0]


def command_page():
    """The help of every command."""
    from shoal.cli.parser import COMMANDS, command_help

    text = "`shoal COMMAND --help` prints the same text."
    page = HEAD.format(title="Command line", text=text)
    for name in COMMANDS:
        page += f"## shoal {name}\n\n```text\n{command_help(name, width=96)}\n```\n\n"
    return page


def main():
    """Print the names of all pages."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    for title, path, _ in pages():
        print(path, title)


if __name__ == "__main__":
    main()

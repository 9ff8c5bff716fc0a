"""Which file of the package imports which, read from the source.

python tests/import_graph.py        files, lines, circles, and small files with one importer
"""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from statistics import median

PACKAGE = Path(__file__).parents[1] / "shoal"
SLIVER = 60
IMPORTING_CALLS = {"import_module", "__import__", "require"}


@cache
def files() -> tuple[Path, ...]:
    """All source files of the package."""
    return tuple(sorted(PACKAGE.rglob("*.py")))


@cache
def tree(path: Path) -> ast.Module:
    """A file as Python reads it."""
    return ast.parse(path.read_text())


def module_name(path: Path) -> str:
    """What is written to import a file, as `shoal.core.tree`."""
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def modules() -> dict[str, Path]:
    """All files by the name that imports them."""
    return {module_name(path): path for path in files()}


def nodes_when_imported(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes that run when a file is imported: no function's body, nothing for the checker."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            continue
        yield child
        yield from nodes_when_imported(child)


def imported_names(path: Path, *, at_import: bool = False) -> Iterator[tuple[str, int]]:
    """Every name that a file imports, as `a.b` for `from a import b`, with its line."""
    for node in nodes_when_imported(tree(path)) if at_import else ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            source = _source(path, node)
            yield from ((f"{source}.{alias.name}", node.lineno) for alias in node.names)
        elif isinstance(node, ast.Call) and (name := name_in_call(node)):
            yield name, node.lineno


def name_in_call(call: ast.Call) -> str:
    """The module that a call imports by its written name; of an f-string, the written beginning.

    >>> name_in_call(ast.parse('import_module(f"shoal.cli.commands.{name}")').body[0].value)
    'shoal.cli.commands'
    """
    if ast.unparse(call.func).rpartition(".")[2] not in IMPORTING_CALLS or not call.args:
        return ""
    name = call.args[0]
    if isinstance(name, ast.JoinedStr):
        name = name.values[0]
    is_text = isinstance(name, ast.Constant) and isinstance(name.value, str)
    return name.value.removesuffix(".") if is_text else ""


def _source(path: Path, node: ast.ImportFrom) -> str:
    """The module after `from`, with leading dots resolved."""
    if not node.level:
        return node.module or ""
    parts = path.relative_to(PACKAGE.parent).parts[: -node.level]
    return ".".join([*parts, *filter(None, [node.module])])


def imported_files(path: Path, *, at_import: bool = False) -> dict[Path, int]:
    """The files of the package that a file imports, each with the line that does so."""
    found: dict[Path, int] = {}
    for name, line in imported_names(path, at_import=at_import):
        target = modules().get(name) or modules().get(name.rpartition(".")[0])
        if target not in (None, path):
            found.setdefault(target, line)
    return found


def circles() -> list[list[Path]]:
    """Groups of files that need each other to be imported."""
    reach = {path: set(imported_files(path, at_import=True)) for path in files()}
    for middle in files():
        for known in reach.values():
            if middle in known:
                known |= reach[middle]
    groups = {
        tuple(other for other in files() if other in reach[path] and path in reach[other])
        for path in files()
        if path in reach[path]
    }
    return sorted(map(list, groups))


def slivers() -> list[tuple[Path, Path]]:
    """Files of fewer than 60 lines with a single importer, and the importer."""
    importers: dict[Path, set[Path]] = {path: set() for path in files()}
    for path in files():
        for target in imported_files(path):
            importers[target].add(path)
    return [
        (path, *importers[path])
        for path in files()
        if len(importers[path]) == 1
        and path.name != "__init__.py"
        and len(path.read_text().splitlines()) < SLIVER
    ]


def main() -> None:
    """Print what is worth knowing before and after a change of the layout."""
    lengths = [len(path.read_text().splitlines()) for path in files()]
    print(f"{len(lengths)} files, median {median(lengths):.0f} lines, longest {max(lengths)}")
    print(f"{len(circles())} circles")
    for circle in circles():
        print("  " + " ".join(map(module_name, circle)))
    print(f"{len(slivers())} files of fewer than {SLIVER} lines with one importer")
    for path, importer in slivers():
        print(f"  {module_name(path)} <- {module_name(importer)}")


if __name__ == "__main__":
    main()

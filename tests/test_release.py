"""What a release says about itself in several places is the same."""

import ast
import re
import sys
import tomllib
from pathlib import Path

from import_graph import files, tree

from shoal.cli.commands.doctor import EXTRAS

HOME = Path(__file__).parents[1]
CORE = {"torch", "numpy", "safetensors"}
AT_HAND = {"IPython"}
"""Libraries that are imported only where they run already: a notebook."""
NOT_FOR_USERS = {"dev", "docs", "all"}
COMES_WITH = {
    "sklearn": "scikit-learn",
    "PIL": "pillow",
    "markupsafe": "jinja2",
    "scipy": "scikit-learn",
    "jax": "numpyro",
    "onnx_ir": "onnxscript",
    "triton": "torch",
}
"""Modules whose library has another name, or that another library always brings."""


def project():
    return tomllib.loads((HOME / "pyproject.toml").read_text())["project"]


def library(line):
    """The name in a requirement."""
    return re.match(r"[\w.-]+", line)[0]


def libraries():
    """The libraries of every extra."""
    found = project()["optional-dependencies"]
    return {name: {library(line) for line in lines} for name, lines in found.items()}


def brought(module):
    """The libraries, any of which gives a module."""
    top = module.partition(".")[0]
    if module.startswith("torch.utils.tensorboard") or module.startswith("tensorboard"):
        return {"tensorboard"}
    return {top, COMES_WITH.get(top, top)}


def calls_of_require():
    """Every `require("module", extra="name")` with its place."""
    for path in files():
        for node in ast.walk(tree(path)):
            named = isinstance(node, ast.Call) and getattr(node.func, "id", "") == "require"
            given = [*node.args, *(k.value for k in node.keywords)] if named else []
            words = [each.value for each in given if isinstance(each, ast.Constant)]
            if len(words) == 2 and all(isinstance(word, str) for word in words):
                yield f"{path.relative_to(HOME)}:{node.lineno}", *words


def test_the_citation_is_of_this_version_and_license():
    known = project()
    citation = dict(re.findall(r"^([\w-]+): (.+)$", (HOME / "CITATION.cff").read_text(), re.M))
    assert citation["version"] == known["version"]
    assert citation["license"] == known["license"]


def test_an_optional_library_is_in_the_extra_that_its_error_names():
    extras, found = libraries(), list(calls_of_require())
    assert len(found) > 30
    offenders = [
        f"{place}: {module} is not in [{extra}]"
        for place, module, extra in found
        if not module.startswith("shoal.")
        and not brought(module) & (extras.get(extra, set()) | CORE)
    ]
    assert not offenders, "\n".join(offenders)


def test_every_imported_library_is_needed_or_in_an_extra():
    known = set().union(*(found for name, found in libraries().items() if name in EXTRAS))
    known |= CORE | AT_HAND
    offenders = []
    for path in files():
        for node in ast.walk(tree(path)):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.level == 0:
                names = [node.module]
            for name in names:
                own = name.partition(".")[0] in {"shoal", *sys.stdlib_module_names}
                if not own and not brought(name) & known:
                    offenders.append(f"{path.relative_to(HOME)}:{node.lineno} imports {name}")
    assert not offenders, "\n".join(offenders)


def test_the_doctor_and_all_know_every_extra():
    extras = project()["optional-dependencies"]
    assert extras.keys() - NOT_FOR_USERS == EXTRAS.keys()
    (line,) = extras["all"]
    assert set(re.search(r"\[(.+)\]", line)[1].split(",")) == EXTRAS.keys()


def test_documents_name_extras_that_exist():
    texts = [HOME / "README.md", *HOME.glob("docs/**/*.md"), *HOME.glob("shoal/**/*.py")]
    named = [(path, name) for path in texts for name in _named(path.read_text())]
    assert named
    missing = [(str(path), name) for path, name in named if name not in libraries()]
    assert not missing


def _named(text):
    """Extras in commands such as `pip install 'shoal[report,export]'`."""
    for group in re.findall(r"(?:shoal|\.)\[([a-z][a-z,]*)\]'", text):
        yield from group.split(",")


def test_lowest_versions_are_those_of_the_constraints_file():
    """`make oldest` installs what constraints-oldest.txt says."""
    lines = (HOME / "constraints-oldest.txt").read_text().splitlines()
    pins = dict(line.split("==") for line in lines if "==" in line)
    extras = project()["optional-dependencies"]
    needed = [*project()["dependencies"], *(x for name in EXTRAS for x in extras[name])]
    for line in needed:
        name, lowest = line.split(">=")
        if name in pins:
            pinned = [int(part) for part in pins[name].split(".")]
            wanted = [int(part) for part in lowest.split(".")]
            assert pinned[: len(wanted)] == wanted, f"{name}: {lowest} is not {pins[name]}"
    assert {"numpy", "safetensors", "scikit-learn", "matplotlib"} <= pins.keys()

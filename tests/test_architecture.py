"""What holds the tree together: imports go downward, pieces stay small, names are explained."""

import ast
import importlib
import importlib.util
import inspect
import os
import subprocess
import sys
from pathlib import Path

import pytest

import shoal

PACKAGE = Path(shoal.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))
LAYERS = {
    "core": set(),
    "interaction": {"core"},
    "inference": {"core", "interaction", "data"},
    "data": {"core"},
    "models": {"core"},
    "training": {"core", "interaction", "inference", "data", "models"},
    "prediction": {"core", "inference", "data"},
    "analysis": {"core", "interaction", "inference", "data", "models", "training", "prediction"},
    "plots": {"core", "data", "prediction", "analysis"},
}


def layer_of(path):
    return path.relative_to(PACKAGE).parts[0]


def imported(path):
    """Modules of the package that a file imports, and the lines where it does."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node.lineno
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module, node.lineno
            if node.module == "shoal":
                for alias in node.names:
                    yield f"shoal.{alias.name}", node.lineno


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_go_downward(path):
    layer = layer_of(path)
    if layer not in LAYERS:
        return  # the app, and the package itself, stand above all layers
    for module, line in imported(path):
        parts = module.split(".")
        if parts[0] == "shoal" and len(parts) > 1:
            allowed = LAYERS[layer] | {layer}
            assert parts[1] in allowed, f"{path}:{line} imports {module}"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_pieces_stay_small(path):
    text = path.read_text()
    assert len(text.splitlines()) <= 300
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef):
            body = node.body[1:] if ast.get_docstring(node) else node.body
            lines = body[-1].end_lineno - body[0].lineno + 1 if body else 0
            assert lines <= 50, f"{node.name} has {lines} lines"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_no_file_can_run_code(path):
    tree = ast.parse(path.read_text())
    calls = {ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    modules = {module for module, _ in imported(path)}
    assert not calls & {"eval", "exec", "torch.load", "torch.save", "yaml.load"}
    assert not modules & {"pickle", "joblib", "dill", "cloudpickle", "marshal"}
    loads = [node for node in ast.walk(tree) if isinstance(node, ast.keyword)]
    for keyword in loads:
        if keyword.arg == "allow_pickle":
            assert ast.unparse(keyword.value) == "False"


@pytest.mark.parametrize("name", shoal.__all__)
def test_public_names_are_there_and_documented(name):
    value = getattr(shoal, name)
    assert inspect.getdoc(value)
    assert shoal._HOMES.keys() == set(shoal.__all__)


def modules():
    for path in FILES:
        if path.name.endswith("_kernels.py") and importlib.util.find_spec("triton") is None:
            continue
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@pytest.mark.parametrize("module", sorted(modules()))
def test_what_a_module_offers_is_documented(module):
    offered = importlib.import_module(module)
    assert offered.__doc__
    for name in getattr(offered, "__all__", ()):
        value = getattr(offered, name)
        if inspect.isclass(value) or inspect.isfunction(value):
            assert value.__doc__, f"{module}.{name}"


BROKEN = ("sklearn", "matplotlib", "rich", "scipy", "PIL", "pandas", "torchmetrics", "torchvision")
BARE = """
import sys, torch, shoal
x = torch.randn(40, 3)
ensemble = shoal.Ensemble.init(lambda: torch.nn.Linear(3, 2), members=3)
run = shoal.fit(ensemble, (x, (x[:, 0] > 0).long()), epochs=2, progress=True, out=sys.argv[1])
scores = shoal.evaluate(shoal.predict(run, x), (x[:, 0] > 0).long())
assert 0 <= scores["accuracy"] <= 1
"""


def test_the_core_needs_torch_numpy_and_safetensors_alone(tmp_path):
    """A broken optional library raises more than ImportError, and must not matter."""
    for name in BROKEN:
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise RuntimeError('broken here')")
    command = [sys.executable, "-c", BARE, str(tmp_path / "run")]
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr


def test_nothing_heavy_is_imported_with_the_package():
    code = "import sys, shoal; assert not {'torch', 'numpy'} & set(sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0

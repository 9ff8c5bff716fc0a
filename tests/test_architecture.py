"""What holds the tree together: imports point down, functions fit a screen, names are explained."""

import ast
import importlib
import importlib.util
import inspect
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from import_graph import PACKAGE, circles, files, imported_files, imported_names, modules, tree
from slow_tests import SLOW, SLOW_FILES

import shoal

# The rooms from the bottom up, and what each may import besides itself: every room before it, or
# only the rooms and files that are named here.
EVERY_ROOM_BEFORE = None
ROOMS = {
    "core": set(),
    "engine": {"core"},
    "interaction": {"core", "engine.kernels"},
    "models": {"core"},
    "data": {"core"},
    "inference": {"core", "engine", "interaction", "data"},
    "prediction": {"core", "engine", "data", "inference"},
    "training": EVERY_ROOM_BEFORE,
    "analysis": EVERY_ROOM_BEFORE,
    "evaluation": EVERY_ROOM_BEFORE,
    "plots": {"core", "data", "prediction", "analysis"},
    "experiment": EVERY_ROOM_BEFORE,
    "page": EVERY_ROOM_BEFORE,
    "integrations": EVERY_ROOM_BEFORE,
    "cli": EVERY_ROOM_BEFORE,
}
# Who imports a room that few may import.
ONLY_FOR = {"integrations": {"cli"}}
LINES_OF_A_FUNCTION = 50
RUNS_CODE = {"eval", "exec", "torch.load", "torch.save", "yaml.load"}
READS_PICKLES = {"pickle", "joblib", "dill", "cloudpickle", "marshal"}


def place(path):
    """Where a file lies: `core.tree`; `__init__` for the package's own file."""
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts)


def room_of(path):
    return place(path).partition(".")[0]


def allowed(room):
    """What the files of a room may import, as beginnings of places."""
    order = list(ROOMS)
    before = {name for name in order[: order.index(room)] if room in ONLY_FOR.get(name, {room})}
    return {room} | (before if ROOMS[room] is EVERY_ROOM_BEFORE else ROOMS[room])


def in_rooms():
    """The files that belong to a room; those beside the rooms stand above all."""
    return [path for path in files() if path.parent != PACKAGE]


def test_every_folder_is_a_room_and_the_table_goes_downward():
    assert {room_of(path) for path in in_rooms()} <= ROOMS.keys()
    order = list(ROOMS)
    for room in order:
        named = {name.partition(".")[0] for name in allowed(room)} - {room, "__init__"}
        assert named <= set(order[: order.index(room)]), room


def test_imports_go_downward():
    offenders = [
        f"{place(path)}:{line} imports {place(target)}"
        for path in in_rooms()
        for target, line in imported_files(path).items()
        if not any(f"{place(target)}.".startswith(f"{name}.") for name in allowed(room_of(path)))
    ]
    assert not offenders, "\n".join(offenders)


def test_imports_by_a_string_count():
    """`import_module("shoal.a.b")` is an import, also with an f-string that begins so."""
    listed = imported_files(PACKAGE / "cli" / "main.py")
    assert PACKAGE / "cli" / "commands" / "__init__.py" in listed
    kernels = imported_files(PACKAGE / "engine" / "member_layers" / "norm.py")
    assert PACKAGE / "engine" / "member_layers" / "norm_kernels.py" in kernels


# The rooms inside a room from the bottom up; "" stands for the files beside them.
INNER_ROOMS = {
    "engine": ("", "kernels", "derivatives", "member_layers", "processes", "members", "resources"),
    "training": ("options", "step", "members", "mover", "folder", "loop", "draws", "search", ""),
}


@pytest.mark.parametrize("room", INNER_ROOMS)
def test_rooms_inside_a_room_import_downward(room):
    def floor(path):
        parts = path.relative_to(PACKAGE / room).parts
        return INNER_ROOMS[room].index(parts[0] if len(parts) > 1 else "")

    inside = [
        path
        for path in files()
        if path.is_relative_to(PACKAGE / room) and path != PACKAGE / room / "__init__.py"
    ]
    upward = [
        f"{place(path)}:{line} imports {place(target)}"
        for path in inside
        for target, line in imported_files(path).items()
        if target in inside and floor(target) > floor(path)
    ]
    assert not upward, "\n".join(upward)


def test_no_files_need_each_other_to_be_imported():
    offenders = [" and ".join(map(place, circle)) for circle in circles()]
    assert not offenders, "\n".join(offenders)


def lines_of_body(function):
    """Lines of a function below its signature and docstring."""
    body = function.body[1:] if ast.get_docstring(function) else function.body
    return body[-1].end_lineno - body[0].lineno + 1 if body else 0


def test_a_function_fits_a_screen():
    offenders = [
        f"{place(path)}.{node.name} has {lines_of_body(node)} lines"
        for path in files()
        for node in ast.walk(tree(path))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and lines_of_body(node) > LINES_OF_A_FUNCTION
    ]
    assert not offenders, "\n".join(offenders)


def reads_weights(call):
    """Whether a call reads tensors without running code: torch.load(..., weights_only=True)."""
    arguments = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
    return ast.unparse(call.func) == "torch.load" and arguments.get("weights_only") == "True"


def test_no_file_can_run_code():
    offenders = []
    for path in files():
        nodes = list(ast.walk(tree(path)))
        calls = [node for node in nodes if isinstance(node, ast.Call)]
        used = {ast.unparse(call.func) for call in calls if not reads_weights(call)} & RUNS_CODE
        used |= {name.partition(".")[0] for name, _ in imported_names(path)} & READS_PICKLES
        used |= {
            "allow_pickle"
            for node in nodes
            if isinstance(node, ast.keyword)
            and node.arg == "allow_pickle"
            and ast.unparse(node.value) != "False"
        }
        offenders += [f"{place(path)} uses {name}" for name in sorted(used)]
    assert not offenders, "\n".join(offenders)


def test_public_names_are_there_and_documented():
    assert shoal._HOMES.keys() == set(shoal.__all__)
    offenders = [name for name in shoal.__all__ if not inspect.getdoc(getattr(shoal, name))]
    assert not offenders, offenders


def test_what_a_module_offers_is_documented():
    offenders = []
    for module, path in modules().items():
        if path.name.endswith("_kernels.py") and importlib.util.find_spec("triton") is None:
            continue
        offered = importlib.import_module(module)
        if not offered.__doc__:
            offenders.append(module)
        for name in getattr(offered, "__all__", ()):
            value = getattr(offered, name)
            if (inspect.isclass(value) or inspect.isfunction(value)) and not value.__doc__:
                offenders.append(f"{module}.{name}")
    assert not offenders, offenders


def test_every_test_that_is_called_slow_exists():
    paths = list(Path(__file__).parent.rglob("test_*.py"))
    known = {name for p in paths for name in re.findall(r"def (test_\w+)\(", p.read_text())}
    assert not SLOW - known
    assert not SLOW_FILES - {path.stem for path in paths}


BROKEN = ("sklearn", "matplotlib", "rich", "scipy", "PIL", "pandas", "torchmetrics", "torchvision")
BARE = """
import os, sys
before = dict(os.environ)
import torch, shoal
shoal.fit, shoal.Ensemble
assert dict(os.environ) == before, "importing sets no environment variable"
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
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{PACKAGE.parent}"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr


def test_nothing_heavy_is_imported_with_the_package():
    code = "import sys, shoal; assert not {'torch', 'numpy'} & set(sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0

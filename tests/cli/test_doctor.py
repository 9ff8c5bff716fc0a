"""`shoal doctor`: what is there, what is missing, and what to type."""

import json
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version

import pytest

from shoal.cli.commands import doctor
from shoal.cli.commands.doctor import EXTRAS, Requirement, diagnose, requirements
from shoal.cli.main import main

MISSING = Requirement("surely-not-installed", "1.0", "export")


def test_a_sound_environment_has_no_problem(capsys):
    assert main(["doctor", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["problems"] == []
    assert {each["library"]: each["version"] for each in found["required"]} == {
        name: version(name) for name in ("torch", "numpy", "safetensors")
    }
    assert found["devices"][0]["device"] == "cpu" and found["devices"][0]["cores"] >= 1
    assert 0 < found["memory"]["free"] <= found["memory"]["total"]
    assert 0 < found["disk"]["free"] <= found["disk"]["total"]
    assert found["extras"].keys() == EXTRAS.keys()


def test_extras_are_complete_if_their_libraries_are_installed():
    found = diagnose(requirements()).value["extras"]
    for name, about in found.items():
        there = []
        for each in about["libraries"]:
            try:
                there.append(version(each["library"]) == each["version"])
            except PackageNotFoundError:
                there.append(False)
        assert about["complete"] == all(there), name


def test_a_missing_extra_comes_with_its_command_and_is_no_problem():
    found = diagnose([Requirement("torch", "2.9"), MISSING])
    assert found.status == 0
    assert not found.value["extras"]["export"]["complete"]
    assert "surely-not-installed is missing" in found.text
    assert any("pip install 'shoal[export]'" in line for line in found.text.splitlines())


@pytest.mark.parametrize(
    "needed, word",
    [(Requirement("numpy", "999"), "older"), (Requirement("surely-not-installed", "1"), "missing")],
)
def test_what_shoal_itself_needs_is_a_problem(needed, word):
    found = diagnose([needed])
    assert found.status == 2
    (problem,) = found.value["problems"]
    assert word in problem and f"pip install '{needed.library}>={needed.lowest}'" in problem
    assert problem in found.text


def test_a_library_that_fails_to_import_is_found_when_tried(monkeypatch):
    """Broken libraries raise anything: here a RuntimeError."""

    def broken(name):
        raise RuntimeError(f"{name} was built for another torch\nand more")

    monkeypatch.setattr(doctor.importlib, "import_module", broken)
    monkeypatch.setattr(doctor, "_compiler", lambda thorough: (None, []))
    needed = [Requirement("safetensors", "0.1", "export")]
    assert diagnose(needed).value["extras"]["export"]["complete"]
    (library,) = diagnose(needed, thorough=True).value["extras"]["export"]["libraries"]
    assert library["problem"].endswith("(safetensors was built for another torch)")


def test_no_compiler_and_no_data_are_told(monkeypatch, tmp_path):
    monkeypatch.setattr(doctor.shutil, "which", lambda name: None)
    monkeypatch.setattr(doctor.platform, "system", lambda: "Linux")
    monkeypatch.setenv("SHOAL_DATA", str(tmp_path / "data"))
    found = diagnose([])
    assert found.value["compiler"] is None
    assert any("g++" in line for line in found.value["advice"])
    assert found.value["data"][0] == {
        "folder": str(tmp_path / "data"),
        "from": "SHOAL_DATA",
        "exists": False,
        "complete": [],
    }


def test_requirements_of_an_installed_wheel_are_those_of_its_metadata(monkeypatch, tmp_path):
    lines = ["torch>=2.9", "onnx>=1.17; extra == 'export'", 'pytest>=8; extra == "dev"']
    monkeypatch.setattr(doctor, "__file__", str(tmp_path / "a/b/c/doctor.py"))
    monkeypatch.setattr(doctor.importlib.metadata, "requires", lambda name: lines)
    assert requirements() == [Requirement("torch", "2.9"), Requirement("onnx", "1.17", "export")]


def test_a_torch_that_cannot_be_imported_is_reported_like_the_rest(tmp_path):
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise OSError('libc10.so: no such file')")
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
    code += "from shoal.cli.main import main; sys.exit(main(['doctor']))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 2, done.stderr
    assert "libc10.so: no such file" in done.stdout and not done.stderr

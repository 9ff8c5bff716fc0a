"""The rooms of the engine stand on each other in one order."""

from import_graph import PACKAGE, files, imported_files

# From the bottom up; files beside the rooms are below all of them.
ORDER = ("kernels", "derivatives", "member_layers", "processes", "members", "resources")


def room(path):
    parts = path.relative_to(PACKAGE / "engine").parts
    return ORDER.index(parts[0]) if len(parts) > 1 else -1


def test_rooms_of_the_engine_import_downward():
    inside = [path for path in files() if path.is_relative_to(PACKAGE / "engine")]
    upward = [
        f"{path.relative_to(PACKAGE)}:{line} imports {target.relative_to(PACKAGE)}"
        for path in inside
        for target, line in imported_files(path).items()
        if target in inside and room(target) > room(path)
    ]
    assert not upward, "\n".join(upward)

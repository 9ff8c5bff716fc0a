"""What a release says about itself in several places is the same."""

import re
import tomllib
from pathlib import Path

HOME = Path(__file__).parents[1]


def test_the_citation_is_of_this_version_and_license():
    project = tomllib.loads((HOME / "pyproject.toml").read_text())["project"]
    citation = dict(re.findall(r"^([\w-]+): (.+)$", (HOME / "CITATION.cff").read_text(), re.M))
    assert citation["version"] == project["version"]
    assert citation["license"] == project["license"]

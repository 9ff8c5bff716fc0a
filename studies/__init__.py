"""The studies whose pages, tables, figures and raw files are in docs/results.

A study is a module or a folder, and runs from the root of the repository: `python -m studies.toys`,
`python -m studies.auto.make`. `studies.common` has what several studies do.
"""

from pathlib import Path

DOCS = Path(__file__).resolve().parents[1] / "docs"
RESULTS = DOCS / "results"

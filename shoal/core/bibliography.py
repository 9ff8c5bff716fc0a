"""The papers behind the methods, cited by key; `bibliography.bib` beside this file has them."""

import re
from dataclasses import dataclass
from importlib.resources import files

__all__ = ["BIBLIOGRAPHY", "Citation"]


@dataclass(frozen=True)
class Citation:
    """One paper.

    Attributes:
        bibtex: its entry in the file.
    """

    authors: str
    title: str
    year: int
    venue: str
    url: str
    bibtex: str

    @property
    def text(self) -> str:
        """The citation in one line."""
        return f"{self.authors} ({self.year}). {self.title}. {self.venue}."


_ENTRY = re.compile(r"^@inproceedings\{(\w+),\n.*?^\}", re.MULTILINE | re.DOTALL)
_FIELD = re.compile(r"^  (\w+) = \{(.*)\},?$", re.MULTILINE)


def _read(text: str) -> dict[str, Citation]:
    """The papers of a text in BibTeX, with a field in each line."""
    papers = {}
    for entry in _ENTRY.finditer(text):
        fields = dict(_FIELD.findall(entry[0]))
        papers[entry[1]] = Citation(
            authors=fields["author"],
            title=fields["title"],
            year=int(fields["year"]),
            venue=fields["booktitle"],
            url=fields["url"],
            bibtex=entry[0],
        )
    return papers


BIBLIOGRAPHY = _read(files("shoal.core").joinpath("bibliography.bib").read_text("utf-8"))
"""All papers, by key."""

"""One paper, as a line of text and as BibTeX."""

from dataclasses import dataclass

__all__ = ["Citation"]


@dataclass(frozen=True)
class Citation:
    """One paper."""

    authors: str
    title: str
    year: int
    venue: str
    url: str

    @property
    def text(self) -> str:
        """The citation in one line."""
        return f"{self.authors} ({self.year}). {self.title}. {self.venue}."

    def bibtex(self, key: str) -> str:
        """The BibTeX entry."""
        lines = [
            f"@inproceedings{{{key},",
            f"  author = {{{self.authors}}},",
            f"  title = {{{self.title}}},",
            f"  booktitle = {{{self.venue}}},",
            f"  year = {{{self.year}}},",
            f"  url = {{{self.url}}}",
            "}",
        ]
        return "\n".join(lines)

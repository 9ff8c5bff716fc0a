"""The file of papers: every entry is read, and read whole."""

from importlib.resources import files

from shoal.core.bibliography import BIBLIOGRAPHY


def test_every_entry_of_the_file_is_read_as_it_stands():
    text = files("shoal.core").joinpath("bibliography.bib").read_text("utf-8")
    assert text == "\n\n".join(paper.bibtex for paper in BIBLIOGRAPHY.values()) + "\n"
    assert text.count("@") == len(BIBLIOGRAPHY)
    for key, paper in BIBLIOGRAPHY.items():
        assert paper.bibtex.startswith(f"@inproceedings{{{key},") and str(paper.year) in key
        assert all((paper.authors, paper.title, paper.venue)) and paper.url.startswith("http")

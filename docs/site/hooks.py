"""What the site adds to the pages of docs/: tutorials that run, the reference, formulas, links.

mkdocs calls the functions whose names begin with `on_`.
"""

import logging
import os
import posixpath
import re
from pathlib import Path

import reference
import tutorials
from latex2mathml.converter import convert
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File

HOME = Path(__file__).parents[2]
ROOT_PAGES = {
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "README.md": "index.md",
}
"""Pages of the repository and their place in the site."""

LINK = re.compile(r"(\]\()([^)\s#]+)((?:#[^)\s]*)?\))")
FORMULA = re.compile(r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>', re.DOTALL)
log = logging.getLogger("mkdocs.shoal")
ran = {}
"""Folders with the results of the tutorials, by the page's path."""


def on_config(config):
    """Put the pages of the reference before the others of its menu."""
    config["shoal_reference"] = reference.pages()
    menu = next(entry for entry in config["nav"] if "Reference" in entry)
    menu["Reference"][:0] = [{title: path} for title, path, _ in config["shoal_reference"]]
    return config


def on_files(files, config):
    """Run the tutorials and add the pages that are not in docs/."""
    for _, path, text in config["shoal_reference"]:
        files.append(File.generated(config, path, content=text))
    for name, path in ROOT_PAGES.items():
        if path != "index.md":
            text = (HOME / name).read_text(encoding="utf-8")
            files.append(File.generated(config, path, content=text))
    for path in linked_outside(files):
        where = f"repository/{path.relative_to(HOME).as_posix()}"
        files.append(File.generated(config, where, content=path.read_text(encoding="utf-8")))
    for file in [each for each in files.documentation_pages() if is_tutorial(each)]:
        run_tutorial(file, files, config)
    return files


def is_tutorial(file):
    """Whether the code of a page runs."""
    inside = file.src_uri.startswith("tutorials/") and not file.src_uri.endswith("index.md")
    return inside or file.src_uri == "from-data-to-answer.md"


def run_tutorial(file, files, config):
    """Run the page, and make the HTML files that it writes files of the site."""
    try:
        folder = tutorials.executed(Path(file.abs_src_path))
    except RuntimeError as error:
        raise PluginError(str(error)) from error
    ran[file.src_uri] = folder
    for made in folder.glob("*.html"):
        where = f"{file.src_uri.removesuffix('.md')}/{made.name}"
        files.append(File.generated(config, where, content=made.read_text(encoding="utf-8")))


def linked_outside(files):
    """Files of the repository outside docs/ that pages link to."""
    sources = [HOME / "docs" / file.src_uri for file in files.documentation_pages()]
    sources = [path for path in sources if path.is_file()] + [HOME / name for name in ROOT_PAGES]
    found = set()
    for source in sources:
        for link in LINK.finditer(source.read_text(encoding="utf-8")):
            target = outside(source.parent, link[2])
            if target is not None and target.name not in ROOT_PAGES:
                found.add(target)
    return sorted(found)


def outside(folder, link):
    """The file of the repository outside docs/ that a link means; None for any other link."""
    if ":" in link or link.startswith("/"):
        return None
    target = Path(os.path.normpath(folder / link))
    inside = target.is_relative_to(HOME / "docs") or not target.is_relative_to(HOME)
    return None if inside or not target.is_file() else target


def on_page_markdown(markdown, page, **_):
    """Show the results of tutorials, and turn links to the repository into links of the site."""
    here = page.file.src_uri
    if here in ran:
        markdown = tutorials.with_results(markdown, ran[here])
    root = here in ROOT_PAGES.values() and here != "index.md"
    folder = HOME if root else HOME / "docs" / posixpath.dirname(here)

    def moved(link):
        if root and link[2].startswith("docs/"):
            place = link[2].removeprefix("docs/")
            return f"{link[1]}{'index.md' if place == 'README.md' else place}{link[3]}"
        target = outside(folder, link[2])
        if target is None:
            return link[0]
        path = target.relative_to(HOME).as_posix()
        path = ROOT_PAGES.get(path, f"repository/{path}")
        return f"{link[1]}{posixpath.relpath(path, posixpath.dirname(here) or '.')}{link[3]}"

    return LINK.sub(moved, markdown)


def on_page_content(html, **_):
    """Formulas become MathML, which browsers draw themselves."""

    def formula(found):
        text = found[2].replace("&amp;", "&").replace("&lt;", "<").replace("&gt;", ">")
        return convert(text, display="block" if found[1] == "div" else "inline")

    return FORMULA.sub(formula, html)

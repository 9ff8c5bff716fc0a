"""docs/README.md, for readers without the site: the menu of mkdocs.yml as a list of links.

python docs/site/contents.py
"""

import re
from pathlib import Path

import yaml

HOME = Path(__file__).parents[2]
HEAD = """\
# Documentation

*`python docs/site/contents.py` makes this page from the menu in `mkdocs.yml`.*

Begin with the [README](../README.md) or with `shoal demo`. `make docs` builds these pages
into a site with search, a reference of all functions, and tutorials that run:
`build/site/index.html`.
"""
ELSEWHERE = {
    "index.md": "../README.md",
    "contributing.md": "../CONTRIBUTING.md",
    "changelog.md": "../CHANGELOG.md",
}
"""Pages that the site takes from the root of the repository."""


def link(title, path):
    """A link to a page, with its own heading if the menu gives no title."""
    path = ELSEWHERE.get(path, path)
    if title is None:
        text = (HOME / "docs" / path).read_text(encoding="utf-8")
        title = re.search(r"^# (.+)$", text, re.MULTILINE)[1]
    return f"[{title}]({path})"


def entries(menu, indent=""):
    """The lines of a menu; a menu in it is indented."""
    for entry in menu:
        if isinstance(entry, str):
            yield f"{indent}- {link(None, entry)}"
            continue
        ((title, inside),) = entry.items()
        if isinstance(inside, str):
            yield f"{indent}- {link(title, inside)}"
        else:
            yield f"{indent}- {title}"
            yield from entries(inside, indent + "  ")


def page():
    """The text of docs/README.md."""
    config = (HOME / "mkdocs.yml").read_text(encoding="utf-8")
    parts = [HEAD]
    for tab in yaml.safe_load(config)["nav"]:
        ((title, menu),) = tab.items()
        parts.append(f"## {title}\n\n" + "\n".join(entries(menu)) + "\n")
    return "\n".join(parts)


def main():
    """Write the page."""
    (HOME / "docs/README.md").write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()

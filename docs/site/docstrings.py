"""How mkdocstrings reads our docstrings: groups of arguments, and examples as code."""

import re
from typing import Any

import griffe

_EXAMPLE = re.compile(r"^( *)>>> .*(?:\n *\S.*)*", re.MULTILINE)
_GROUP = re.compile(r"^(Main|Other) arguments:$", re.MULTILINE)


class Docstrings(griffe.Extension):
    """`Main arguments:` is a section of parameters with a title, for the Google style."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Give the groups of arguments the name that griffe knows, and fence the examples."""
        if obj.docstring is not None:
            text = _GROUP.sub(r"Args: \1 arguments", obj.docstring.value)
            obj.docstring.value = _EXAMPLE.sub(r"\1```pycon\n\g<0>\n\1```", text)

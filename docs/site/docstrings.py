"""How mkdocstrings reads our docstrings: groups of arguments, and examples as code."""

import importlib
import inspect
import re
from typing import Any

import griffe

_EXAMPLE = re.compile(r"^( *)>>> .*(?:\n *\S.*)*", re.MULTILINE)
_MADE = "shoal.training.fit.fit"  # its docstring gets the sentences of the options when imported
_GROUP = re.compile(r"^(Main|Other) arguments:$", re.MULTILINE)


class Docstrings(griffe.Extension):
    """`Main arguments:` is a section of parameters with a title, for the Google style."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Give the groups of arguments the name that griffe knows, and fence the examples."""
        if obj.docstring is not None:
            if obj.path == _MADE:
                module, _, name = _MADE.rpartition(".")
                made = getattr(importlib.import_module(module), name)
                obj.docstring.value = inspect.getdoc(made) or ""
            text = _GROUP.sub(r"Args: \1 arguments", obj.docstring.value)
            obj.docstring.value = _EXAMPLE.sub(r"\1```pycon\n\g<0>\n\1```", text)

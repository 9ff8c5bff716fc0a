"""How mkdocstrings reads our docstrings: options, groups of arguments, and examples as code."""

import importlib
import inspect
import re
import typing
from typing import Any

import griffe

_EXAMPLE = re.compile(r"^( *)>>> .*(?:\n *\S.*)*", re.MULTILINE)
_GROUP = re.compile(r"^(Main|Other) arguments:$", re.MULTILINE)


class Docstrings(griffe.Extension):
    """`Main arguments:` is a section of parameters with a title, for the Google style."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Give the groups of arguments the name that griffe knows, and fence the examples."""
        if isinstance(obj, griffe.Function):
            _show_options(obj)
        if obj.docstring is not None:
            text = _GROUP.sub(r"Args: \1 arguments", obj.docstring.value)
            obj.docstring.value = _EXAMPLE.sub(r"\1```pycon\n\g<0>\n\1```", text)


def _show_options(func: griffe.Function) -> None:
    """Options behind `**more: Unpack[...]` become parameters, with the docstring of the object."""
    more = next((p for p in func.parameters if "Unpack" in str(p.annotation)), None)
    if more is None:
        return
    function: Any = importlib.import_module(func.module.path)
    for name in func.path.removeprefix(f"{func.module.path}.").split("."):
        function = getattr(function, name)
    (table,) = typing.get_args(inspect.signature(function).parameters[more.name].annotation)
    del func.parameters[more.name]
    for name, hint in table.__annotations__.items():
        if name not in func.parameters:
            kind = griffe.ParameterKind.keyword_only
            annotation = getattr(hint, "__forward_arg__", None) or inspect.formatannotation(hint)
            func.parameters.add(griffe.Parameter(name, annotation=annotation, kind=kind))
    if re.search(rf"^ *{more.name}: ", function.__doc__ or "", re.MULTILINE):
        func.parameters.add(more)
    if func.docstring is not None and function.__doc__:
        func.docstring.value = inspect.cleandoc(function.__doc__)

"""Everything that has a name, by kind, as `shoal list` shows it."""

import importlib
import re
import shutil
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from shoal.app.config import experiments, keys, summary
from shoal.core.bibliography import BIBLIOGRAPHY, Citation
from shoal.core.errors import ConfigError
from shoal.core.registry import nearest

__all__ = ["KINDS", "Entry", "entries", "listing_text", "plain"]

_REGISTRIES = {
    "kernels": "interaction.kernels",
    "bandwidths": "interaction.bandwidths",
    "estimators": "interaction.estimators",
    "flows": "interaction.flows",
    "spaces": "interaction.spaces",
    "likelihoods": "inference.likelihoods",
    "priors": "inference.priors",
    "annealings": "training.annealing",
    "augmentations": "data.augment",
    "corruptions": "data.corruptions",
    "datasets": "data",
    "models": "models",
    "metrics": "prediction.metrics",
    "plots": "plots",
    "samplers": "analysis.landscape.subspace",
    "curves": "analysis.landscape.curves",
    "targets": "data.targets",
    "problems": "analysis.fidelity.problems",
}

KINDS = ("experiments", "options", "methods", "schedules", "optimizers", *_REGISTRIES)
"""What can be listed."""


@dataclass(frozen=True)
class Entry:
    """One thing that can be typed.

    Attributes:
        name: what to type.
        summary: one sentence.
        cite: keys of the bibliography.
    """

    name: str
    summary: str
    cite: tuple[str, ...] = ()


def entries(kind: str) -> list[Entry]:
    """All entries of one kind."""
    if kind in _REGISTRIES:
        return _registered(importlib.import_module(f"shoal.{_REGISTRIES[kind]}").registry)
    if kind == "experiments":
        return [Entry(name, summary(text)) for name, text in experiments().items()]
    if kind == "options":
        return [Entry(typed, doc) for typed, doc in keys().items()]
    if kind == "methods":
        from shoal.interaction.methods import METHODS

        return [Entry(method.name, method.summary, method.cite) for method in METHODS.values()]
    if kind == "schedules":
        from shoal.training.optim import schedules

        return _registered(schedules)
    if kind == "optimizers":
        return _optimizers()
    raise ConfigError(f"there is no kind called {kind!r}; {nearest(kind, KINDS)}")


def _registered(registry: Any) -> list[Entry]:
    return [Entry(name, _words(registry.summary(name)), registry.cite(name)) for name in registry]


def _words(summary: str) -> str:
    """A sentence without its formulas, which a terminal cannot show.

    >>> _words("Error of the label, $|a - b|$, in bins.")
    'Error of the label, in bins.'
    """
    return re.sub(r",?\s*\$[^$]*\$", "", summary)


def _optimizers() -> list[Entry]:
    import torch

    from shoal.training.optim import optimizers

    classes = {name.lower(): entry for name, entry in vars(torch.optim).items()}
    return [Entry(name, f"torch.optim.{classes[name].__name__}") for name in optimizers()]


def listing_text(found: Sequence[Entry]) -> str:
    """Names, sentences and papers, wrapped to the width of the terminal."""
    name = max(len(entry.name) for entry in found) + 2
    room = max(shutil.get_terminal_size((100, 24)).columns, name + 30)
    lines = []
    for entry in found:
        papers = "; ".join(_short(BIBLIOGRAPHY[key]) for key in entry.cite if key in BIBLIOGRAPHY)
        text = f"{entry.summary} [{papers}]" if papers else entry.summary
        start = entry.name.ljust(name)
        lines += textwrap.wrap(text, room, initial_indent=start, subsequent_indent=" " * name) or [
            entry.name
        ]
    return "\n".join(lines)


def _short(paper: Citation) -> str:
    """Surnames and year.

    >>> _short(Citation("Liu, Qiang and Wang, Dilin", "SVGD", 2016, "NeurIPS", ""))
    'Liu & Wang 2016'
    """
    names = [author.partition(",")[0] for author in paper.authors.split(" and ")]
    who = " & ".join(names) if len(names) < 3 else f"{names[0]} et al."
    return f"{who} {paper.year}"


def plain(found: Sequence[Entry]) -> list[dict[str, Any]]:
    """The entries for programs, papers in full."""
    return [
        {
            "name": entry.name,
            "summary": entry.summary,
            "cite": [_paper(key) for key in entry.cite if key in BIBLIOGRAPHY],
        }
        for entry in found
    ]


def _paper(key: str) -> dict[str, str]:
    return {"key": key, "text": BIBLIOGRAPHY[key].text, "url": BIBLIOGRAPHY[key].url}

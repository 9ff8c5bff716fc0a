"""`shoal list`: the names of methods, kernels, models and everything else."""

import importlib
import re
import shutil
import textwrap
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from shoal.cli.outcome import Outcome
from shoal.core.bibliography import BIBLIOGRAPHY, Citation
from shoal.core.display.text import table
from shoal.core.errors import ConfigError
from shoal.core.registry import nearest
from shoal.experiment.config import experiments, keys, summary

__all__ = ["KINDS", "ListedName", "entries", "listing_text", "plain", "run"]

_REGISTRIES = {
    "kernels": "shoal.interaction.kernels",
    "bandwidths": "shoal.interaction.bandwidths",
    "estimators": "shoal.interaction.estimators",
    "flows": "shoal.interaction.flows",
    "spaces": "shoal.interaction.spaces",
    "points": "shoal.interaction.points",
    "likelihoods": "shoal.inference.likelihoods",
    "priors": "shoal.inference.priors",
    "annealings": "shoal.training.options.annealing",
    "augmentations": "shoal.data.batches.augment",
    "corruptions": "shoal.data.corruptions",
    "datasets": "shoal.data",
    "models": "shoal.models",
    "metrics": "shoal.prediction.metrics",
    "plots": "shoal.plots",
    "samplers": "shoal.inference.samplers",
    "subspace-samplers": "shoal.analysis.landscape.subspace",
    "curves": "shoal.analysis.landscape.curves",
    "targets": "shoal.data.targets",
    "problems": "shoal.analysis.fidelity.problems",
}

KINDS = ("experiments", "options", "methods", "schedules", "optimizers", *_REGISTRIES)
"""Kinds of names that can be listed."""


@dataclass(frozen=True)
class ListedName:
    """One name that can be typed.

    Attributes:
        name: what to type.
        summary: one sentence.
        cite: keys of its papers in the bibliography.
    """

    name: str
    summary: str
    cite: tuple[str, ...] = ()


def entries(kind: str) -> list[ListedName]:
    """All names of one kind."""
    if kind in _REGISTRIES:
        return _registered(importlib.import_module(_REGISTRIES[kind]).registry)
    if kind == "experiments":
        return [ListedName(name, summary(text)) for name, text in experiments().items()]
    if kind == "options":
        return [ListedName(typed, doc) for typed, doc in keys().items()]
    if kind == "methods":
        from shoal.interaction.methods import METHODS

        return [ListedName(method.name, method.summary, method.cite) for method in METHODS.values()]
    if kind == "schedules":
        from shoal.training.options.torch_schedules import schedules

        return _registered(schedules)
    if kind == "optimizers":
        return _optimizers()
    raise ConfigError(f"there is no kind called {kind!r}; {nearest(kind, KINDS)}")


def _registered(registry: Any) -> list[ListedName]:
    return [
        ListedName(name, _words(registry.summary(name)), registry.cite(name)) for name in registry
    ]


def _words(summary: str) -> str:
    """A sentence without formulas, which a terminal cannot show.

    >>> _words("Error of the label, $|a - b|$, in bins.")
    'Error of the label, in bins.'
    """
    return re.sub(r",?\s*\$[^$]*\$", "", summary)


def _optimizers() -> list[ListedName]:
    import torch

    from shoal.training.options.optim import optimizers

    classes = {name.lower(): value for name, value in vars(torch.optim).items()}
    return [ListedName(name, f"torch.optim.{classes[name].__name__}") for name in optimizers()]


def listing_text(names: Sequence[ListedName]) -> str:
    """Names, summaries and papers, wrapped to the width of the terminal."""
    name = max(len(listed.name) for listed in names) + 2
    room = max(shutil.get_terminal_size((100, 24)).columns, name + 30)
    lines = []
    for listed in names:
        papers = "; ".join(_short(BIBLIOGRAPHY[key]) for key in listed.cite if key in BIBLIOGRAPHY)
        text = f"{listed.summary} [{papers}]" if papers else listed.summary
        start = listed.name.ljust(name)
        lines += textwrap.wrap(text, room, initial_indent=start, subsequent_indent=" " * name) or [
            listed.name
        ]
    return "\n".join(lines)


def _short(paper: Citation) -> str:
    """Surnames and year.

    >>> _short(Citation("Liu, Qiang and Wang, Dilin", "SVGD", 2016, "NeurIPS", "", ""))
    'Liu & Wang 2016'
    """
    names = [author.partition(",")[0] for author in paper.authors.split(" and ")]
    who = " & ".join(names) if len(names) < 3 else f"{names[0]} et al."
    return f"{who} {paper.year}"


def plain(names: Sequence[ListedName]) -> list[dict[str, Any]]:
    """The listed names as plain values, with full citations."""
    return [
        {
            "name": listed.name,
            "summary": listed.summary,
            "cite": [_paper(key) for key in listed.cite if key in BIBLIOGRAPHY],
        }
        for listed in names
    ]


def _paper(key: str) -> dict[str, str]:
    return {"key": key, "text": BIBLIOGRAPHY[key].text, "url": BIBLIOGRAPHY[key].url}


def run(options: Namespace) -> Outcome:
    """The names of one kind, or all kinds."""
    if options.kind is not None:
        listed = entries(options.kind)
        return Outcome(listing_text(listed), plain(listed))
    names = {kind: [listed.name for listed in entries(kind)] for kind in KINDS}
    rows = [[kind, str(len(each)), _some(each)] for kind, each in names.items()]
    width = max(len(row[2]) for row in rows)
    text = table([[kind, count, some.ljust(width)] for kind, count, some in rows])
    return Outcome(f"{text}\n\nType 'shoal list KIND' to see what each name means.", names)


def _some(names: list[str], room: int = 60) -> str:
    shown: list[str] = []
    for name in names:
        if len(", ".join([*shown, name])) > room:
            return f"{', '.join(shown)}, ..."
        shown.append(name)
    return ", ".join(shown)

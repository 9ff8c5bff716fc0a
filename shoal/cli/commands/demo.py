"""`shoal demo`: from data to a report, without a download."""

import sys
import webbrowser
from argparse import Namespace
from pathlib import Path

from shoal.cli.commands.compare import compare
from shoal.cli.outcome import Outcome
from shoal.experiment.config import load_config
from shoal.experiment.grid import Grid
from shoal.experiment.variants import parse_variants

__all__ = ["METHODS", "run"]

METHODS = "ensemble,kde,kde:300,f-kde,f-kde:100"
"""At strength 1 the force ratio is below 0.001 on this data set. At the larger strengths the force
ratio is about 0.1. The strengths were chosen by the force ratio alone, without test data."""


def run(options: Namespace) -> Outcome:
    """Compare repulsive ensembles with the plain ensemble on handwritten digits."""
    folder = Path(options.out or "runs/demo")
    grid = Grid(load_config("digits"), folder, parse_variants(METHODS), (5,), options.seeds)
    page = folder / "report.html"
    outcome = compare(grid, options, page)
    if options.open and sys.stdout.isatty():
        webbrowser.open(page.resolve().as_uri())
    return outcome

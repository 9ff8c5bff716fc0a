"""`shoal demo`: from data to a report, without a download."""

import sys
import webbrowser
from argparse import Namespace
from dataclasses import replace
from pathlib import Path

from shoal.cli.commands.compare import compare
from shoal.cli.outcome import Outcome
from shoal.experiment.config import load_config
from shoal.experiment.grid import Grid
from shoal.experiment.variants import parse_variants

__all__ = ["METHODS", "run"]

METHODS = "ensemble,kde:300,f-kde:100"
"""The force ratio of both strengths is about 0.1; at strength 1 it is below 0.001, and the runs
are plain ensembles in effect. The strengths were chosen by it alone, without test data."""


def run(options: Namespace) -> Outcome:
    """Report on a plain ensemble of handwritten digits, then compare repulsive ones with it."""
    folder = Path(options.out or "runs/demo")
    config, variants = load_config("digits"), parse_variants(METHODS)
    page = folder / "report.html"
    compare(Grid(config, folder, variants[:1], (5,), 1), options, page)
    if not options.quiet:
        text = f"The first report is {page}. The comparison of {len(variants)} methods follows."
        print(text, file=sys.stderr)
    if options.open and sys.stdout.isatty():
        webbrowser.open(page.resolve().as_uri())
    outcome = compare(
        Grid(config, folder, variants, (5,), options.seeds), options, folder / "comparison.html"
    )
    value = {**outcome.value, "report": str(page)}
    return replace(outcome, text=f"{outcome.text}\nreport  {page}", value=value)

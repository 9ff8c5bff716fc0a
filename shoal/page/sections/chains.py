"""Can these draws be trusted? Diagnostics of the chains of a run of draws."""

import numpy as np

from shoal import plots
from shoal.analysis.chains import ChainDiagnostics
from shoal.core.display.text import counted, number
from shoal.page.blocks import Block, Figure, Section, Statement, Table, TableCell, folded, section
from shoal.page.report_data import ReportData

__all__ = ["chains_section"]

_TONES = {True: "good", False: "mind", None: "plain"}


@section("chains", order=12)
def chains_section(report_data: ReportData) -> Section | None:
    """The chains of the first run, if its members are draws."""
    evaluation, lead = report_data.assessment, report_data.lead
    name = str(evaluation.scores["data"].get("name"))
    found = ChainDiagnostics.read(name, evaluation.split_samples("chains"))
    if found is None:
        return None
    blocks: list[Block] = [
        Statement(each.name, each.value, each.sentence, _TONES[each.good])
        for each in found.findings
    ]
    blocks += _figures(found, lead.label)
    blocks.append(folded(_table(found)))
    many = f"{counted(found.chains, 'chain')} of {found.draws} draws"
    answer = f"{found.verdict} {many} were followed at {found.points} test points."
    return Section("Can these draws be trusted?", answer, blocks)


def _figures(found: ChainDiagnostics, method: str) -> list[Figure]:
    states = [found.state(chain) for chain in range(found.chains)]
    return [
        Figure(
            plots.traces(found.nll.numpy(), "NLL (nats per point)", states, method),
            "NLL of each draw",
            "Each line is a chain. Lines should be level: a line that falls or rises to the end "
            "needs a longer warm-up. Lines at several heights are modes of different quality.",
        ),
        Figure(
            plots.traces(found.worst.numpy(), "prediction", states, method),
            "The prediction that moves most slowly",
            "The test point with the largest R-hat within a chain. Each line should cross its own "
            "mean often. Chains of networks may stay at different heights.",
        ),
        Figure(
            plots.autocorrelations(found.correlation.numpy(), states, method),
            "Autocorrelation of predictions",
            "Mean over test points of the correlation between two draws of a chain. The sooner a "
            "line reaches 0, the more effective draws the chain has.",
        ),
    ]


def _table(found: ChainDiagnostics) -> Table:
    rows = []
    for chain in range(found.chains):
        values = [float(column[chain]) for column in found.columns.values()]
        cells = [TableCell(_short(value), value) for value in values]
        state = found.state(chain)
        rows.append(
            [TableCell(str(chain), chain), *cells, TableCell(state, state, "mind" if state else "")]
        )
    return Table(
        "All chains",
        ["chain", *found.columns, "state"],
        rows,
        "R-hat and effective draws are those that 95 % of the predictions keep. Drift is the "
        "change of the NLL from the first to the last third, in standard errors.",
    )


def _short(value: float) -> str:
    return number(value, 10.0 ** (np.floor(np.log10(abs(value))) - 1)) if value else "0"

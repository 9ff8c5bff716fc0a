"""Can these draws be trusted? The section of the report about the chains of a run of draws."""

import numpy as np
import torch
from torch import nn

import shoal
from shoal.analysis.chains import ChainDiagnostics
from shoal.page.blocks import Figure, Statement, Table
from shoal.page.report_data import load_report_data
from shoal.page.sections.chains import chains_section
from shoal.plots.chains import autocorrelations, traces


def drawn(tmp_path=None):
    x = torch.linspace(-1, 1, 30)[:, None]
    ensemble = shoal.Ensemble.init(lambda: nn.Linear(1, 1), 3)
    options = {"likelihood": shoal.likelihoods.Gaussian(0.3), "method": "ensemble"}
    run = shoal.fit(ensemble, (x, x[:, 0]), steps=3, progress=False, **options)
    draws = shoal.draw(run, draws=16, warmup=30, thin=1, progress=False, out=tmp_path)
    return run, draws, (x, x[:, 0])


def test_the_page_of_a_stored_run_of_draws_has_its_chains(tmp_path, undrawn):
    run, draws, data = drawn(tmp_path / "run")
    page = shoal.report(draws, tmp_path / "page.html", data=data).read_text(encoding="utf-8")
    assert "Can these draws be trusted?" in page and "3 chains of 16 draws" in page
    section = chains_section(load_report_data([tmp_path / "run"]))
    found = draws.chains(data)
    shown = [block for block in section.blocks if isinstance(block, Statement)]
    assert [block.sentence for block in shown] == found.sentences
    tones = {True: "good", False: "mind", None: "plain"}
    assert [block.tone for block in shown] == [tones[each.good] for each in found.findings]
    assert section.answer.startswith(found.verdict)
    figures = [block for block in section.blocks if isinstance(block, Figure)]
    lines = figures[0].figure.axes[0].get_lines()
    np.testing.assert_allclose(lines[1].get_ydata(), found.nll[1])
    table = next(block for block in section.blocks if isinstance(block, Table))
    assert len(table.rows) == 3 and table.columns[0] == "chain"
    shoal.evaluate(run, data)
    assert chains_section(load_report_data([run])) is None


def test_an_evaluation_holds_the_diagnostics():
    _, draws, data = drawn()
    found = ChainDiagnostics.read("x", shoal.evaluate(draws, data).split_samples("chains"))
    assert found is not None and found.trusted == draws.chains(data).trusted


def test_a_chain_with_a_state_is_named_in_the_figure():
    values = np.random.default_rng(0).normal(size=(3, 1000))
    figure = traces(values, "NLL", ["", "stuck", ""])
    lines = figure.axes[0].get_lines()
    assert [line.get_label() for line in lines] == ["chain 0", "chain 1 (stuck)", "chain 2"]
    assert lines[1].get_linewidth() > lines[0].get_linewidth()
    many = traces(np.ones((40, 1000)), "NLL", [""] * 39 + ["lost"]).axes[0]
    assert sum(len(line.get_xdata()) for line in many.get_lines()) <= 8000
    assert many.get_legend_handles_labels()[1] == ["each chain", "chain 39 (lost)"]


def test_the_autocorrelation_has_the_mean_of_the_finite_chains():
    values = np.array([[1.0, 0.5], [1.0, 0.3], [np.nan, np.nan]])
    lines = autocorrelations(values, ["", "", "stuck"]).axes[0].get_lines()
    np.testing.assert_allclose(lines[3].get_ydata(), [1.0, 0.4])

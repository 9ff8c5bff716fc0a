"""Nothing that is drawn around the axes is cut off, and figures are measured once."""

import numpy as np
import pytest

from shoal.plots import comparison, loss, pairwise, sizes
from shoal.plots.comparison import MetricCurve, outliers
from shoal.plots.evidence import prior_comparison
from shoal.plots.margins import Margins

ROWS = [{"epoch": i + 1, "loss": 1.0 / (i + 1), "member_loss": [1.0, 2.0]} for i in range(5)]
LONG = {"a method with a very long name": (0.1, 0.01), "f-ssge (legacy)": (0.2, 0.02)}
CURVES = {f"method {i}": MetricCurve([1, 2], [0.1 * i, 0.2], [0.0, 0.1]) for i in range(9)}


@pytest.mark.parametrize(
    "figure",
    [
        loss(ROWS, "kde"),
        comparison(LONG, "NLL"),
        sizes(CURVES, "accuracy", share=True),
        pairwise(np.full((4, 4), 0.3)),
        prior_comparison([("a prior, of some kind", -1.0, 0.3), ("another", -90.0, 0.2)]),
    ],
    ids=["loss", "comparison", "sizes", "pairwise", "prior_comparison"],
)
def test_all_of_a_figure_is_on_it(figure):
    assert isinstance(figure.get_layout_engine(), Margins)
    figure.draw_without_rendering()
    shown = figure.get_tightbbox().padded(-0.02)
    wide, tall = figure.get_size_inches()
    assert shown.x0 >= 0 and shown.y0 >= 0 and shown.x1 <= wide and shown.y1 <= tall


def test_legends_stand_above_the_axes():
    figure = sizes(CURVES, "accuracy")
    figure.draw_without_rendering()
    (axes,), (legend,) = figure.axes, figure.legends
    assert legend.get_window_extent().y0 >= axes.get_window_extent().y1


def test_axes_are_measured_once(monkeypatch):
    from matplotlib.axes import Axes

    from shoal.plots.figure import svg

    calls = []
    measure = Axes.get_tightbbox
    monkeypatch.setattr(
        Axes, "get_tightbbox", lambda self, *a, **k: calls.append(1) or measure(self, *a, **k)
    )
    svg(loss(ROWS, "kde"), "figure")
    assert len(calls) == 1


def test_one_method_far_away_does_not_squeeze_the_others():
    rows = {name: (0.3 + 0.002 * i, 0.001) for i, name in enumerate(("kde", "sge", "ssge", "svgd"))}
    far = rows | {"f-svgd": (1.6, 0.4)}
    assert outliers(rows) == {}
    assert outliers(far) == {"f-svgd": 1}
    axes = comparison(far, "NLL", "lower").axes[0]
    assert axes.get_xlim()[1] < 0.4
    assert [text.get_text() for text in axes.texts] == ["1.6 ± 0.4 →"]
    assert outliers({"a": (0.1, 0.1), "b": (5.0, 0.1)}) == {}

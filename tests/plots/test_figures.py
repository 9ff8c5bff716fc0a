"""Every registered figure draws, labels its axes, and shows the numbers it was given."""

import math

import numpy as np
import pytest
import torch

from shoal import plots
from shoal.analysis.fidelity import law
from shoal.core.errors import DataError
from shoal.data.targets import Mixture, StandardGaussian
from shoal.inference.likelihoods import Categorical
from shoal.plots.calibration import wilson
from shoal.prediction import Predictive, metrics

RANDOM = torch.Generator().manual_seed(0)
OUTPUTS = 2 * torch.randn(4, 60, 3, generator=RANDOM)
PRED = Predictive(OUTPUTS, Categorical())
Y = torch.randint(3, (60,), generator=RANDOM)
HISTORY = [
    {
        "epoch": i + 1,
        "loss": 1 / (i + 1),
        "member_loss": [1 / (i + 1), 2 / (i + 1), None],
        "drive": 10.0 / (i + 1),
        "push": 1e-3,
        "ratio": 1e-4 * (i + 1),
        "h2": 4.0 * (i + 1),
        "effective": 2.5,
    }
    for i in range(6)
]
CURVES = {
    "kde": plots.Curve([1, 5, 10], [0.8, 0.9, 0.95], [0.01, 0.02, math.nan]),
    "ensemble": plots.Curve([1, 5, 10], [0.7, 0.8, 0.85], [math.nan] * 3),
}
ROW = {"kde": (0.9, 0.01), "a $name$ of one's own": (0.8, math.nan)}
GRID = torch.linspace(-1, 1, 8)

EXAMPLES = {
    "loss": (HISTORY, "kde"),
    "forces": (HISTORY, "kde"),
    "bandwidth": (HISTORY, "kde"),
    "reliability": ({"kde": metrics.reliability(PRED, Y)},),
    "coverage": ({"kde": torch.rand(50, generator=RANDOM)},),
    "uncertainty": (PRED.entropy(), {"letters": PRED.entropy() + 0.1}, "kde"),
    "accuracy-confidence": ({"kde": metrics.accuracy_confidence(PRED, Y)},),
    "severity": (CURVES, "accuracy", "rotated"),
    "sizes": (CURVES, "accuracy"),
    "comparison": (ROW, "accuracy", "higher"),
    "pairwise": (metrics.pairwise_disagreement(PRED),),
    "members": ({"kde": (torch.tensor([0.9, 0.8]), torch.tensor([0.05, 0.1]))},),
    "gallery": (torch.rand(7, 1, 5, 5, generator=RANDOM), ["7"] * 7),
    "band": (GRID, GRID, GRID.abs() + 0.1, (GRID, GRID), "kde"),
    "parity": (GRID, GRID, GRID.abs(), "kde"),
    "plane": (GRID, GRID, torch.rand(8, 8, generator=RANDOM), (torch.rand(4, 2), torch.arange(4))),
    "posterior-bands": (GRID, (GRID, GRID.abs()), {"kde": (GRID, GRID.abs())}, (GRID, GRID)),
    "fidelity-distances": ({"kde": {"linear": 0.1, "digits": 0.2}, "f-kde": {"linear": 0.3}},),
    "stein-growth": ({"kde": [(2, 1.0), (8, 0.5)], "ensemble": [(2, 1.0), (8, 1.0)]},),
    "score-law": (law.measure(members=5, dimensions=(3, 10)),),
    "particles": (Mixture(), torch.randn(9, 2, generator=RANDOM), None, "kde"),
}
UNLABELLED = {"gallery"}


@pytest.mark.parametrize("name", plots.registry.names())
def test_every_figure_draws_with_labelled_axes(name):
    figure = plots.registry[name](*EXAMPLES[name])
    text = plots.svg(figure, "f")
    assert len(text) > 1000
    if name not in UNLABELLED:
        bottom = figure.axes[0] if len(figure.axes) == 1 else None
        named = [axes.get_xlabel() for axes in figure.axes if axes.get_xlabel()]
        assert named
        assert bottom is None or bottom.get_xlabel()
        assert figure.axes[0].get_ylabel() or figure.axes[0].get_yticklabels()


@pytest.mark.parametrize("name", plots.registry.names())
def test_every_figure_has_a_sentence(name):
    assert plots.registry.summary(name).endswith(".")


@pytest.mark.parametrize("name", sorted(set(plots.registry.names()) - UNLABELLED))
def test_title_is_written(name):
    figure = plots.registry[name](*EXAMPLES[name], title="A title of its own")
    assert "A title of its own" in plots.svg(figure, "f")


def test_figures_are_transparent_and_leave_matplotlib_alone():
    import matplotlib as mpl

    before = dict(mpl.rcParams)
    figure = plots.loss(HISTORY)
    assert figure.get_facecolor()[3] == 0
    assert dict(mpl.rcParams) == before


def test_losses_are_drawn_on_a_logarithmic_axis_where_they_are_positive():
    assert plots.loss(HISTORY).axes[0].get_yscale() == "log"
    negative = [row | {"loss": row["loss"] - 1} for row in HISTORY]
    figure = plots.loss(negative)
    assert figure.axes[0].get_yscale() == "linear"
    drawn = figure.axes[0].get_lines()[-1].get_ydata()
    np.testing.assert_allclose(drawn, [row["loss"] for row in negative])


def test_forces_of_a_plain_ensemble_are_drawn_without_push():
    quiet = [row | {"push": 0.0, "ratio": 0.0} for row in HISTORY]
    assert plots.svg(plots.forces(quiet), "f")


def test_uncertainty_shows_shares_that_sum_to_one():
    axes = plots.uncertainty(PRED.entropy(), {"other": PRED.entropy()}, "kde").axes[0]
    for stairs in axes.patches:
        assert stairs.get_data().values.sum() == pytest.approx(1)


def test_reliability_draws_the_bins_and_their_counts():
    found = metrics.reliability(PRED, Y)
    above, below = plots.reliability({"kde": found}).axes
    points = above.get_lines()[1].get_xydata()
    filled = (found.count > 0).numpy()
    np.testing.assert_allclose(points[:, 0], found.confidence.numpy()[filled])
    np.testing.assert_allclose(points[:, 1], found.accuracy.numpy()[filled])
    np.testing.assert_allclose(below.patches[0].get_data().values, found.count.numpy() / 60)


def test_of_several_reliabilities_small_bins_are_left_out():
    found = metrics.reliability(PRED, Y)
    above, below = plots.reliability({"kde": found, "sge": found}).axes
    drawn = above.get_lines()[1].get_xydata()[:, 0]
    assert 0 < len(drawn) < int((found.count > 0).sum())
    np.testing.assert_allclose(drawn, found.confidence.numpy()[(found.count >= 5).numpy()])


def test_wilson_interval_solves_its_equation():
    share, n, z = np.array([0.0, 0.3, 1.0]), np.array([5.0, 40.0, 9.0]), 1.96
    for end in wilson(share, n, z):
        np.testing.assert_allclose((share - end) ** 2, z**2 * end * (1 - end) / n, atol=1e-12)
        assert ((end >= 0) & (end <= 1)).all()


def test_coverage_of_uniform_values_is_the_diagonal():
    axes = plots.coverage({"kde": (torch.arange(1000) + 0.5) / 1000}).axes[0]
    x, y = axes.get_lines()[1].get_data()
    np.testing.assert_allclose(x, y, atol=1e-3)


def test_curves_have_their_values_and_error_bars():
    axes = plots.sizes(CURVES, "accuracy").axes[0]
    kde = axes.containers[0]
    np.testing.assert_allclose(kde.lines[0].get_xydata()[:, 1], CURVES["kde"].mean)
    lengths = [np.ptp(segment[:, 1]) for segment in kde.lines[2][0].get_segments()]
    np.testing.assert_allclose(lengths, [0.02, 0.04, 0.0], atol=1e-12)


def test_a_share_is_shown_in_per_cent():
    axes = plots.comparison(ROW, "accuracy", "higher", share=True).axes[0]
    assert axes.xaxis.get_major_formatter()(0.975, 0) == "97.5 %"
    assert "higher is better" in axes.get_xlabel()


def test_diversity_is_disagreement_in_units_of_the_error():
    axes = plots.members({"kde": (torch.tensor([0.9]), torch.tensor([0.05]))}).axes[0]
    x, y = axes.get_lines()[1].get_data()
    assert (x[0], y[0]) == (pytest.approx(0.9), pytest.approx(0.5))


def test_matrix_has_numbers_only_where_there_is_room():
    few = plots.pairwise(torch.full((3, 3), 0.25)).axes[0]
    many = plots.pairwise(torch.zeros(20, 20)).axes[0]
    assert [text.get_text() for text in few.texts] == ["25.0"] * 9
    assert not many.texts


def test_matrices_can_share_their_colours():
    axes = plots.pairwise(torch.full((3, 3), 0.25), top=0.5).axes[0]
    assert axes.get_images()[0].get_clim() == (0, 50)


def test_band_is_two_standard_deviations_wide_whatever_the_order():
    x = torch.tensor([2.0, 0.0, 1.0])
    axes = plots.band(x, 10 * x, torch.ones(3)).axes[0]
    path = axes.collections[0].get_paths()[0].vertices
    np.testing.assert_allclose(axes.get_lines()[0].get_ydata(), [0, 10, 20])
    assert path[:, 1].min() == pytest.approx(-2)
    assert path[:, 1].max() == pytest.approx(22)


@pytest.mark.parametrize("shape", [(4, 2, 5, 5), (0, 1, 5, 5), (4, 5, 5)])
def test_gallery_refuses_what_are_no_images(shape):
    with pytest.raises(DataError, match="images must be"):
        plots.gallery(torch.zeros(shape))


def test_gallery_shows_pixels_as_they_are():
    images = torch.tensor([[[[0, 255], [51, 0]]]], dtype=torch.uint8)
    axes = plots.gallery(images, ["7"], tips=["says 7"]).axes[0]
    np.testing.assert_allclose(axes.get_images()[0].get_array(), [[0, 1], [0.2, 0]])
    assert axes.texts[0].get_text() == "7"


def test_particles_must_be_in_the_plane():
    with pytest.raises(DataError, match="in the plane"):
        plots.particles(StandardGaussian(3), torch.zeros(4, 3))


def test_contours_of_a_gaussian_lie_at_whole_and_half_deviations():
    axes = plots.particles(StandardGaussian(2), torch.zeros(4, 2)).axes[0]
    rings = axes.collections[0]
    radii = sorted(float(np.hypot(*path.vertices.T).mean()) for path in rings.get_paths()[2:])
    np.testing.assert_allclose(radii, [0.5, 1.0, 1.5, 2.0, 2.5], atol=0.03)

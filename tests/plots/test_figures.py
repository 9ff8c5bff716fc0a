"""Every registered figure draws, labels its axes, and shows the numbers it was given."""

import math

import numpy as np
import pytest
import torch

from shoal import plots
from shoal.analysis.fidelity import score_shrinkage as law
from shoal.core.errors import DataError
from shoal.data.targets import Mixture, StandardGaussian
from shoal.inference.likelihoods import Categorical
from shoal.plots.calibration import wilson
from shoal.prediction import Predictive, metrics
from shoal.prediction.worth import size_curves

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
    "kde": plots.MetricCurve([1, 5, 10], [0.8, 0.9, 0.95], [0.01, 0.02, math.nan]),
    "ensemble": plots.MetricCurve([1, 5, 10], [0.7, 0.8, 0.85], [math.nan] * 3),
}
ROW = {"kde": (0.9, 0.01), "a $name$ of one's own": (0.8, math.nan)}
GRID = torch.linspace(-1, 1, 8)

EXAMPLES = {
    "loss": (HISTORY, "kde"),
    "forces": (HISTORY, "kde"),
    "bandwidth": (HISTORY, "kde"),
    "bandwidths": ({"forde": [HISTORY, HISTORY[:4]], "kde": [HISTORY]},),
    "traces": (np.ones((2, 9)), "NLL", ["", "stuck"], "kde"),
    "autocorrelations": (np.ones((2, 9)), ["", "stuck"], "kde"),
    "attention": (
        torch.randint(256, (1, 4, 4), dtype=torch.uint8),
        {"4x4": torch.randint(256, (3, 4, 4), dtype=torch.uint8)},
        {"4x4": 0.5},
    ),
    "reliability": ({"kde": metrics.reliability(PRED, Y)},),
    "confusion": (metrics.confusion(Y, PRED.labels(), 3), ["ant", "bee", "cat"]),
    "residuals": (PRED.members[0, :, 0], PRED.members[1, :, 0], PRED.entropy(), "kde"),
    "coverage-over-prediction": ({"kde": (OUTPUTS[0, :, 0], torch.rand(60, generator=RANDOM))},),
    "coverage": ({"kde": torch.rand(50, generator=RANDOM)},),
    "uncertainty": (PRED.entropy(), {"letters": PRED.entropy() + 0.1}, "kde"),
    "uncertainty-by-size": (
        {m: (PRED.entropy(), {"letters": PRED.entropy() + 0.1}) for m in (1, 5)},
        "kde",
    ),
    "accuracy-confidence": ({"kde": metrics.accuracy_confidence(PRED, Y)},),
    "severity": (CURVES, "accuracy", "rotated"),
    "sizes": (CURVES, "accuracy"),
    "worth": (size_curves(PRED, Y)["accuracy"], "accuracy", "kde", True),
    "heatmap": ({"kde": {1: 0.9, 5: 0.95}, "sge": {5: 0.91}}, "accuracy", "higher", True),
    "strength": (CURVES, "accuracy", {"kde": 5.0}, (0.75, math.nan)),
    "comparison": (ROW, "accuracy", "higher"),
    "importances": (["size", "a name that is too long to show"], [2.0, -0.1], [0.2, 0.1], "NLL"),
    "dependence": ("size", GRID.numpy(), *(GRID.numpy() + move for move in (0.0, -0.1, 0.1))),
    "pairwise": (metrics.pairwise_disagreement(PRED),),
    "members": ({"kde": (torch.tensor([0.9, 0.8]), torch.tensor([0.05, 0.1]))},),
    "gallery": (torch.rand(7, 1, 5, 5, generator=RANDOM), ["7"] * 7),
    "band": (GRID, GRID, GRID.abs() + 0.1, (GRID, GRID), "kde"),
    "parity": (GRID, GRID, GRID.abs(), "kde"),
    "plane": (GRID, GRID, torch.rand(8, 8, generator=RANDOM), (torch.rand(4, 2), torch.arange(4))),
    "corrupted": ({"kde": plots.Spread([0, 1, 2], *[[0.9, 0.8, 0.6]] * 3)}, "accuracy", True),
    "contact-sheet": ({"fog": torch.rand(5, 3, 4, 4), "snow": torch.rand(5, 3, 4, 4)},),
    "weights": ({"posterior": [0.9, 0.1], "stacking": [0.4, 0.6], "uniform": [0.5, 0.5]},),
    "likelihoods": ([-50.0, -53.0, -51.0], -50.9),
    "prior-comparison": (
        [("point masses", -50.0, 0.1), ("Gaussians at zero, last layer", -900.0, 0.2)],
    ),
    "posterior-bands": (GRID, (GRID, GRID.abs()), {"kde": (GRID, GRID.abs())}, (GRID, GRID)),
    "fidelity-distances": ({"kde": {"linear": 0.1, "digits": 0.2}, "f-kde": {"linear": 0.3}},),
    "stein-growth": ({"kde": [(2, 1.0), (8, 0.5)], "ensemble": [(2, 1.0), (8, 1.0)]},),
    "score-law": (law.measure(members=5, dimensions=(3, 10)),),
    "particles": (Mixture(), torch.randn(9, 2, generator=RANDOM), None, "kde"),
}
SNAPSHOTS = torch.tensor([0, 0, 0, 1, 1, 1])
EXAMPLES |= {
    "similarity": (torch.eye(6), SNAPSHOTS, "cosine"),
    "function-map": (torch.randn(6, 2, generator=RANDOM), SNAPSHOTS),
    "diversity-plane": (
        {"members": (torch.tensor([0.9, 0.88]), torch.tensor([0.08, 0.1])),
         "swag": (torch.tensor([0.89, 0.5]), torch.tensor([0.02, 0.5]))},
        0.9,
        10,
    ),
    "profile": ({"tunnel": (torch.ones(5), torch.rand(2, 5, generator=RANDOM))},),
    "surface": (GRID, GRID, torch.rand(8, 8, generator=RANDOM), torch.rand(3, 2, generator=RANDOM)),
    "curvature": ({"kde": torch.rand(3, 4, generator=RANDOM) + 0.1, "sge": -torch.ones(3, 4)},),
    "effective": ({"kde": {"weights": (2.9, 0.1), "labels": (1.4, math.nan)}}, 3),
}  # fmt: skip
UNLABELLED = {"gallery", "attention"}


def test_bandwidths_show_every_seed_and_their_mean():
    doubled = [{**row, "h2": 3 * row["h2"]} for row in HISTORY]
    figure = plots.bandwidths({"forde": [HISTORY, doubled]})
    one, other, mean = (line.get_ydata() for line in figure.axes[0].get_lines())
    np.testing.assert_allclose(one, [row["h2"] for row in HISTORY])
    np.testing.assert_allclose(mean, (np.asarray(one) + other) / 2)


def test_attention_has_a_column_for_every_member_and_a_row_for_every_depth():
    maps = {"8x8": torch.zeros(3, 8, 8), "4x4": torch.zeros(3, 4, 4)}
    image = torch.zeros(3, 8, 8, dtype=torch.uint8)
    figure = plots.attention(image, maps, {"8x8": 0.25, "4x4": 1.0})
    assert len(figure.axes) == 2 * (1 + 3)
    assert figure.axes[0].get_ylabel() == "8x8\n0.25"
    assert figure.axes[4].get_ylabel() == "4x4\n1.00"


@pytest.mark.parametrize("name", plots.registry.names())
def test_every_figure_draws_with_labelled_axes_and_its_title(name):
    figure = plots.registry[name](*EXAMPLES[name])
    if name in UNLABELLED:
        assert len(plots.svg(figure, "f")) > 1000
    else:
        bottom = figure.axes[0] if len(figure.axes) == 1 else None
        named = [axes.get_xlabel() for axes in figure.axes if axes.get_xlabel()]
        assert named
        assert bottom is None or bottom.get_xlabel()
        assert figure.axes[0].get_ylabel() or figure.axes[0].get_yticklabels()
        titled = plots.registry[name](*EXAMPLES[name], title="A title of its own")
        text = plots.svg(titled, "f")
        assert len(text) > 1000 and "A title of its own" in text


def test_every_figure_has_a_sentence():
    names = plots.registry.names()
    assert [name for name in names if not plots.registry.summary(name).endswith(".")] == []


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


def test_the_validation_nll_is_drawn_beside_the_loss_with_its_best_epoch():
    values = [2.0, 1.0, 0.5, None, 0.7, 0.9]
    held = [row | {"validation": {"nll": v}} for row, v in zip(HISTORY, values, strict=True)]
    *_, curve, dot = plots.loss(held).axes[0].get_lines()
    found = [None if math.isnan(value) else value for value in curve.get_ydata()]
    assert found == values
    assert (list(dot.get_xdata()), list(dot.get_ydata())) == ([3], [0.5])


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


def test_strengths_are_logarithmic_and_a_cross_stands_where_accuracy_falls():
    axes = plots.strength(CURVES, "accuracy", {"kde": 5.0}, (0.75, 0.02)).axes[0]
    assert axes.get_xscale() == "log"
    (cross,) = [line for line in axes.get_lines() if line.get_marker() == "x"]
    ((place, height),) = cross.get_xydata()
    assert height == 0.9 and abs(math.log(place / 5.0)) < 0.1
    (band,) = axes.patches
    low, high = band.get_window_extent().transformed(axes.transData.inverted()).intervaly
    np.testing.assert_allclose((low, high), (0.73, 0.77))


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


def test_corrupted_draws_means_and_the_middle_half():
    curve = plots.Spread([0, 1], [0.9, 0.7], [0.9, 0.6], [0.9, 0.8])
    axes = plots.corrupted({"kde": curve}, "accuracy").axes[0]
    np.testing.assert_allclose(axes.get_lines()[0].get_ydata(), curve.mean)
    bars = [path.vertices[:, 1].tolist() for path in axes.collections[0].get_paths()]
    assert bars == [[0.9, 0.9], [0.6, 0.8]]


def test_contact_sheet_shows_every_image_in_its_place():
    rows = {name: torch.rand(5, 1, 4, 6, generator=RANDOM) for name in ("fog", "snow")}
    axes = plots.contact_sheet(rows).axes[0]
    sheet = axes.get_images()[0].get_array()
    assert sheet.shape == (2 * 6, 5 * 8, 4)
    np.testing.assert_allclose(sheet[6:10, 16:22, 0], rows["snow"][2, 0], atol=1e-6)
    assert sheet[..., 3].sum() == 10 * 24  # the gaps let the page through
    assert [label.get_text() for label in axes.get_yticklabels()] == ["fog", "snow"]


@pytest.mark.parametrize(
    "rows", [{}, {"fog": torch.rand(4, 1, 4, 4)}, {"fog": torch.rand(5, 4, 4)}]
)
def test_contact_sheet_refuses_what_does_not_fit(rows):
    with pytest.raises(DataError, match="rows of 5 images"):
        plots.contact_sheet(rows)


@pytest.mark.parametrize(("words", "share"), [("other labels", True), ("RMS difference", False)])
def test_a_path_says_what_is_different_along_it(words, share):
    paths = {"tunnel": (torch.ones(5), torch.rand(2, 5, generator=RANDOM))}
    figure = plots.profile(paths, words, share)
    above, below = figure.axes
    assert above.get_ylabel() == "training loss (nats)"
    assert below.get_ylabel() == words


def test_colours_of_a_plane_reach_as_far_as_the_lines_between_members():
    """A cliff far outside must not paint valleys and the ridge between them in one colour."""
    grid = torch.linspace(-3, 3, 61)
    x, y = grid[None, :], grid[:, None]
    hump = torch.exp(-(x**2)) + 100 * (y.abs() > 2)
    figure = plots.surface(grid, grid, hump, torch.tensor([[-2.0, 0.0], [2.0, 0.0]]))
    assert figure.axes[1].get_ylim()[1] == pytest.approx(1.2, abs=0.01)

"""The whole landscape of a run: every part, kept in its folder, and not computed twice."""

import pytest
import torch
from small_runs import assert_one_sentence, dropped, normed, plain, points, quick, shoal_of
from torch import nn

from shoal.analysis.landscape.scene import AnalysisResult, Effort, registry
from shoal.analysis.landscape.study import load_study, study
from shoal.core.errors import ConfigError, ShoalWarning
from shoal.data.dataset import Dataset, Split

SMALL = Effort(inputs=40, points=4, samples=3, steps=4, products=3, snapshots=4, shifts=1)


def data_of(x, y):
    shifts = {"noisy": Split(x + 0.1, y), "noisier": Split(x + 0.5, y)}
    return Dataset("points", Split(x, y), Split(x, y), shifts=shifts)


DATA = data_of(*points(50))


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("study") / "run"
    return quick(plain, DATA, epochs=4, keep_every=1, out=folder)


def test_every_part_is_there_and_read_back_as_it_was(run):
    found = study(run, DATA, effort=SMALL)
    assert list(found) == registry.names()
    assert not [name for name, part in found.items() if "missing" in part.scores]
    kept = load_study(run.folder)
    assert kept.keys() == found.keys()
    for name, part in found.items():
        for key, tensor in part.tensors.items():
            torch.testing.assert_close(kept[name].tensors[key], tensor, equal_nan=True)
    assert kept["averaging"].scores["parts"].keys() == {"test", "noisy"}


def test_what_is_kept_is_not_computed_again_unless_something_changed(run):
    told = []
    study(run, DATA, ["line", "curvature"], effort=SMALL)
    study(run, DATA, ["line"], effort=SMALL, tell=lambda *word: told.append(word))
    study(run, DATA, ["line"], effort=SMALL, fresh=True, tell=lambda *word: told.append(word))
    other = Effort(**{**vars(SMALL), "inputs": 30})
    study(run, DATA, ["line"], effort=other, tell=lambda *word: told.append(word))
    assert told == [("line", True), ("line", False), ("line", False)]


def test_a_damaged_part_is_said_and_made_again(run):
    study(run, DATA, ["line"], effort=SMALL)
    file = run.folder / "landscape" / "line.safetensors"
    file.write_bytes(file.read_bytes()[:40])
    with pytest.warns(ShoalWarning, match=r"shoal\.landscape\("):
        assert "line" not in load_study(run.folder)
    with pytest.warns(ShoalWarning, match="line"):
        found = study(run, DATA, ["line"], effort=SMALL)
    assert "missing" not in found["line"].scores
    assert "line" in load_study(run.folder)


def test_planes_mark_members_where_nothing_differs(run):
    found = study(run, DATA, ["line", "origin-plane"], effort=SMALL)
    apart = found["line"].tensors["straight/apart"]
    assert float(apart[0, 0]) == float(apart[1, -1]) == 0
    assert found["origin-plane"].tensors["loss"].shape == (4, 4)


@pytest.mark.parametrize("build", [normed, dropped])
def test_networks_with_statistics_and_with_dropout(build, tmp_path):
    run = quick(build, DATA, epochs=3, keep_every=1, out=tmp_path / "run")
    found = study(run, DATA, effort=SMALL)
    assert not [name for name, part in found.items() if "missing" in part.scores]
    treatments = found["averaging"].scores["parts"]["test"]
    assert ("dropout x 10" in treatments) == (build is dropped)


def test_without_snapshots_the_rest_is_still_there():
    run = quick(plain, DATA, epochs=1)
    found = study(run, DATA, effort=SMALL)
    missing = {name for name, part in found.items() if "missing" in part.scores}
    assert missing == {"trajectories", "averaging"}
    assert "keep_every=1" in found["averaging"].scores["missing"]
    kinds = {name.partition("/")[0] for name in found["diversity"].tensors}
    assert kinds == {"members", "random", "dropout"}


def test_one_member_has_nothing_between():
    run = quick(shoal_of(plain, members=1), DATA, epochs=1)
    found = study(run, DATA, ["line", "three-plane", "curvature"], effort=SMALL)
    assert "2 members" in found["line"].scores["missing"]
    assert "3 members" in found["three-plane"].scores["missing"]
    assert found["curvature"].tensors["trace"].shape == (1,)


def test_regression_has_losses_and_distances_but_no_labels(tmp_path):
    x = torch.linspace(-1, 1, 50)[:, None]
    data = data_of(x, x[:, 0])
    ensemble = shoal_of(lambda: nn.Sequential(nn.Linear(1, 6), nn.Tanh(), nn.Linear(6, 1)))
    run = quick(ensemble, data, epochs=3, keep_every=1, out=tmp_path / "run")
    found = study(run, data, effort=SMALL)
    missing = {name for name, part in found.items() if "missing" in part.scores}
    assert missing == {"diversity"}
    assert float(found["line"].tensors["straight/apart"][0, -1]) > 0


def test_a_wrong_name_is_answered_before_anything_is_done(run):
    with pytest.raises(ConfigError) as caught:
        study(run, DATA, ["lime"], effort=SMALL)
    assert_one_sentence(caught.value, "did you mean 'line'")


def test_a_part_has_scores_and_tensors():
    assert AnalysisResult({"missing": "x"}).tensors == {}

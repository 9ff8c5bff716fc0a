"""Whole runs with repelled input gradients: what their folders keep, and what can be changed."""

import dataclasses

import pytest
import torch
from small_runs import BATCH, POINTS, both, dropped, normed, plain, points, quick, shoal_of
from torch import nn

import shoal
from shoal.core.errors import ConfigError, DataError
from shoal.core.storage.files import read_tensors
from shoal.engine.members.member_runner import MemberRunner
from shoal.evaluation.inspection import gradient_similarity
from shoal.experiment.build import check_names, default_folder
from shoal.experiment.config import load_config
from shoal.experiment.variants import variant_of
from shoal.training.folder.run import RunFolder
from shoal.training.mover.prepare import AXES


def test_the_axes_are_kept_beside_the_run(tmp_path):
    quick(normed, method="forde", out=tmp_path / "run")
    kept = read_tensors(tmp_path / "run" / AXES)
    x = points()[0]
    singular, axes = torch.linalg.svd(x - x.mean(0), full_matrices=False)[1:]
    torch.testing.assert_close((axes @ kept["1.basis"]).abs(), torch.eye(3), atol=1e-4, rtol=0)
    spread = singular.square() / singular.square().mean()
    torch.testing.assert_close(kept["0.factor"].square(), spread)
    quick(normed, method="forde-identity", out=tmp_path / "other")
    assert not (tmp_path / "other" / AXES).exists()


def test_a_resumed_run_reads_its_axes_instead_of_finding_them_again(tmp_path, monkeypatch):
    quick(plain, method="forde", epochs=1, out=tmp_path)
    found = []
    monkeypatch.setattr("shoal.training.mover.prepare.fitted", lambda *_: found.append(1))
    quick(shoal_of(plain), method="forde", epochs=1, out=tmp_path, resume=True)
    assert not found


def test_settings_of_a_method_are_kept_by_name(tmp_path):
    run = quick(plain, method={"name": "forde", "fraction": 0.5}, out=tmp_path)
    assert run.config["method"] == {"name": "forde", "fraction": 0.5, "coupled": True}
    config = load_config(tmp_path / "config.toml")
    check_names(dataclasses.replace(config, data="digits"))
    assert default_folder(config).name.startswith(f"{config.name}-forde-m3")
    again = quick(plain, method=config.method)
    torch.testing.assert_close(
        again.ensemble.weights["0.weight"], run.ensemble.weights["0.weight"], rtol=0, atol=0
    )


def test_a_fraction_of_an_old_folder_keeps_its_rule(tmp_path):
    method = {"name": "forde", "fraction": 0.5, "coupled": False}
    old = quick(normed, method=method, out=tmp_path)
    path = tmp_path / "config.toml"
    text = path.read_text()
    assert ", coupled = false" in text
    path.write_text(text.replace(", coupled = false", ""))
    assert RunFolder(tmp_path).config()["method"] == method
    config = load_config(path)
    assert variant_of(config.method).label == "forde+coupled=false+fraction=0.5"
    again = quick(normed, method=config.method)
    other = quick(normed, method={"name": "forde", "fraction": 0.5})
    assert variant_of(other.config["method"]).label == "forde+fraction=0.5"
    weights = [run.ensemble.weights["0.weight"] for run in (old, again, other)]
    torch.testing.assert_close(weights[1], weights[0], rtol=0, atol=0)
    assert not torch.allclose(weights[2], weights[0])


@pytest.mark.parametrize("override", ["method.fraction=0.5", "method.alpha=0.4"])
def test_settings_can_be_typed(override):
    name = "forde-tuned" if "alpha" in override else "forde"
    config = load_config("digits", [f"method={name}", override])
    check_names(config)
    wrong = load_config("digits", [f"method={name}", "method.fractoin=0.5"])
    with pytest.raises(ConfigError, match="did you mean 'fraction'"):
        check_names(wrong)


def test_a_loader_has_the_same_axes_as_its_arrays(tmp_path):
    x, y = points()
    loader = torch.utils.data.DataLoader(list(zip(x, y, strict=True)), batch_size=BATCH)
    quick(plain, loader, method="forde", out=tmp_path / "loader")
    quick(plain, method="forde", out=tmp_path / "arrays")
    one, other = (read_tensors(tmp_path / name / AXES) for name in ("loader", "arrays"))
    torch.testing.assert_close(one["0.factor"], other["0.factor"])


@pytest.mark.parametrize("precision", ["float32", "float64", "bfloat16"])
@pytest.mark.parametrize("engine", ["vmap", "loop", "chunk:2"])
def test_every_precision_and_engine(precision, engine):
    # On a CPU `vmap` has no batch normalisation in lower precision, whatever the method.
    build = both if engine == "loop" or precision != "bfloat16" else dropped
    run = quick(build, method="forde", precision=precision, engine=engine)
    last = run.history[-1]
    assert last["alive"] == 3 and last["push"] > 0 and last["h2"] > 0
    assert all(t.isfinite().all() for t in run.ensemble.weights.values())


def test_repulsion_of_directions_makes_them_differ():
    """What it is for: members that use other features than without it."""
    x, y = points(400)
    alike = {}
    for name, strength in (("ensemble", None), ("forde-identity", 5.0)):
        ensemble = shoal_of(plain, members=4)
        run = quick(ensemble, (x, y), method=name, strength=strength, epochs=15, batch_size=50)
        matrix = gradient_similarity(run.ensemble, x, y, run.likelihood)
        alike[name] = float((matrix.sum() - 4) / 12)
    assert alike["forde-identity"] < alike["ensemble"] - 0.02


def test_tokens_train_and_their_axes_are_refused():
    def words():
        return nn.Sequential(nn.Embedding(9, 4), nn.Flatten(), nn.Linear(12, 4))

    x = torch.randint(9, (POINTS, 3), generator=torch.Generator().manual_seed(0))
    y = x[:, 0] % 4
    run = quick(words, (x, y), method="forde-identity")
    assert run.history[-1]["push"] > 0
    with pytest.raises(DataError, match="for tokens type method='forde-identity'"):
        quick(words, (x, y), method="forde")


class Distances(nn.Module):
    """Outputs that are distances, of which torch has the first derivative alone."""

    def __init__(self):
        super().__init__()
        self.centres = nn.Parameter(torch.randn(4, 3))

    def forward(self, x):
        return -torch.cdist(x, self.centres, compute_mode="donot_use_mm_for_euclid_dist")


def test_a_layer_without_a_second_derivative_is_answered():
    ensemble = shoal.Ensemble.init(Distances, 2)
    posterior = shoal.Posterior(shoal.likelihoods.Categorical(), shoal.priors.Flat(), POINTS)
    repulsion = shoal.methods.get("forde-identity").repulsion
    with pytest.raises(DataError, match="cannot be differentiated twice"):
        shoal.forces(ensemble, posterior, repulsion, points(), mapping=MemberRunner("loop"))

"""Whole runs whose members are compared at other points: folders, resume, growth, files, errors."""

import dataclasses

import numpy as np
import pytest
import torch
from small_runs import (
    Fuse,
    assert_equal_trees,
    assert_one_sentence,
    assert_same_run,
    both,
    dropped,
    plain,
    points,
    quick,
    shoal_of,
)
from torch.utils.data import DataLoader, TensorDataset

import shoal
from shoal.cli.commands.list import entries
from shoal.core.errors import ConfigError, DataError
from shoal.experiment.build import check_names, make_data, train
from shoal.experiment.config import load_config
from shoal.experiment.variants import parse_method, variant_of
from shoal.models import Blueprint, SmallCNN
from shoal.training.mover.prepare import AXES

METHODS = ["f-kde", "f-svgd", "forde"]


def elsewhere(seed=5, rows=7):
    return torch.randn(rows, 3, generator=torch.Generator().manual_seed(seed))


def shuffled(x, key):
    return x.flip(1)


KINDS = {
    "augmented": lambda: shoal.points.Augmented(shuffled),
    "unlabelled": lambda: shoal.points.Unlabelled(elsewhere()),
    "noise": lambda: shoal.points.Noise(0.7, count=4),
    "uniform": lambda: shoal.points.Uniform(),
    "mixup": lambda: shoal.points.Mixup(0.5),
}


def table(method, kind):
    return {"name": method, "points": KINDS[kind]()}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("method", METHODS)
def test_a_stopped_run_continues_to_the_bit(tmp_path, method, kind):
    how = {"epochs": 2, "method": table(method, kind)}
    expected = quick(both, out=tmp_path / "whole", schedule=Fuse(), **how)
    with pytest.raises(Fuse.Blown):
        quick(both, out=tmp_path / "cut", schedule=Fuse(5), save_every=0.0, **how)
    found = quick(shoal_of(both, seed=7), out=tmp_path / "cut", schedule=Fuse(), resume=True, **how)
    assert_same_run(found, expected)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("engine", ["loop", "chunk:2"])
def test_engines_train_alike(engine, kind):
    for build in (plain, dropped):
        runs = [
            quick(build, method=table("f-kde", kind), engine=each, precision="float64")
            for each in ("vmap", engine)
        ]
        for name, tensor in runs[0].ensemble.weights.items():
            torch.testing.assert_close(runs[1].ensemble.weights[name], tensor, rtol=1e-7, atol=1e-9)


def test_statistics_are_kept_with_the_run_and_read_again(tmp_path):
    x, y = points()
    quick(data=(x, y), method=table("f-kde", "uniform"), out=tmp_path / "run", epochs=1)
    kept = shoal.core.storage.files.read_tensors(tmp_path / "run" / AXES)
    assert torch.equal(kept["points.low/x"], x.amin(0))
    assert torch.equal(kept["points.high/x"], x.amax(0))


def test_statistics_of_a_loader_are_those_of_its_data():
    x, y = points()
    sources = (x, y), DataLoader(TensorDataset(x, y), 7), [(x[:13], y[:13]), (x[13:], y[13:])]
    from shoal.data.batches.sources import batches_of
    from shoal.training.mover.prepare import prepared

    method = shoal.methods.get("f-kde", points="noise")
    found = [prepared(method, batches_of(s), None, torch.float64)[1] for s in sources]
    torch.testing.assert_close(found[0]["points.std/x"], x.double().std(0, correction=0))
    for each in found[1:]:
        torch.testing.assert_close(each, found[0])


@pytest.mark.parametrize("kind", KINDS)
def test_the_config_repeats_the_points(tmp_path, kind):
    run = quick(method=table("f-kde", kind), out=tmp_path / "run")
    again = shoal.load(tmp_path / "run", plain)
    assert again.config["method"]["name"] == "f-kde"
    spec = again.config["method"]["points"]
    assert spec["name"] == kind
    if kind in ("augmented", "unlabelled"):  # of the user's own: the folder does not hold them
        with pytest.raises(ConfigError) as caught:
            quick(method=again.config["method"])
        assert_one_sentence(caught.value)
        return
    repeated = quick(method=again.config["method"], strength=again.config["strength"])
    assert_equal_trees(repeated.ensemble.state, run.ensemble.state)


def test_a_composition_of_ones_own_keeps_its_points(tmp_path):
    repulsion = shoal.Repulsion(points=shoal.points.Noise(0.3))
    run = quick(method=repulsion, out=tmp_path / "run")
    spec = shoal.load(tmp_path / "run", plain).config["method"]
    assert spec["points"]["scale"] == 0.3
    assert_equal_trees(quick(method=spec).ensemble.state, run.ensemble.state)


def test_other_unlabelled_inputs_do_not_resume(tmp_path):
    given = table("f-kde", "unlabelled")
    quick(method=given, out=tmp_path / "run")
    other = {"name": "f-kde", "points": elsewhere(seed=6)}
    with pytest.raises(ConfigError, match="resume with the same settings"):
        quick(method=other, out=tmp_path / "run", resume=True)
    quick(method=given, out=tmp_path / "run", resume=True)


def test_unlabelled_inputs_come_in_every_form():
    pool, zeros = elsewhere(), torch.zeros(7)
    split = shoal.Split(pool, zeros.long())
    forms = {
        "tensor": pool,
        "array": pool.numpy(),
        "double": pool.double().numpy(),
        "loader": DataLoader(TensorDataset(pool, zeros), 3),
        "torch data set": TensorDataset(pool),
        "batches": [pool[:3], pool[3:]],
        "pairs": [(pool[:3], zeros[:3]), (pool[3:], zeros[3:])],
        "split": split,
        "dataset": shoal.Dataset("mine", split),
    }
    runs = {
        name: quick(method={"name": "f-kde", "points": shoal.points.Unlabelled(given)}, epochs=1)
        for name, given in forms.items()
    }
    digests = {name: run.config["method"]["points"]["sha256"] for name, run in runs.items()}
    assert len(set(digests.values())) == 1, digests
    for run in runs.values():
        assert_equal_trees(run.ensemble.state, runs["tensor"].ensemble.state)


@pytest.mark.parametrize(
    "pool", [torch.zeros(4, 5), torch.zeros(0, 3), {"a": torch.zeros(4, 3)}, torch.zeros(4, 3, 1)],
    ids=["other width", "none", "structure", "more axes"],
)  # fmt: skip
def test_inputs_of_another_kind_are_refused_in_a_sentence(pool):
    with pytest.raises(DataError) as caught:
        quick(method={"name": "f-kde", "points": shoal.points.Unlabelled(pool)})
    assert_one_sentence(caught.value)


def test_a_loader_of_unequal_shapes_is_refused():
    pool = [torch.zeros(4, 3), torch.zeros(4, 2)]
    with pytest.raises(DataError, match="one shape"):
        quick(method={"name": "f-kde", "points": shoal.points.Unlabelled(pool)})


def test_another_registered_data_set_in_the_shape_and_range_of_the_images(tmp_path):
    data = shoal.data.load({"name": "digits", "test_size": 1700})
    other = {"name": "digits", "seed": 3}
    run = shoal.fit(
        shoal.Ensemble.init(Blueprint(SmallCNN((4,)), data.input_shape, 10), 3),
        data, method={"name": "f-kde", "points": {"name": "dataset", "data": other, "count": 9}},
        epochs=1, progress=False, out=tmp_path / "run",
    )  # fmt: skip
    spec = shoal.load(tmp_path / "run").config["method"]["points"]
    assert spec["data"]["name"] == "digits" and spec["data"]["seed"] == 3 and spec["count"] == 9
    assert run.history[-1]["push"] > 0
    with pytest.raises(ConfigError, match="points 'dataset' need a data set"):
        quick(method={"name": "f-kde", "points": "dataset"})
    with pytest.raises(ConfigError, match="did you mean 'digits'"):
        quick(method={"name": "f-kde", "points": {"name": "dataset", "data": "digit"}})
    with pytest.raises(DataError, match="inputs of shape"):
        quick(method={"name": "f-kde", "points": {"name": "dataset", "data": "digits"}})


def test_a_data_set_of_ones_own_is_kept_by_its_digest():
    split = shoal.Split(elsewhere(), torch.zeros(7).long())
    run = quick(
        method={"name": "f-kde", "points": shoal.points.OtherData(shoal.Dataset("mine", split))}
    )
    assert run.config["method"]["points"]["sha256"]


@pytest.mark.parametrize("kind", ["noise", "mixup", "unlabelled"])
@pytest.mark.parametrize("method", METHODS)
def test_grown_members_are_compared_at_points(method, kind):
    run = quick(method=table(method, kind))
    given = {"method": table(method, kind)} if kind == "unlabelled" else {}
    grown = shoal.grow(run, 2, data=points(), progress=False, epochs=1, **given)
    assert grown.ensemble.members == 5 and grown.history[-1]["push"] > 0
    for name, tensor in run.ensemble.weights.items():
        assert torch.equal(grown.ensemble.weights[name][:3], tensor)
    if kind == "unlabelled":
        with pytest.raises(ConfigError, match="which no file or run stores"):
            shoal.grow(run, 2, data=points(), progress=False)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("method", METHODS)
def test_the_stepper_takes_the_steps_of_fit(method, kind):
    from shoal.data.batches.sources import ArrayBatches

    x, y = points()
    how = {"method": table(method, kind), "lr": 1e-2, "seed": 4}
    run = quick(data=(x, y), epochs=1, **how)
    stepper = shoal.Stepper(shoal_of(), n=len(x), inputs=x, **how)
    for batch in ArrayBatches(x, y, 10, seed=4).batches(0):
        stepper(batch)
    for name, tensor in run.ensemble.weights.items():
        torch.testing.assert_close(stepper.ensemble.weights[name], tensor, rtol=1e-5, atol=1e-6)


def test_the_stepper_asks_for_the_inputs_that_statistics_need():
    stepper = shoal.Stepper(shoal_of(), n=40, method={"name": "f-kde", "points": "noise"})
    with pytest.raises(ConfigError, match=r"Stepper\(..., inputs=x\)"):
        stepper(points())


def test_per_member_crops_are_refused():
    data = shoal.data.load({"name": "digits", "test_size": 1700})
    build = Blueprint(SmallCNN((4,)), data.input_shape, 10)
    with pytest.raises(ConfigError, match="leave per_member out"):
        shoal.fit(
            shoal.Ensemble.init(build, 3), data, method={"name": "f-kde", "points": "noise"},
            augment={"name": "crop-flip", "per_member": True}, epochs=1, progress=False,
        )  # fmt: skip
    crops = {"name": "crop-flip", "per_member": True}
    with pytest.raises(ConfigError, match="without per_member"):
        shoal.fit(
            shoal.Ensemble.init(build, 3), data, epochs=1, progress=False,
            method={"name": "f-kde", "points": {"name": "augmented", "augment": crops}},
        )  # fmt: skip


def test_augmented_images_by_name(tmp_path):
    data = shoal.data.load({"name": "digits", "test_size": 1700})
    crops = {"name": "crop-flip", "padding": 2}
    method = {"name": "f-kde", "points": {"name": "augmented", "augment": crops}}
    build = Blueprint(SmallCNN((4,)), data.input_shape, 10)
    how = {"epochs": 1, "progress": False}
    run = shoal.fit(shoal.Ensemble.init(build, 3), data, method=method, out=tmp_path / "run", **how)
    spec = shoal.load(tmp_path / "run").config["method"]
    assert spec["points"]["augment"]["padding"] == 2
    again = shoal.fit(shoal.Ensemble.init(build, 3), data, method=spec, **how)
    assert_equal_trees(again.ensemble.state, run.ensemble.state)


CONFIG = """
data = "toy-regression"
members = 3
epochs = 1
model = {name = "mlp", hidden = [8]}
method = {name = "f-kde", points = {name = "noise", scale = 0.5}}
"""


def test_points_in_a_config_file_and_on_the_command_line(tmp_path):
    path = tmp_path / "toy.toml"
    path.write_text(CONFIG)
    written = load_config(path)
    check_names(written)
    assert written.method["points"] == {"name": "noise", "scale": 0.5}
    wide = load_config(path, ["method.points.scale=2.0"])
    assert wide.method["points"]["scale"] == 2.0
    typed = load_config(path, ["method=f-sge", "method.points=mixup"])
    assert typed.method == {"name": "f-sge", "points": "mixup"}
    for config in (wide, typed):
        check_names(config)
        run = train(config, make_data(config), None, progress=False)
        assert run.config["method"]["points"]["name"] in ("noise", "mixup")
    for typo in ("method.points=nois", "method.points.scal=2.0", "method.point=noise"):
        with pytest.raises(ConfigError, match="did you mean"):
            check_names(load_config(path, [typo]))


def test_points_are_listed():
    listed = {entry.name: entry for entry in entries("points")}
    assert {"batch", "noise", "uniform", "mixup", "unlabelled", "augmented", "dataset"} == set(
        listed
    )
    assert all(entry.summary for entry in listed.values())


def test_adversarial_training_with_points():
    run = quick(method=table("f-kde", "noise"), adversarial=0.1)
    assert np.isfinite(run.history[-1]["loss"])
    with pytest.raises(ConfigError, match="weights are compared without inputs"):
        dataclasses.replace(shoal.methods.kde.repulsion, points="noise")


@pytest.mark.parametrize("form", ["legacy", "calibrated"])
def test_functional_priors_stay_at_the_batch(form):
    run = quick(method=table("f-kde", "mixup"), **{form: True})
    assert np.isfinite(run.history[-1]["loss"]) and run.history[-1]["push"] > 0
    assert run.config[form] and run.config["method"]["points"]["name"] == "mixup"


def test_a_grid_names_points_by_a_word():
    assert parse_method("f-kde+points=mixup").repulsion.points == shoal.points.Mixup()
    usual = {"name": "f-kde", "points": {"name": "noise", "scale": 1.0}}
    assert variant_of(usual).label == "f-kde+points=noise"
    assert (
        variant_of({"name": "f-kde", "points": {"name": "noise", "scale": 2.0}}).method == "custom"
    )
    with pytest.raises(ConfigError, match="did you mean 'mixup'"):
        parse_method("f-kde+points=mixpu")

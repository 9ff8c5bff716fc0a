"""What `assess` keeps equals what the metrics say directly."""

import math
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from shoal.core.errors import CheckpointCorrupt, DataError
from shoal.core.files import read_json, write_json
from shoal.data.dataset import Dataset, Scaling, Split
from shoal.evaluation.scores import evaluate_run, load_evaluation, recognised
from shoal.inference.ensemble import Ensemble
from shoal.inference.likelihoods import Categorical, Gaussian
from shoal.prediction import evaluate, metrics, predict

MEMBERS, CLASSES = 4, 3


@dataclass
class Trained:
    ensemble: Any
    likelihood: Any
    folder: Path | None = None
    config: dict = field(default_factory=dict)


def images(n, seed):
    return torch.rand(n, 1, 4, 4, generator=torch.Generator().manual_seed(seed))


def labels(n):
    return torch.arange(n) % CLASSES


@pytest.fixture(scope="module")
def pictures():
    return Dataset(
        "pictures",
        train=Split(images(20, 0), labels(20)),
        test=Split(images(40, 1), labels(40)),
        shifts={"darker-2": Split(images(40, 1) / 2, labels(40))},
        ood={"noise": Split(5 * images(30, 2))},
        classes=("a", "b", "c"),
    )


def network():
    return nn.Sequential(nn.Flatten(), nn.Linear(16, CLASSES))


@pytest.fixture(scope="module")
def classifier():
    return Trained(Ensemble.init(network, MEMBERS, seed=0), Categorical())


@pytest.fixture(scope="module")
def judged(classifier, pictures):
    return evaluate_run(classifier, pictures, gallery=5)


def test_scores_are_those_of_the_metrics(classifier, pictures, judged):
    test = predict(classifier, pictures.test)
    assert judged.test == evaluate(test, pictures.test.y)
    shifted = predict(classifier, pictures.shifts["darker-2"])
    assert judged.shifts["darker-2"] == evaluate(shifted, labels(40))


def test_scores_of_standardised_targets_are_told_in_their_units():
    x = images(30, 3).flatten(1)
    data = Dataset("pans", Split(x, x[:, 0]), Split(x, x[:, 0]), scaling=Scaling(20.0, 4.0))
    run = Trained(Ensemble.init(lambda: nn.Linear(16, 1), MEMBERS, seed=0), Gaussian())
    direct = evaluate(predict(run, x), x[:, 0])
    told = evaluate_run(run, data).test
    assert told["rmse"] == pytest.approx(4 * direct["rmse"])
    assert told["nll"] == pytest.approx(direct["nll"] + math.log(4))
    assert told["coverage_90"] == direct["coverage_90"]


def test_foreign_scores_are_those_of_the_metrics(classifier, pictures, judged):
    test, ood = predict(classifier, pictures.test), predict(classifier, pictures.ood["noise"])
    found = judged.ood["noise"]
    both = evaluate(test, pictures.test.y, ood)
    told = {name for name in both if metrics.registry[name].ood}
    assert told
    assert {name: found[name] for name in told} == {name: both[name] for name in told}
    assert found["entropy"] == pytest.approx(float(ood.entropy().mean()))
    assert found["recognised"] == recognised(test.entropy(), ood.entropy())


def test_samples_are_those_of_the_prediction(classifier, pictures, judged):
    pred, part = predict(classifier, pictures.test), judged.split_samples("test")
    for name in ("entropy", "mutual_information", "disagreement", "confidence"):
        torch.testing.assert_close(part[name], getattr(pred, name)().float())
        assert part[name].dtype == torch.float32
    assert torch.equal(part["prediction"], pred.labels())
    assert torch.equal(part["label"], pictures.test.y)
    torch.testing.assert_close(part["pairwise"], metrics.pairwise_disagreement(pred).float())
    right = (pred.member_probs().argmax(-1) == labels(40)).float().mean(-1)
    torch.testing.assert_close(part["member_accuracy"], right)
    assert "label" not in judged.split_samples("ood:noise")


def test_curves_come_back_as_they_went(classifier, pictures, judged):
    pred = predict(classifier, pictures.test)
    kept, direct = judged.reliability("test"), metrics.reliability(pred, pictures.test.y)
    assert kept is not None
    assert kept.error == pytest.approx(direct.error)
    torch.testing.assert_close(kept.count, direct.count.float())
    above = judged.accuracy_confidence("test")
    assert above is not None
    direct = metrics.accuracy_confidence(pred, pictures.test.y)
    torch.testing.assert_close(above.retained, direct.retained.float())
    assert judged.reliability("ood:noise") is None
    assert judged.accuracy_confidence("no such part") is None


@pytest.mark.parametrize("part", ["test", "ood:noise"])
@pytest.mark.parametrize("measure", ["disagreement", "entropy", "confidence"])
def test_galleries_hold_the_extremes(pictures, judged, part, measure):
    values = judged.samples[f"{part}/{measure}"]
    ordered = values.sort().values
    for end, wanted in (("low", ordered[:5]), ("high", ordered.flip(0)[:5])):
        key = f"{part}/gallery/{measure}/{end}"
        index = judged.samples[f"{key}/index"]
        torch.testing.assert_close(values[index], wanted)
        pixels = judged.samples[key]
        assert pixels.dtype == torch.uint8
        x = (pictures.test if part == "test" else pictures.ood["noise"]).x
        expected = 255 * (x[index] - x.min()) / (x.max() - x.min())
        torch.testing.assert_close(pixels.float(), expected, atol=0.51, rtol=0)


def test_no_gallery_when_none_is_asked_for(classifier, pictures):
    found = evaluate_run(classifier, pictures, gallery=0)
    assert not any("gallery" in name for name in found.samples)


def test_data_are_described(judged):
    facts = judged.scores["data"]
    assert facts["task"] == judged.task == "classification"
    assert facts["inputs"] == "images"
    assert facts["classes"] == ["a", "b", "c"]
    assert facts["counts"] == {"test": 40, "shift:darker-2": 40, "ood:noise": 30}


def test_folder_gives_back_what_was_kept(classifier, pictures, tmp_path):
    run = Trained(classifier.ensemble, classifier.likelihood, tmp_path)
    kept = evaluate_run(run, pictures, gallery=2)
    found = load_evaluation(tmp_path)
    assert found is not None
    assert found.scores.keys() == kept.scores.keys()
    for name, value in kept.test.items():
        assert found.test[name] == value or (math.isnan(value) and math.isnan(found.test[name]))
    assert found.samples.keys() == kept.samples.keys()
    for name, tensor in kept.samples.items():
        torch.testing.assert_close(found.samples[name], tensor, rtol=0, atol=0, equal_nan=True)
    assert set(read_json(tmp_path / "scores.json")) >= {"data", "test", "shifts", "ood"}


def test_numbers_that_are_none_come_back_as_nan(classifier, pictures, tmp_path):
    alone = Trained(Ensemble.init(network, 1, seed=0), Categorical(), tmp_path)
    assert math.isnan(evaluate_run(alone, pictures).ood["noise"]["disagreement_ratio"])
    found = load_evaluation(tmp_path)
    assert found is not None
    assert math.isnan(found.ood["noise"]["disagreement_ratio"])


def test_nothing_kept_is_none(tmp_path):
    assert load_evaluation(tmp_path) is None


def test_scores_remain_where_samples_were_left_behind(judged, tmp_path):
    judged.save(tmp_path)
    (tmp_path / "samples.safetensors").unlink()
    found = load_evaluation(tmp_path)
    assert found is not None
    assert found.test == judged.test
    assert found.split_samples("test") == {} and found.reliability("test") is None


@pytest.mark.parametrize("content", [[], {"test": {}}, {"data": {}, "test": {}, "shifts": 1}])
def test_another_file_of_that_name_is_refused(judged, tmp_path, content):
    judged.save(tmp_path)
    write_json(tmp_path / "scores.json", content)
    with pytest.raises(CheckpointCorrupt, match="shoal evaluate"):
        load_evaluation(tmp_path)


def test_a_labelled_test_part_is_needed(classifier, pictures):
    bare = Dataset("bare", train=pictures.train, test=Split(pictures.test.x))
    with pytest.raises(DataError, match="no labelled test part"):
        evaluate_run(classifier, bare)


@pytest.mark.parametrize("alarms", [0.05, 0.2])
def test_recognised_raises_no_more_alarms_than_allowed(alarms):
    random = torch.Generator().manual_seed(1)
    test, ood = torch.randn(77, generator=random), 1 + torch.randn(55, generator=random)
    share = recognised(test, ood, alarms)
    levels = torch.cat([test, ood]).sort().values
    best = max(
        float((ood > level).double().mean())
        for level in levels
        if float((test > level).double().mean()) <= alarms
    )
    assert share == best


def test_recognised_of_equal_scores_is_nothing():
    assert recognised(torch.zeros(10), torch.zeros(10)) == 0
    assert recognised(torch.zeros(10), torch.ones(10)) == 1


@pytest.fixture(scope="module")
def line():
    x = torch.linspace(-1, 1, 50).unsqueeze(-1)
    return Dataset(
        "line",
        train=Split(x[::2], x[::2, 0]),
        test=Split(x, x[:, 0]),
        ood={"far": Split(10 + x)},
    )


def test_regression_keeps_curve_and_intervals(line):
    run = Trained(Ensemble.init(lambda: nn.Linear(1, 1), MEMBERS, seed=0), Gaussian(0.1))
    found, pred = evaluate_run(run, line), predict(run, line.test)
    assert found.task == "regression"
    assert found.test == evaluate(pred, line.test.y)
    part = found.split_samples("test")
    torch.testing.assert_close(part["mean"], pred.mean.squeeze(-1))
    torch.testing.assert_close(part["stddev"], pred.stddev.squeeze(-1))
    torch.testing.assert_close(part["y"], line.test.y)
    torch.testing.assert_close(part["x"], line.test.x.squeeze(-1))
    torch.testing.assert_close(part["pit"], metrics.pit(pred, line.test.y).float().squeeze(-1))
    torch.testing.assert_close(part["affinity"], metrics.affinity(pred).float())
    torch.testing.assert_close(found.samples["train/x"], line.train.x)
    assert "y" not in found.split_samples("ood:far")


def test_several_targets_keep_their_columns():
    x = torch.rand(30, 5, generator=torch.Generator().manual_seed(0))
    data = Dataset("wide", train=Split(x, x[:, :2]), test=Split(x, x[:, :2]))
    run = Trained(Ensemble.init(lambda: nn.Linear(5, 2), MEMBERS, seed=0), Gaussian())
    part = evaluate_run(run, data).split_samples("test")
    assert part["mean"].shape == part["stddev"].shape == part["y"].shape == (30, 2)
    assert "x" not in part


def test_classes_in_the_plane_get_a_map_of_their_entropy():
    x = torch.randn(30, 2, generator=torch.Generator().manual_seed(0))
    data = Dataset("plane", train=Split(x, labels(30)), test=Split(x, labels(30)))
    run = Trained(Ensemble.init(lambda: nn.Linear(2, CLASSES), MEMBERS, seed=0), Categorical())
    part = evaluate_run(run, data).split_samples("plane")
    across, up, entropy = part["across"], part["up"], part["entropy"]
    assert across[0] < x[:, 0].min()
    assert up[-1] > x[:, 1].max()
    corner = predict(run, torch.stack([across[3], up[7]]).unsqueeze(0)).entropy()
    torch.testing.assert_close(entropy[7, 3], corner[0])


def test_standardised_targets_are_judged_in_their_own_units():
    x = torch.linspace(-1, 1, 40).unsqueeze(-1)
    z, scaling = x[:, 0] ** 2, Scaling(mean=100.0, std=7.0)
    plain = Dataset("line", train=Split(x, z), test=Split(x, z), ood={"far": Split(9 + x)})
    run = Trained(Ensemble.init(lambda: nn.Linear(1, 1), MEMBERS, seed=0), Gaussian(0.3))
    bare, told = evaluate_run(run, plain), evaluate_run(run, replace(plain, scaling=scaling))
    assert told.test["rmse"] == pytest.approx(7 * bare.test["rmse"], rel=1e-5)
    assert told.test["nll"] == pytest.approx(bare.test["nll"] + math.log(7), rel=1e-5)
    for name in ("test/mean", "test/y", "train/y"):
        torch.testing.assert_close(told.samples[name], 100 + 7 * bare.samples[name])
    torch.testing.assert_close(told.samples["test/stddev"], 7 * bare.samples["test/stddev"])
    assert told.ood["far"]["auroc_variance"] == pytest.approx(bare.ood["far"]["auroc_variance"])

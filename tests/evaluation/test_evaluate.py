"""The stored evaluation equals the metrics computed directly."""

import math
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from shoal.core.errors import CheckpointCorrupt, DataError
from shoal.core.storage.files import read_json, write_json
from shoal.data.dataset import Dataset, Scaling, Split
from shoal.evaluation.evaluate import detected_share, evaluate_run, load_evaluation
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
def evaluation(classifier, pictures):
    return evaluate_run(classifier, pictures, gallery=5)


def test_scores_are_those_of_the_metrics(classifier, pictures, evaluation):
    test = predict(classifier, pictures.test)
    assert evaluation.test == evaluate(test, pictures.test.y)
    shifted = predict(classifier, pictures.shifts["darker-2"])
    assert evaluation.shifts["darker-2"] == evaluate(shifted, labels(40))


def test_scores_of_standardised_targets_are_told_in_their_units():
    x = images(30, 3).flatten(1)
    data = Dataset("pans", Split(x, x[:, 0]), Split(x, x[:, 0]), scaling=Scaling(20.0, 4.0))
    run = Trained(Ensemble.init(lambda: nn.Linear(16, 1), MEMBERS, seed=0), Gaussian())
    direct = evaluate(predict(run, x), x[:, 0])
    told = evaluate_run(run, data).test
    assert told["rmse"] == pytest.approx(4 * direct["rmse"])
    assert told["nll"] == pytest.approx(direct["nll"] + math.log(4))
    assert told["coverage_90"] == direct["coverage_90"]


def test_ood_scores_are_those_of_the_metrics(classifier, pictures, evaluation):
    test, ood = predict(classifier, pictures.test), predict(classifier, pictures.ood["noise"])
    found = evaluation.ood["noise"]
    both = evaluate(test, pictures.test.y, ood)
    told = {name for name in both if metrics.registry[name].ood}
    assert told
    assert {name: found[name] for name in told} == {name: both[name] for name in told}
    assert found["entropy"] == pytest.approx(float(ood.entropy().mean()))
    assert found["recognised"] == detected_share(test.entropy(), ood.entropy())


def test_samples_are_those_of_the_prediction(classifier, pictures, evaluation):
    pred, split = predict(classifier, pictures.test), evaluation.split_samples("test")
    for name in ("entropy", "mutual_information", "disagreement", "confidence"):
        torch.testing.assert_close(split[name], getattr(pred, name)().float())
        assert split[name].dtype == torch.float32
    assert torch.equal(split["prediction"], pred.labels())
    assert torch.equal(split["label"], pictures.test.y)
    torch.testing.assert_close(split["pairwise"], metrics.pairwise_disagreement(pred).float())
    right = (pred.member_probs().argmax(-1) == labels(40)).float().mean(-1)
    torch.testing.assert_close(split["member_accuracy"], right)
    assert "label" not in evaluation.split_samples("ood:noise")


def test_curves_come_back_as_they_went(classifier, pictures, evaluation):
    pred = predict(classifier, pictures.test)
    kept, direct = evaluation.reliability("test"), metrics.reliability(pred, pictures.test.y)
    assert kept is not None
    assert kept.error == pytest.approx(direct.error)
    torch.testing.assert_close(kept.count, direct.count.float())
    above = evaluation.accuracy_confidence("test")
    assert above is not None
    direct = metrics.accuracy_confidence(pred, pictures.test.y)
    torch.testing.assert_close(above.retained, direct.retained.float())
    assert evaluation.reliability("ood:noise") is None
    assert evaluation.accuracy_confidence("no such split") is None


@pytest.mark.parametrize("split", ["test", "ood:noise"])
@pytest.mark.parametrize("measure", ["disagreement", "entropy", "confidence"])
def test_galleries_hold_the_extremes(pictures, evaluation, split, measure):
    values = evaluation.samples[f"{split}/{measure}"]
    ordered = values.sort().values
    for end, wanted in (("low", ordered[:5]), ("high", ordered.flip(0)[:5])):
        key = f"{split}/gallery/{measure}/{end}"
        index = evaluation.samples[f"{key}/index"]
        torch.testing.assert_close(values[index], wanted)
        pixels = evaluation.samples[key]
        assert pixels.dtype == torch.uint8
        x = (pictures.test if split == "test" else pictures.ood["noise"]).x
        expected = 255 * (x[index] - x.min()) / (x.max() - x.min())
        torch.testing.assert_close(pixels.float(), expected, atol=0.51, rtol=0)


def test_no_gallery_when_none_is_asked_for(classifier, pictures):
    found = evaluate_run(classifier, pictures, gallery=0)
    assert not any("gallery" in name for name in found.samples)


def test_data_are_described(evaluation):
    facts = evaluation.scores["data"]
    assert facts["task"] == evaluation.task == "classification"
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


def test_scores_remain_where_samples_were_left_behind(evaluation, tmp_path):
    evaluation.save(tmp_path)
    (tmp_path / "samples.safetensors").unlink()
    found = load_evaluation(tmp_path)
    assert found is not None
    assert found.test == evaluation.test
    assert found.split_samples("test") == {} and found.reliability("test") is None


@pytest.mark.parametrize("content", [[], {"test": {}}, {"data": {}, "test": {}, "shifts": 1}])
def test_another_file_of_that_name_is_refused(evaluation, tmp_path, content):
    evaluation.save(tmp_path)
    write_json(tmp_path / "scores.json", content)
    with pytest.raises(CheckpointCorrupt, match="shoal evaluate"):
        load_evaluation(tmp_path)


def test_a_labelled_test_part_is_needed(classifier, pictures):
    bare = Dataset("bare", train=pictures.train, test=Split(pictures.test.x))
    with pytest.raises(DataError, match="no labelled test set"):
        evaluate_run(classifier, bare)


@pytest.mark.parametrize("alarms", [0.05, 0.2])
def test_detection_keeps_the_false_positive_rate(alarms):
    random = torch.Generator().manual_seed(1)
    test, ood = torch.randn(77, generator=random), 1 + torch.randn(55, generator=random)
    share = detected_share(test, ood, alarms)
    levels = torch.cat([test, ood]).sort().values
    best = max(
        float((ood > level).double().mean())
        for level in levels
        if float((test > level).double().mean()) <= alarms
    )
    assert share == best


def test_equal_scores_are_not_detected():
    assert detected_share(torch.zeros(10), torch.zeros(10)) == 0
    assert detected_share(torch.zeros(10), torch.ones(10)) == 1


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
    split = found.split_samples("test")
    torch.testing.assert_close(split["mean"], pred.mean.squeeze(-1))
    torch.testing.assert_close(split["stddev"], pred.stddev.squeeze(-1))
    torch.testing.assert_close(split["y"], line.test.y)
    torch.testing.assert_close(split["x"], line.test.x.squeeze(-1))
    torch.testing.assert_close(split["pit"], metrics.pit(pred, line.test.y).float().squeeze(-1))
    torch.testing.assert_close(split["affinity"], metrics.affinity(pred).float())
    torch.testing.assert_close(found.samples["train/x"], line.train.x)
    assert "y" not in found.split_samples("ood:far")


def test_several_targets_keep_their_columns():
    x = torch.rand(30, 5, generator=torch.Generator().manual_seed(0))
    data = Dataset("wide", train=Split(x, x[:, :2]), test=Split(x, x[:, :2]))
    run = Trained(Ensemble.init(lambda: nn.Linear(5, 2), MEMBERS, seed=0), Gaussian())
    split = evaluate_run(run, data).split_samples("test")
    assert split["mean"].shape == split["stddev"].shape == split["y"].shape == (30, 2)
    assert "x" not in split


def test_classes_in_the_plane_get_a_map_of_their_entropy():
    x = torch.randn(30, 2, generator=torch.Generator().manual_seed(0))
    data = Dataset("plane", train=Split(x, labels(30)), test=Split(x, labels(30)))
    run = Trained(Ensemble.init(lambda: nn.Linear(2, CLASSES), MEMBERS, seed=0), Categorical())
    split = evaluate_run(run, data).split_samples("plane")
    across, up, entropy = split["across"], split["up"], split["entropy"]
    assert across[0] < x[:, 0].min()
    assert up[-1] > x[:, 1].max()
    corner = predict(run, torch.stack([across[3], up[7]]).unsqueeze(0)).entropy()
    torch.testing.assert_close(entropy[7, 3], corner[0])


def test_an_evaluation_shows_its_scores_and_escapes_its_names(picture_runs):
    _, found = picture_runs[0]
    data = found.scores["data"] | {"name": "<i>mine</i>"}
    named = replace(found, scores=found.scores | {"data": data})
    assert "<i>mine" not in named._repr_html_() and "turned-1, turned-2" in named._repr_html_()
    assert f"nll {found.test['nll']:.4g}" in repr(found) and "2 shifts" in repr(found)


def test_standardised_targets_are_evaluated_in_their_own_units():
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

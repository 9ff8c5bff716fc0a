"""A prediction has the shape of the targets: [N] where targets were [N], [N, 1] where [N, 1]."""

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import shoal
from shoal.core.errors import ConfigError, DataError
from shoal.data.dataset import Dataset, Split
from shoal.prediction.predictive import Predictive

N, M = 24, 3

WIDTHS = {
    "gaussian": 1,
    "homoscedastic": 1,
    "heteroscedastic": 2,
    "student-t": 2,
    "mixture-density": 9,
    "poisson": 1,
    "negative-binomial": 2,
    "bernoulli": 1,
}


def inputs(n: int = N) -> Tensor:
    return torch.linspace(-1, 1, 2 * n).view(n, 2)


def targets(name: str = "gaussian") -> Tensor:
    x = inputs()
    if name in ("poisson", "negative-binomial"):
        return (3 * (x[:, 0] + 1)).floor()
    if name == "bernoulli":
        return (x[:, 0] > 0).float()
    return x[:, 0] + 0.1 * torch.sin(20 * x[:, 1])


def trained(y: object, width: int = 1, data: object = None, **options: object) -> shoal.Run:
    ensemble = shoal.Ensemble.init(lambda: nn.Linear(2, width), members=M, seed=0)
    given = (inputs(), y) if data is None else data
    settings = {"method": "ensemble", "epochs": 2, "progress": False, **options}
    return shoal.fit(ensemble, given, **settings)  # pyright: ignore[reportArgumentType]


def quantities(pred: Predictive) -> dict[str, Tensor]:
    """Everything of a prediction that lies in the space of the targets, without leading axes."""
    found = {"mean": pred.mean, "stddev": pred.stddev, "variance": pred.variance}
    found |= {"sample": pred.sample(2, seed=0)[1], "member": pred.member_means[0]}
    if "numbers" in pred.likelihood.about.kinds:
        found |= {"moment": pred.moments()[1][0], "quantile": pred.quantile([0.1, 0.5])[1]}
        found |= dict(zip(("low", "high"), pred.interval(0.8), strict=True))
        y = pred.mean.round()
        found["cdf"] = pred.cdf(y)
        for score in ("cqr", "scaled", "absolute"):
            rule = shoal.decisions.conformal_intervals(pred, y, 0.5, score=score)
            found[f"{score} low"], found[f"{score} high"] = rule(pred)
    return found


@pytest.mark.parametrize("name", WIDTHS)
def test_quantities_have_the_shape_of_the_targets(name: str, monkeypatch) -> None:
    monkeypatch.setattr("shoal.prediction.mixture._HALVINGS", 12)
    y, width = targets(name), WIDTHS[name]
    flat = quantities(shoal.predict(trained(y, width, likelihood=name), inputs())[:2])
    column = quantities(shoal.predict(trained(y[:, None], width, likelihood=name), inputs())[:2])
    for key, value in flat.items():
        assert value.shape == (2,), key
        assert column[key].shape == (2, 1), key
        torch.testing.assert_close(column[key][:, 0], value)


def test_several_columns_stay() -> None:
    y = torch.stack([targets(), -targets()], 1)
    pred = shoal.predict(trained(y, 2), inputs())
    assert {value.shape for value in quantities(pred).values()} == {(N, 2)}


def test_whole_numbers_in_a_column_stay_a_column() -> None:
    """Labels [N, 1] are trained as [N], and predicted as [N, 1]."""
    for name in ("poisson", "bernoulli"):
        y = targets(name).long()
        for given, shape in ((y, (N,)), (y[:, None], (N, 1)), (y[:, None].numpy(), (N, 1))):
            assert shoal.predict(trained(given, likelihood=name), inputs()).mean.shape == shape


def test_the_lines_that_everybody_writes_equal_evaluate() -> None:
    y = targets()
    pred = shoal.predict(trained(y, lr=0.1), inputs())
    low, high = pred.interval(0.9)
    scores = shoal.evaluate(pred, y)
    assert float(((y >= low) & (y <= high)).float().mean()) == pytest.approx(scores["coverage_90"])
    assert float(((pred.mean - y) ** 2).mean().sqrt()) == pytest.approx(scores["rmse"])
    assert pred.mean.numpy().shape == y.numpy().shape


class Stream(IterableDataset):
    def __iter__(self):
        return iter(zip(inputs(), targets(), strict=True))


def _sources() -> dict[str, object]:
    import pandas

    x, y = inputs(), targets()
    frame = pandas.DataFrame(x.numpy(), columns=["a", "b"])
    return {
        "tensors": (x, y),
        "arrays": (x.numpy(), y.numpy()),
        "lists": (x.tolist(), y.tolist()),
        "frame": (frame, pandas.Series(y.numpy())),
        "Dataset": Dataset("mine", Split(x, y)),
        "Split": Split(x, y),
        "weighted": (x, y, torch.ones(N)),
        "dict": {"input": x, "labels": y},
        "TensorDataset": TensorDataset(x, y),
        "loader": DataLoader(TensorDataset(x, y), 8),
        "list of batches": [(x[:8], y[:8]), (x[8:], y[8:])],
        "stream": Stream(),
    }


@pytest.mark.parametrize("kind", _sources())
def test_every_kind_of_data_keeps_the_shape(kind: str) -> None:
    pred = shoal.predict(trained(None, data=_sources()[kind], likelihood="gaussian"), inputs())
    assert pred.mean.shape == (N,) and pred.interval()[0].shape == (N,)


def test_a_frame_with_one_column_of_targets_keeps_its_column() -> None:
    pandas = pytest.importorskip("pandas")
    y = pandas.DataFrame({"y": targets().numpy()})
    assert shoal.predict(trained(y), inputs()).mean.shape == (N, 1)


def test_the_shape_is_kept_in_the_folder_and_in_prediction_files(tmp_path) -> None:
    run = trained(targets(), out=tmp_path / "run")
    loaded = shoal.load(tmp_path / "run", lambda: nn.Linear(2, 1))
    assert loaded.target_shape == run.target_shape == ()
    direct = shoal.predict(loaded, inputs())
    streamed = shoal.predict(loaded, DataLoader(inputs(), 7), out=tmp_path / "a.safetensors")
    direct.save(tmp_path / "b.safetensors")
    for pred in (streamed, *(Predictive.load(tmp_path / f"{n}.safetensors") for n in "ab")):
        assert torch.equal(pred.mean, direct.mean) and pred.mean.shape == (N,)
    assert direct[3:7].mean.shape == (4,) and direct[0].mean.shape == (1,)
    assert Predictive.concat([direct, direct]).mean.shape == (2 * N,)
    assert [*direct.to_frame()] == ["mean", "stddev", "low", "high"]


def test_a_run_without_the_record_keeps_a_column() -> None:
    run = trained(targets())
    del run.provenance["target_shape"]
    assert shoal.predict(run, inputs()).mean.shape == (N, 1)
    assert shoal.predict(run.ensemble, inputs(), likelihood=run.likelihood).mean.shape == (N, 1)


def test_adopted_grown_and_stepped_members_keep_the_shape() -> None:
    run = trained(targets())
    adopted = shoal.adopt(list(run.ensemble), likelihood="gaussian", data=(inputs(), targets()))
    assert shoal.predict(adopted, inputs()).mean.shape == (N,)
    stepper = shoal.Stepper(shoal.Ensemble.init(lambda: nn.Linear(2, 1), members=2), n=N)
    stepper((inputs(), targets()))
    assert shoal.predict(stepper, inputs()).mean.shape == (N,)


def test_tokens_have_the_shape_of_their_targets() -> None:
    x = torch.linspace(-1, 1, N * 5 * 2).view(N, 5, 2)
    flat = trained(None, data=(x, x[..., 0].clone()))
    column = trained(None, data=(x, x[..., :1].clone()))
    rule = shoal.decisions.conformal_intervals(shoal.predict(flat, x), x[..., 0])
    assert shoal.predict(flat, x).mean.shape == rule(shoal.predict(flat, x))[0].shape == (N, 5)
    assert shoal.predict(column, x).mean.shape == (N, 5, 1)


@pytest.mark.parametrize("column", [False, True])
def test_targets_with_and_without_a_column_score_alike(column: bool) -> None:
    y = targets()
    pred = shoal.predict(trained(y[:, None] if column else y), inputs())
    flat, same = shoal.evaluate(pred, y), shoal.evaluate(pred, y[:, None].numpy())
    assert flat == same
    for name in shoal.metrics.registry:
        metric = shoal.metrics.registry[name]
        if metric.fits(pred) and not metric.ood:
            assert metric(pred, y) == metric(pred, y[:, None]) == flat[name]


def test_targets_that_would_only_broadcast_are_refused() -> None:
    pred = shoal.predict(trained(targets()), inputs())
    for shape in ((N, 1, 1), (N, 2), (N, N), (1,), (1, N), (1, 1), (N, 0)):
        with pytest.raises(DataError):
            shoal.evaluate(pred, torch.zeros(shape))
    tokens = Predictive(torch.zeros(M, N, 5, 1), shoal.likelihoods.Gaussian())
    for shape in ((N, 1), (N, 1, 1), (N,), (N, 5, 2), (5, N)):
        with pytest.raises(DataError):
            shoal.evaluate(tokens, torch.zeros(shape))
    words = Predictive(torch.zeros(M, N, 5, 2), shoal.likelihoods.Categorical())
    with pytest.raises(DataError):
        shoal.evaluate(words, torch.zeros(N, 1).long())


def test_a_list_of_levels_adds_an_axis_in_front() -> None:
    pred = shoal.predict(trained(targets()), inputs())
    for levels in ([0.1, 0.9], (0.1, 0.9), np.array([0.1, 0.9]), torch.tensor([0.1, 0.9])):
        assert pred.quantile(levels).shape == (2, N)
    both = torch.stack([pred.quantile(0.1), pred.quantile(0.9)])
    assert torch.equal(pred.quantile([0.1, 0.9]), both)
    assert pred.quantile([0.5]).shape == (1, N)
    for wrong in ([], [0.1, 1.0], 0.0):
        with pytest.raises(ConfigError):
            pred.quantile(wrong)


def test_a_large_prediction_is_worked_on_in_blocks(monkeypatch) -> None:
    monkeypatch.setattr("shoal.prediction.mixture._HALVINGS", 12)
    pred = shoal.predict(trained(targets()), inputs())
    whole = quantities(pred[:5])
    monkeypatch.setattr("shoal.prediction.mixture._BLOCK", 7)
    for name, value in quantities(pred[:5]).items():
        torch.testing.assert_close(value, whole[name])


def test_a_metric_of_ones_own_gets_columns_on_both_sides() -> None:
    pred, y = shoal.predict(trained(targets()), inputs()), targets()
    seen = shoal.metrics.registry["rmse"].function(pred, y)
    absolute = shoal.prediction.metrics.metric.of_points(
        lambda pred, y: float((pred.mean - y).square().mean().sqrt())
    )
    assert absolute(pred, y) == pytest.approx(seen)

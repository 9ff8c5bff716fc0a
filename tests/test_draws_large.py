"""The study of draws of a residual network: SWAG's law, and the ensemble that takes as long."""

import importlib.util
import sys

import numpy as np
import pytest
import torch
from torch import nn

import shoal
from studies import draws_large as study


def test_swag_has_the_covariance_of_the_paper():
    points = torch.randn(5, 2, 3, generator=torch.manual_seed(0))
    made = study.normal_law({"a": points[..., :1], "b": points[..., 1:]}, 50_000, seed=1)
    drawn = torch.cat([made["a"], made["b"]], -1)
    for member in range(2):
        away = points[:, member] - points[:, member].mean(0)
        expected = away.square().mean(0).diag() / 2 + away.mT @ away / 8
        torch.testing.assert_close(drawn[:, member].mT.cov(), expected, rtol=0, atol=0.05)
        torch.testing.assert_close(
            drawn[:, member].mean(0), points[:, member].mean(0), rtol=0, atol=0.05
        )


def test_chains_at_almost_no_temperature_are_sgd(monkeypatch):
    x = torch.randn(40, 3, generator=torch.manual_seed(0))
    sgd = {"optimizer": {"name": "sgd", "momentum": 0.9}, "lr": 0.1, "batch_size": 10}
    settings = {"method": "ensemble", "likelihood": "categorical", "progress": False, **sgd}
    run = shoal.fit(
        shoal.Ensemble.init(lambda: nn.Linear(3, 2), 2), (x, x[:, 0] > 0), steps=1, **settings
    )
    monkeypatch.setattr(study, "DRAWS", 2)
    monkeypatch.setattr(study, "BATCH", 10)
    cold = {"temperature": 1e-10, "rate": 0.1, "schedule": "constant"}
    made = study.chains(run, 0, 12, cold)  # four steps of warm-up, then eight
    again = shoal.fit(run.ensemble, (x, x[:, 0] > 0), steps=12, **settings)
    for name, tensor in made.ensemble.weights.items():
        torch.testing.assert_close(tensor[2:], again.ensemble.weights[name], rtol=1e-3, atol=1e-4)


def row(part, model, networks, nll, seconds, seed="0"):
    known = {"part": part, "seed": seed, "model": model, "networks": str(networks)}
    numbers = dict.fromkeys(study.HEADER[5:9], "0.5") | {"nll": str(nll)}
    return known | numbers | {"seconds": str(seconds)}


def test_a_model_is_compared_with_as_many_seconds_of_members():
    rows = [row("ensemble", "points", m, 1 / m, 2.0 * m) for m in range(1, study.POOL + 1)]
    rows += [row("whole", "draws", 80, 0.1, 11.0), row("heads", "draws", 80, 0.1, 999.0)]
    both = [each | {"seed": seed} for each in rows for seed in ("0", "1")]
    told = study.page(both, [])
    assert "| whole | draws | 6 | 2 | -0.0667" in told
    assert f"| heads | draws | {study.POOL} | 2 | -0.0250" in told


def test_the_page_says_what_is_decided_and_what_is_missing():
    rows = []
    for seed, away in (("0", 0.010), ("1", 0.011), ("2", 0.012)):
        rows += [row("ensemble", "points", m, 0.5, m, seed) for m in range(1, study.POOL + 1)]
        rows += [row("whole", "draws", 80, 0.5 - away, 4.0, seed)]
        rows += [row("whole", "swag", 80, 0.5 + away, 4.0, seed)]
    rows += [row("heads", "draws", 80, 0.4, 4.0)]
    tried = {"part": "whole", "model": "draws"} | dict.fromkeys(study.TRIED[2:], "1")
    told = study.page(rows, [tried])
    assert (
        "is lower for whole, draws, and higher for whole, swag, and not decided for heads, draws."
        in told
    )
    assert "- One seed: heads, draws.\n" in told
    assert "- No row: last blocks, draws;" in told
    assert f"- Settings: 1 of {len(study.settings('whole'))} were tried for whole, draws." in told


@pytest.fixture
def tiny(monkeypatch, tmp_path):
    """The study with few random images and few steps."""
    small = {"POOL": 4, "BATCH": 8, "EPOCHS": 1, "DRAWS": 2, "STEPS": 24, "IMAGES": 3}
    small |= {"HEATS": (0.1,), "RATES": {"draws": (0.02,), "swag": (0.02,)}}
    small |= {"PARTS": ("last blocks", "heads")}
    for name, value in small.items():
        monkeypatch.setattr(study, name, value)
    monkeypatch.setattr(study, "REFIT", {"epochs": 1, "lr": 0.01})
    numbers = np.random.default_rng(0)
    arrays = {f"{name}_x": numbers.integers(256, size=(16, 28, 28)) for name in study.SIZES}
    arrays |= {f"{name}_y": np.arange(16) % 10 for name in study.SIZES}
    np.savez(tmp_path / "images.npz", **arrays)
    given = ["--data", str(tmp_path / "images.npz"), "--out", str(tmp_path / "out")]

    def call(what, *more):
        monkeypatch.setattr(sys, "argv", ["draws_large", what, *given, *more])
        study.main()
        return tmp_path / "out"

    return call


@pytest.mark.filterwarnings("ignore")  # of laplace-torch
def test_every_row_of_the_plan_comes(tiny):
    peer = importlib.util.find_spec("laplace") is not None
    out = tiny("choose")
    kinds = {(part, model) for part in study.PARTS for model in study.MODELS}
    assert {(r["part"], r["model"]) for r in study.read_csv(out / "chosen.csv")} == kinds
    tiny("run", "--seeds", "0", *(() if peer else ("--skip", "laplace")))
    told = (tiny("page") / "large.md").read_text()
    rows = {(r["part"], r["model"]) for r in study.read_csv(out / "large.csv")}
    laplace = {(part, f"laplace {kind}") for part, kind, _ in study.LAPLACE}
    assert rows >= kinds | (laplace if peer else set())
    assert ("No row: heads, laplace head-full" in told) is not peer
    assert "Settings:" not in told


def test_temperatures_are_tried_before_rates():
    plan = study.settings("whole")
    assert [each["temperature"] for each in plan[:3]] == [1.0, 0.1, 0.01]
    assert {(each["rate"], each["schedule"]) for each in plan[:3]} == {(0.02, "constant")}
    assert [each["schedule"] for each in plan[6:]] == ["cyclical"] * 3
    assert study.settings("lora") == plan[:6]

"""The study of draws of a residual network: SWAG's law, and the ensemble that takes as long."""

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


def test_a_model_is_compared_with_as_many_seconds_of_members():
    def row(part, model, networks, nll, seconds):
        known = {"part": part, "seed": "0", "model": model, "networks": str(networks)}
        numbers = dict.fromkeys(study.HEADER[5:9], "0.5") | {"nll": str(nll)}
        return known | numbers | {"seconds": str(seconds)}

    rows = [row("ensemble", "points", m, 1 / m, 2.0 * m) for m in range(1, study.POOL + 1)]
    rows += [row("whole", "draws", 80, 0.1, 11.0), row("heads", "draws", 80, 0.1, 999.0)]
    both = [each | {"seed": seed} for each in rows for seed in ("0", "1")]
    told = study.page(both, [])
    assert "| whole | draws | 6 | -0.0667" in told
    assert f"| heads | draws | {study.POOL} | -0.0250" in told

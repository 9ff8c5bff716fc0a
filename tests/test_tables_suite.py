"""The suite of tables: its sets and halves, its scores, its runner and its page."""

import csv
import json
import re
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch
from scipy.special import ndtri

import shoal
from shoal.sklearn import EnsembleClassifier, EnsembleRegressor
from studies.common import read_csv
from studies.tables import models, page, repulsion, results, run, sets
from studies.tables.scores import Mixture, Quantiles, class_scores, scores

UCI = {"boston", "concrete", "energy", "kin8nm", "power", "protein", "wine", "yacht"}


def test_the_halves_share_no_set_and_the_eight_problems_judge():
    halves = {half: [s for s in sets.sets() if s.half == half] for half in sets.HALVES}
    names = {half: {s.name for s in found} for half, found in halves.items()}
    assert not names["development"] & names["judging"] and names["judging"] >= UCI
    sources = [s.source for s in sets.sets()]
    assert len(set(sources)) == len(sources) == sum(map(len, names.values()))
    for found in halves.values():
        assert {s.task for s in found} == {"regression", "classification"}
    with (sets.SUITE / "sets.csv").open() as file:
        listed = {(row["name"], row["half"]) for row in csv.DictReader(file)}
    assert listed == {(s.name, s.half) for s in sets.sets()}


@pytest.fixture
def folder(tmp_path):
    """Two sets as sets.py writes them: numbers with a gap, categories with a gap."""
    rng = np.random.default_rng(0)
    x, codes = rng.normal(size=(60, 2)), rng.integers(0, 3, (60, 1)).astype(np.int16)
    x[3, 0], codes[5, 0] = np.nan, -1
    rows = {
        f"{part}_{k}": np.arange(60)[(np.arange(60) % 10 == k) ^ (part == "train")]
        for part in ("train", "test")
        for k in sets.SPLITS
    }
    columns = {"a": None, "colour": ["blue", "green", "red"], "b": None}
    targets = {"regression": x[:, 1] + codes[:, 0], "classification": np.arange(60) % 2}
    for task, y in targets.items():
        about = json.dumps(
            {"task": task, "classes": 2 * (task == "classification"), "columns": columns}
        )
        np.savez(
            tmp_path / f"{task}.npz", about=np.array(about), numbers=x, codes=codes, y=y, **rows
        )
    return tmp_path


def test_a_split_has_numbers_categories_and_gaps_in_the_order_of_the_columns(folder):
    table = sets.load(folder, "regression", 1)
    assert list(table.x) == ["a", "colour", "b"] and (len(table.y), len(table.y_test)) == (54, 6)
    assert np.isnan(table.x["a"][2]) and table.x["colour"].isna().tolist().index(True) == 4
    assert set(table.x["colour"].cat.categories) == {"blue", "green", "red"}


def test_a_changed_value_changes_the_digest_and_a_copy_does_not(folder):
    first = sets.digest(folder, "regression")
    with np.load(folder / "regression.npz") as held:
        arrays = {part: held[part] for part in held.files}
    np.savez_compressed(folder / "copy.npz", **arrays)
    assert sets.digest(folder, "copy") == first
    arrays["y"][0] += 1e-9
    np.savez(folder / "changed.npz", **arrays)
    assert sets.digest(folder, "changed") != first


def test_a_name_of_the_row_and_a_copy_of_the_target_are_found():
    rng = np.random.default_rng(0)
    y, rows = rng.normal(size=400), pd.Categorical(np.arange(400).astype(str))
    x = pd.DataFrame({"a": y + rng.normal(size=400), "copy": 2 * y, "name": rows})
    found = sets.leaks(x, y, "regression")
    assert [text.split()[0] for text in found] == ["copy", "name"]


def test_larger_sets_are_cut_by_the_seed_and_whole_ones_are_not():
    y = np.random.default_rng(0).normal(size=5000)
    a_set = sets.Set("a", "judging", "regression", "keel:a")
    cut, again = (sets.points(a_set, y, None, 1) for _ in range(2))
    assert [len(rows) for rows in cut.values()] == [3000, 500]
    assert all((cut[part] == again[part]).all() for part in cut)
    assert not set(cut["train_1"]) & set(cut["test_1"])
    assert len(sets.points(a_set._replace(whole=True), y, None, 1)["train_1"]) == 4500


@pytest.mark.parametrize("draws", [1, 4])
def test_scores_of_gaussians_are_those_of_shoal(draws):
    rng = np.random.default_rng(1)
    mean, std = rng.normal(size=(draws, 300)), rng.uniform(0.3, 2, (draws, 300))
    y, raw = rng.normal(size=300), np.log(np.expm1(std**2 - 1e-6))
    outputs = torch.from_numpy(np.stack([mean, raw], -1))
    pred = shoal.Predictive(outputs, shoal.likelihoods.HeteroscedasticGaussian())
    theirs, ours = shoal.evaluate(pred, y), scores(Mixture(mean, std), y)
    for name in ("crps", "nll", "rmse"):
        assert ours[name] == pytest.approx(theirs[name], rel=1e-6), name
    assert ours["coverage"] == pytest.approx(theirs["coverage_90"])


def test_quantiles_of_a_gaussian_give_its_scores():
    rng = np.random.default_rng(2)
    mean, std, y = rng.normal(size=200), rng.uniform(0.5, 2, 200), rng.normal(size=200)
    levels = models.QUANTILES
    forecast = Quantiles(levels, mean + std * ndtri(levels)[:, None], mean)
    whole, found = scores(Mixture(mean[None], std[None]), y), scores(forecast, y)
    for name in ("crps", "rmse", "coverage", "width"):
        assert found[name] == pytest.approx(whole[name], rel=3e-3), name


def test_scores_of_classes_by_hand():
    probs = np.array([[0.8, 0.2], [0.6, 0.4], [0.1, 0.9], [0.0, 1.0]])
    found = class_scores(probs, np.array([0, 1, 1, 0]))
    assert found["error"] == 0.5
    assert found["brier"] == pytest.approx((0.08 + 0.72 + 0.02 + 2) / 4, abs=1e-4)
    assert found["log_loss"] == pytest.approx(-np.log([0.8, 0.4, 0.9, 1e-6]).mean(), abs=1e-4)
    assert found["ece"] == pytest.approx((0.2 + 0.6 + 0.1 + 1) / 4, abs=1e-4)


def test_models_without_categories_get_numbers_alone_and_a_gap_is_a_category(folder):
    table = sets.load(folder, "regression", 1)
    x, x_test = models.matrices(table)
    assert x.shape == (54, 2 + 4) and x_test.shape == (6, 6) and np.isfinite(x).all()
    assert models.named_gaps(table.x)["colour"].tolist()[4] == "gap"


@pytest.mark.parametrize("task", ["regression", "classification"])
@pytest.mark.parametrize("model", ["forest", "gp"])
@pytest.mark.filterwarnings("ignore")
def test_models_of_scikit_learn_beat_a_guess(folder, model, task):
    table = sets.load(folder, task, 0)
    predict = models.models({})[model](table, models.Run(0, 1, "cpu"))
    found = scores(predict()[model], table.y_test)
    assert found["coverage"] > 0.5 if task == "regression" else found["log_loss"] < 3


@pytest.mark.parametrize("file", ["ablation.json", "repulsion.json"])
def test_arms_of_a_file_are_settings_of_the_estimators(file):
    arms = json.loads((sets.LIST.parent / file).read_text())
    assert not any("," in name for name in arms)
    for name, arm in arms.items():
        task = arm.pop("task", None)
        assert task in (None, "regression")
        for kind in (EnsembleRegressor,) if task else (EnsembleRegressor, EnsembleClassifier):
            assert set(arm) <= set(kind().get_params()), name


def test_an_arm_of_shoal_takes_settings_and_has_all_scores(folder):
    table = sets.load(folder, "regression", 0)
    arm = models.models({"tiny": {"members": 2, "hidden": (4,), "epochs": 2}})["tiny"]
    found = arm(table, models.Run(0, 1, "cpu", noisy=True))()["tiny"]
    assert set(found) == {"crps", "nll", "rmse", "coverage", "width", "oof", "noisy"}
    assert all(np.isfinite(value) for value in found.values())
    assert found["noisy"] != found["crps"]


def test_noise_is_a_share_of_the_spread_of_each_number_and_leaves_categories(folder):
    table = sets.load(folder, "regression", 0)
    table.x_test["a"] = 0.0
    copies = list(models.noisy_inputs(table, 1))
    assert [list(x) for x in copies] == [["a", "colour", "b"]] * 5
    assert all(x["colour"].equals(table.x_test["colour"]) for x in copies)
    spread = [x["a"].abs().mean() for x in copies]
    assert spread[0] < spread[2] < 2 * table.x["a"].std() and (table.x_test["a"] == 0).all()


def test_a_file_of_fewer_columns_keeps_to_them(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("set,split,model,status,crps\nboston,0,a,ok,1\n")
    row = ["boston", 1, "a", "ok", "2", *[""] * (len(run.HEADER) - 5)]
    row[run.HEADER.index("oof")] = "3"
    run.append(path, [row])
    assert read_csv(path)[1] == {
        "set": "boston",
        "split": "1",
        "model": "a",
        "status": "ok",
        "crps": "2",
    }
    run.append(tmp_path / "new.csv", [row])
    assert read_csv(tmp_path / "new.csv")[0]["oof"] == "3"


def test_sets_of_classes_have_a_coverage_and_a_mean_size():
    table = SimpleNamespace(x_test=None, y_test=np.array([0, 1, 1]))
    even = SimpleNamespace(probs=np.full((3, 2), 0.5))
    model = SimpleNamespace(predictive=lambda x: even)
    assert "coverage" not in models.shoal_classes(model, table)
    model.conformal = True
    model.predict_set = lambda x, level: np.array([[1, 0], [1, 1], [1, 0]], bool)
    found = models.shoal_classes(model, table)
    assert found["coverage"] == pytest.approx(2 / 3) and found["width"] == pytest.approx(4 / 3)


FITS = """
import sys, time, numpy as np
from pathlib import Path
from types import SimpleNamespace
from studies.tables import run
from studies.tables.scores import Mixture

def good(table, run):
    return lambda: {name: Mixture(np.zeros((1, 6)), np.ones((1, 6))) for name in ("good", "second")}

def bad(table, run):
    raise ValueError("no such table")

given = SimpleNamespace(data=Path(sys.argv[1]), threads=1, device="cpu", jobs=3, limit=2.0)
given.noisy = False
given.end = float("inf")
given.versions = dict.fromkeys(("good", "bad", "slow"), "1")
fits = run.Fits(given, {"good": good, "bad": bad, "slow": lambda table, run: time.sleep(60)})
for model in given.versions:
    fits.start(("regression", 1, model))
while fits.running:
    for row in fits.ended():
        print(*row, sep=";", flush=True)
"""


def test_a_fit_that_fails_or_takes_too_long_leaves_its_reason(folder):
    command = [sys.executable, "-c", FITS, folder]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    lines = [line.split(";") for line in done.stdout.splitlines()]
    rows = {line[2]: dict(zip(run.HEADER, line, strict=True)) for line in lines}
    assert rows["good"]["status"] == rows["second"]["status"] == "ok"
    assert float(rows["good"]["crps"]) > 0
    assert rows["bad"]["status"].startswith("ValueError: no such table")
    assert rows["slow"]["status"] == "more than 2 s" and float(rows["slow"]["wall_seconds"]) >= 2


def test_rows_of_shoal_name_the_state_of_its_code():
    found = run.preload(["shoal", "forest"], models.LIBRARIES)
    assert re.fullmatch(r"shoal \S+, code [0-9a-f]{8}", found["shoal"])
    assert re.fullmatch(r"sklearn [\d.]+", found["forest"])


def test_rows_that_are_there_are_not_fitted_again(tmp_path):
    given = SimpleNamespace(out=tmp_path / "a.csv", retry=False, half="judging")
    given.sets, given.splits, given.models = "boston,magic", "0,1", "a,b"
    first = [("magic", 0, "a"), ("magic", 0, "b"), ("boston", 0, "a")]
    assert run.missing(given, read_csv, {})[:3] == first
    given.out.write_text("set,split,model,status\nmagic,0,a,ok\nboston,0,a,failed\n")
    left = run.missing(given, read_csv, {})
    assert len(left) == 6 and ("boston", 0, "a") not in left
    alone = run.missing(given, read_csv, {"b": "regression"})
    assert {name for name, _, model in alone if model == "b"} == {"boston"}
    given.retry = True
    assert ("boston", 0, "a") in run.missing(given, read_csv, {})


def write_rows(path, scores, version="1"):
    """A raw file of (set, model) with the score of three splits; None is a fit that failed."""
    lines = [",".join(run.HEADER)]
    for (name, model), values in scores.items():
        for split, value in enumerate(values):
            held = {"set": name, "split": split, "model": model, "status": "ok", "threads": 2}
            held |= {"cpu_seconds": 2.0, "device": "cpu", "version": version, "coverage": 0.9}
            held |= {"crps": value, "log_loss": value} if value else {"status": "out of memory"}
            lines.append(",".join(str(held.get(column, "")) for column in run.HEADER))
    path.write_text("\n".join(lines) + "\n")


def test_ranks_have_the_critical_difference_of_nemenyi_and_missing_means_are_last():
    table = np.array([[1.0, 2.0, np.nan, 3.0, 4.0]] * 30)
    found = results.ranks(table, "abcde")
    assert found.mean.tolist() == [1, 2, 5, 3, 4] and found.p_value < 1e-6
    assert found.critical == pytest.approx(2.728 * np.sqrt(5 * 6 / (6 * 30)), rel=1e-3)
    assert results.cliques(found) == [(1, 2), (2, 3), (3, 4), (4, 5)]


def test_the_page_names_what_is_worse_what_failed_and_what_was_not_reached(tmp_path):
    names = [s.name for s in sets.sets() if (s.half, s.task) == ("judging", "regression")]
    found = {(name, "shoal"): (1.0, 1.1, 0.9) for name in names}
    found |= {(name, "catboost"): (1.2, 1.2, 1.2) for name in names}
    found |= {(name, "ngboost"): (1.3, 1.3, 1.3) for name in names}
    found |= {("concrete", "catboost"): (0.8, 0.7, 1.2), ("ames", "ngboost"): (1.3, 1.3, None)}
    found |= {("yacht", "bde"): (0.95,)}
    write_rows(tmp_path / "judging-a.csv", found)
    write_rows(tmp_path / "judging-b.csv", {("boston", "shoal"): (0.5, 0.5, 0.5)}, "2")
    page.page(tmp_path)
    text = (tmp_path / "README.md").read_text()
    assert "| concrete | CRPS | CatBoost | 11.1 % | 0.1 | 2 of 3 |" in text
    assert "| yacht | CRPS | bde | 5.3 % | 0.05 | 1 of 1 |" in text  # on the one split that bde has
    assert "| 2. lowest CRPS on six of eight UCI problems | 6 of 8:" in text
    assert "| 3. no ratio above 1.05, regression | concrete 1.11, yacht 1.05 | **no** |" in text
    assert "was run with code of 2 states: 1; 2." in text
    assert "**Not run yet: cultivars, digits," in text
    assert (
        "| ames | NGBoost | out of memory (2 s of the CPU) |" in text
        and "without a rank: bde" in text
    )
    assert "| bde | 0.950 | 1 of 1 | - | - |" in text and "Not run: bde on " in text
    assert "| boston | **0.5** |" in text  # the last row counts
    assert (tmp_path / "ranks-regression.png").read_bytes().startswith(b"\x89PNG")


def write_arms(path, names, score):
    """A raw file of the arms of repulsion, with `score(name, arm)` of tests, folds and noise."""
    rows = []
    for name in names:
        for arm in json.loads((sets.LIST.parent / "repulsion.json").read_text()):
            crps, oof = score(name, arm)
            held = {"set": name, "split": 0, "model": arm, "status": "ok", "crps": crps}
            held |= {"oof": oof, "noisy": 2 * crps, "cpu_seconds": 3 if "forde" in arm else 2}
            rows.append([held.get(column, "") for column in run.HEADER])
    run.append(path, rows)


def test_repulsion_pays_where_the_arm_that_folds_choose_beats_plain_members_of_equal_cost(tmp_path):
    names = [s.name for s in sets.sets() if (s.half, s.task) == ("development", "regression")][:4]

    def score(name, arm):
        size = 1 + names.index(name)
        if arm == "forde 4":
            return 0.9 * size * (1 + 0.01 * size), 0.5
        return size, 0.6 if arm == "forde 16" else 1 + len(arm)

    write_arms(tmp_path / "repulsion.csv", names, score)
    arms = repulsion.Arms(results.Raw("repulsion*.csv", tmp_path))
    assert arms.sets == names and arms.of("kde") == ["kde 100", "kde 1000", "kde 10000"]
    found = arms.beside(["plain 8", "forde 4", "forde 16"], "plain 16")
    logs = np.log(0.9 * (1 + 0.01 * np.arange(1, 5)))
    half = 3.182446 * logs.std(ddof=1) / 2
    assert found.mean == pytest.approx(np.exp(logs.mean())) and (found.lower, found.sets) == (4, 4)
    assert [found.low, found.high] == pytest.approx(
        np.exp([logs.mean() - half, logs.mean() + half])
    )
    page.page(tmp_path)
    text = (tmp_path / "README.md").read_text()
    assert "On the test points, `forde`, all chosen out-of-fold pays beside" in text
    beside = page.beside(arms.raw, ["forde 16"], "plain 8")  # folds: 0.6 and 8
    assert "| forde 16 | 1.000 | 0 of 4 | - | - | 0.075 |" in beside
    assert "| `forde 4` | 1.5 | 0.922 (" in text and "| `kde 100` | 1.0 | 1.000 (" in text


def test_the_readme_says_what_the_judging_half_says():
    text = " ".join((sets.SUITE.parents[3] / "README.md").read_text().split())
    raw = results.Raw("judging*.csv", sets.SUITE)
    said = re.search(
        r"lowest CRPS on (\d+) of (\d+) .*? on (\d+) of (\d+), in ([\d.]+) and ([\d.]+)", text
    )
    found = []
    for task, score in results.FIRST.items():
        models_, names = page.ranked(raw, task)
        table = raw.means(names, models_, score)
        assert models_[0] == results.OURS
        found += [int((table[:, 0] == table.min(1)).sum()), len(names)]
    assert [int(n) for n in said.groups()[:4]] == found
    for place, task in enumerate(results.FIRST, 5):
        ratios = raw.ratios(raw.sets(task), "shoal", "catboost", results.SECONDS)
        assert float(said[place]) == pytest.approx(results.geometric(ratios), abs=0.05)

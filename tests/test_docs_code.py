"""The code of docs/cookbook.md, a task a case, and of docs/from-data-to-answer.md, in order."""

import json
import re
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import shoal

DOCS = Path(__file__).parents[1] / "docs"
COOKBOOK = DOCS / "cookbook.md"
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def tasks():
    """The blocks of each heading of the cookbook, in the order of the page."""
    parts = re.split(r"^##+ ", COOKBOOK.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]
    found = {part.partition("\n")[0]: BLOCK.findall(part) for part in parts}
    return {heading: blocks for heading, blocks in found.items() if blocks}


TASKS = tasks()
BEGINNING = TASKS.pop("The beginning")[0]


def covers(low, high, targets, level):
    """Whether intervals have the shape of the targets and cover about as many as they say."""
    inside = ((low <= targets) & (targets <= high)).float().mean()
    return low.shape == targets.shape and abs(float(inside) - level) < 0.1


def accurate(names, least=0.75):
    """Whether the run of a task has learned the classes."""
    pred = shoal.predict(names.run, names.x_test)
    return shoal.evaluate(pred, names.y_test)["accuracy"] > least


CHECKS = {
    "class probabilities": lambda a: (
        set(a.table["class"]) <= {"low", "middle", "high"}
        and abs(a.table.filter(like="p(").sum(axis=1) - 1).max() < 1e-6
    ),
    "intervals for a regression": lambda a: (
        covers(a.low, a.high, a.t_test, 0.9) and a.pred.mean.shape == a.t_test.shape
    ),
    "noise from ignorance": lambda a, b: (
        torch.allclose(a.total, a.noise + a.ignorance, atol=1e-6)
        and torch.allclose(b.pred.variance, b.noise + b.ignorance, rtol=1e-4)
        and b.noise.shape == b.t_test.shape
    ),
    "depends on its inputs": lambda a: (
        a.sensitivity.argmax() == 0 and a.doubtful.shape == (150, 4) and not a.doubtful[:, 0].any()
    ),
    "larger than the memory": lambda a: torch.equal(a.later.members, a.pred.members),
    "report for colleagues": lambda a: "Three classes" in Path("report.html").read_text("utf-8"),
    "noise that differs": lambda a: a.width.shape == a.t_test.shape and a.width.std() > 0,
    "predict counts": lambda a: torch.corrcoef(torch.stack([a.rate, a.x_test[:, 0]]))[0, 1] > 0.5,
    "several numbers": lambda a: covers(
        a.low, a.high, torch.stack([a.t_test, 100 * a.x_test[:, 1]], 1), 0.9
    ),
    "yes or no": lambda a: (
        ((a.probability > 0.5) == (a.x_test[:, :2] > torch.tensor([0, 1]))).float().mean() > 0.9
    ),
    "rare classes": accurate,
    "weigh single": accurate,
    "loss of my own": lambda a: 0.8 < (a.t_test <= a.quantile).float().mean() < 1,
    "on derivatives": lambda a: (
        a.scores["derivatives_rmse"] < 0.5 and a.scores["rmse"] < 0.5 and a.pred.size == 5
    ),
    "physics-informed": lambda a: (a.u - (-a.time[:, 0]).exp()).abs().max() < 0.1,
    "texts, dates and gaps": lambda a: (a.low < a.high).all() and len(a.low) == 5,
    "sharp changes": lambda a: (
        a.model.preprocessing_.transform(a.x.numpy()).shape[1] > 10 * a.x.shape[1]
    ),
    "columns of a table matter": lambda a: (
        abs(a.shares.sum() - 1) < 1e-9 and len(a.ranked) == 4 and a.curve.mean.shape == (10,)
    ),
    "drift away": lambda a: not a.calm and a.moved.drifted == ("x0",),
    "come later": lambda a: a.model.score(a.x_test, a.y_test) > 0.7,
    "overfit": lambda a: len(a.run.history) < 200 and a.run.best_epoch <= len(a.run.history),
    "interrupted": lambda a: len(a.run.history) == 10,
    "load it later": lambda a: len(a.pred) == 150,
    "same result": lambda a: a.first.members.isfinite().all(),
    "on a GPU": lambda a: a.run.config["precision"] == "bfloat16",
    "several GPUs": lambda a: a.run.ensemble.members == 8,
    "time and memory": lambda a: len(a.run.history) == 10,
    "endless stream": lambda a: a.run.history[-1]["step"] == 20,
    "watch a run": lambda a: len(a.rows) == 6,
    "own training loop": lambda a: shoal.evaluate(a.pred, a.y_test)["accuracy"] > 0.75,
    "repulsion acts": lambda a: a.ratio > 0.001,
    "choose method": lambda a: a.run.choice.why,
    "compare two methods": lambda a: "kde:100" in str(a.table),
    "add members": lambda a: a.larger.ensemble.members == 7,
    "remove members": lambda a: a.pred.size == 2,
    "different architectures": lambda a: a.run.ensemble.members == 5,
    "trained already": lambda a: torch.allclose(a.outputs[0], a.networks[0](a.x_test), atol=1e-6),
    "fifty heads": lambda a: accurate(a, 0.6) and a.run.ensemble.members == 50,
    "LoRA": lambda a: accurate(a, 0.6) and len([*Path("adapters").iterdir()]) == 5,
    "sets or intervals": lambda a, b, c: (
        0.8 < a.inside[range(150), a.y_test].float().mean() < 1
        and covers(b.low, b.high, b.t_test, 0.9)
        and covers(c.low, c.high, c.t_test, 0.9)
    ),
    "more members would help": lambda a: (
        0 < a.found.gain(2).value < 0.01 and "stopped at 5" in a.larger.notes[-1]
    ),
    "too high or too low": lambda a: (
        2 * shoal.evaluate(a.calibrated, a.y_test)["ece"]
        < shoal.evaluate(shoal.predict(a.run, a.x_test), a.y_test)["ece"]
    ),
    "error rate": lambda a: (
        0.5 < a.answered.float().mean() < 1
        and (a.labels != a.y_test[a.answered]).float().mean() < 0.1
    ),
    "another kind": lambda a: 0.1 < a.unknown.float().mean() < 0.4,
    "different costs": lambda a: set(a.choice.decision.tolist()) <= {-1, 0, 1, 2},
    "label next": lambda a: len(set(a.chosen.tolist())) == 10,
    "best input": lambda a: a.best.shape == (1, 4) and a.best.abs().max() <= 2,
    "ONNX": lambda a: abs(a.probs.sum(1) - 1).max() < 1e-5 and (a.epistemic >= 0).all(),
    "cross-validate": lambda a: a.search.best_score_ > 0.6,
}


@pytest.fixture(scope="module")
def beginning():
    """The names of the first block; the blocks of tasks rebind them and change none."""
    names = {}
    exec(compile(BEGINNING, "cookbook", "exec"), names)
    return names


@pytest.mark.parametrize("heading", TASKS)
def test_a_task_of_the_cookbook_gives_what_it_says(heading, beginning, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    after = []
    for block in TASKS[heading]:
        names = dict(beginning)
        torch.manual_seed(0)
        with warnings.catch_warnings():  # of BoTorch's own imports
            warnings.simplefilter("ignore", DeprecationWarning)
            exec(compile(block, heading, "exec"), names)
        after.append(SimpleNamespace(**names))
    (check,) = [check for words, check in CHECKS.items() if words in heading]
    assert check(*after)


def test_the_page_from_data_to_answer_runs_and_its_promises_hold(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(DOCS / "site")
    tutorials = __import__("tutorials")
    tutorials.run(DOCS / "from-data-to-answer.md", tmp_path)
    results = json.loads(Path("results.json").read_text(encoding="utf-8"))
    text = "\n".join(block["text"] for block in results["blocks"])
    inside = int(re.search(r"(\d+)% inside", text)[1]) / 100
    covered = float(re.search(r"([\d.]+)% covered", text)[1]) / 100
    assert abs(inside - 0.9) < 0.1 and covered > 0.95  # 90 % of 100, and 98 % of 500 test points
    assert float(re.search(r"([\d.]+)% of them wrong", text)[1]) < 4
    assert Path("model.onnx").is_file() and Path("report.html").is_file()

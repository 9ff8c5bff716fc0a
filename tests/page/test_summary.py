"""The long table of a grid equals what numpy makes of the scores."""

import csv
import io
import math

import numpy as np
import pytest

from shoal.evaluation.evaluate import Evaluation
from shoal.page.compare import COLUMNS, every_measure, summary_csv
from shoal.page.report_data import RunRecord, SeedGroup
from shoal.page.verdicts import decide_groups
from shoal.prediction.statistics import equivalence_p_value

T_975_TWO_DEGREES = (2 * 0.975 - 1) * math.sqrt(2 / (4 * 0.975 * (1 - 0.975)))
"""Student's t for three pairs has a closed form: t = (2p - 1) sqrt(2 / (4p(1 - p)))."""

NLL = {"ensemble": [0.30, 0.34, 0.26], "kde": [0.20, 0.25, 0.15], "f-kde": [0.31, 0.33, 0.28]}
SHIFTED = {"ensemble": [(0.9, 0.5), (0.8, 0.4), (0.7, 0.6)], "kde": [(0.9, 0.7)] * 3}


def entry(method, seed):
    low, high = SHIFTED.get(method, [(0.5, 0.5)] * 3)[seed]
    scores = {
        "data": {"task": "classification"},
        "test": {"nll": NLL[method][seed], "accuracy": 0.9},
        "shifts": {"fog-1": {"accuracy": low}, "fog-2": {"accuracy": high}},
        "ood": {"letters": {"auroc_entropy": math.nan if method == "kde" else 0.5}},
    }
    config = {"method": method, "members": 5, "seed": seed}
    return RunRecord(f"{method}-{seed}", config, [], [], {}, Evaluation(scores))


@pytest.fixture
def groups():
    return [SeedGroup(method, [entry(method, seed) for seed in range(3)]) for method in NLL]


def rows(groups):
    return list(csv.DictReader(io.StringIO(summary_csv(decide_groups(groups)))))


def row(groups, method, metric, part="test"):
    wanted = (method, metric, part)
    (found,) = [r for r in rows(groups) if (r["method"], r["metric"], r["part"]) == wanted]
    return found


@pytest.mark.parametrize("method", NLL)
def test_mean_and_standard_error_are_those_of_numpy(groups, method):
    found, values = row(groups, method, "nll"), np.array(NLL[method])
    assert float(found["mean"]) == pytest.approx(values.mean(), rel=1e-14)
    assert float(found["stderr"]) == pytest.approx(values.std(ddof=1) / math.sqrt(3), rel=1e-12)
    assert (found["n"], found["size"]) == ("3", "5")


@pytest.mark.parametrize("method", ["kde", "f-kde"])
def test_differences_are_paired_by_seed(groups, method):
    found = row(groups, method, "nll")
    pairs = np.array(NLL[method]) - np.array(NLL["ensemble"])
    reach = T_975_TWO_DEGREES * pairs.std(ddof=1) / math.sqrt(3)
    assert float(found["difference"]) == pytest.approx(pairs.mean())
    assert float(found["low"]) == pytest.approx(pairs.mean() - reach, abs=1e-12)
    assert float(found["high"]) == pytest.approx(pairs.mean() + reach, abs=1e-12)


def test_what_noise_could_have_made_is_not_called_equal(groups):
    assert row(groups, "f-kde", "nll")["verdict"] == "not decided"
    assert row(groups, "ensemble", "nll")["verdict"] == ""
    assert row(groups, "ensemble", "nll")["difference"] == ""
    assert int(row(groups, "f-kde", "nll")["needed"]) > 3


def test_equal_means_within_the_margin(groups):
    """Accuracy is 0.9 in every run; NLL of f-kde is equal within a margin that is wide enough."""
    assert row(groups, "kde", "accuracy")["verdict"] == "equal"
    values = NLL["f-kde"], NLL["ensemble"]
    (found,) = [
        found
        for found in csv.DictReader(io.StringIO(summary_csv(decide_groups(groups, {"nll": 1.0}))))
        if (found["method"], found["metric"]) == ("f-kde", "nll")
    ]
    assert (found["verdict"], found["within"], found["margin"]) == ("equal", "True", "1.0")
    assert float(found["p_equal"]) == pytest.approx(5 * equivalence_p_value(*values, 1.0))


def test_headline_metrics_are_one_family_and_every_other_metric_stands_alone(groups):
    assert row(groups, "kde", "nll")["comparisons"] == "5"  # two of NLL and accuracy, one AUROC
    shifted = row(groups, "kde", "accuracy", "shift:fog-2")
    assert (shifted["comparisons"], shifted["verdict"]) == ("1", "not decided")


def test_one_pair_has_no_interval_and_decides_nothing(groups):
    single = [SeedGroup(group.label, group.entries[:1]) for group in groups]
    found = row(single, "kde", "nll")
    assert float(found["difference"]) == pytest.approx(-0.1)
    assert (found["stderr"], found["low"], found["high"]) == ("", "", "")
    assert (found["verdict"], found["needed"]) == ("not decided", "")


def test_every_shift_has_rows_of_its_own(groups):
    values = np.array(SHIFTED["ensemble"])[:, 1]
    found = row(groups, "ensemble", "accuracy", "shift:fog-2")
    assert float(found["mean"]) == pytest.approx(values.mean())
    pairs = np.array(SHIFTED["kde"])[:, 1] - values
    found = row(groups, "kde", "accuracy", "shift:fog-2")
    assert float(found["difference"]) == pytest.approx(pairs.mean())


def test_a_metric_that_no_seed_has_is_no_row(groups):
    parts = {(r["method"], r["part"]) for r in rows(groups)}
    assert ("ensemble", "ood:letters") in parts and ("kde", "ood:letters") not in parts


def test_columns_and_order(groups):
    assert tuple(rows(groups)[0]) == COLUMNS
    parts = list(dict.fromkeys(r["part"] for r in rows(groups)))
    assert parts == ["test", "shift:fog-1", "shift:fog-2", "ood:letters"]
    assert len(every_measure(groups)) == len(set(every_measure(groups))) == 5

"""The study of method="auto": its controller of the strength, and its data sets."""

import math
from dataclasses import replace

import pandas as pd
import pytest
import torch
from small_runs import assert_equal_trees
from torch import nn

import shoal
from shoal.core.random import generator
from shoal.data.batches.sources import ArrayBatches
from shoal.training.search.candidates import (
    METHOD_CANDIDATES,
    ROUNDS,
    RULE,
    method_candidates,
    too_costly,
)
from studies.auto import late, make, problems, rules
from studies.auto.controller import Controller, train


def test_the_first_correction_is_exact_since_the_push_is_proportional_to_the_strength():
    controller = Controller(target=0.03, every=4)
    seen = []
    for _ in range(9):
        seen.append(controller.strength)
        controller.see(drive=2.0, push=5e-6 * controller.strength)
    assert seen[0] == 1.0
    assert seen[1:] == pytest.approx([0.03 * 2.0 / 5e-6] * 8, rel=1e-12)


def test_later_corrections_are_clipped_in_log_space():
    controller = Controller(target=0.1, every=3, most=2.0)
    seen = []
    for step in range(20):
        size = 1.0 if step < 1 else 10.0  # the drive grows tenfold after the first step
        controller.see(drive=size, push=0.01 * controller.strength)
        seen.append(controller.strength)
    assert seen[:3] == pytest.approx([10.0] * 3)
    # corrections after steps 4, 7, 10 and 13: 2 * 2 * 2 * 1.25
    wanted = [20.0] * 3 + [40.0] * 3 + [80.0] * 3 + [100.0] * 8
    assert seen[3:] == pytest.approx(wanted)


@pytest.mark.parametrize(("drive", "push"), [(0.0, 1.0), (1.0, 0.0), (math.nan, 1.0)])
def test_steps_without_a_force_ratio_change_nothing(drive, push):
    controller = Controller(target=0.1, strength=7.0)
    controller.see(drive, push)
    assert controller.strength == 7.0


@pytest.mark.filterwarnings("ignore:There are 2 members but only 1:shoal.ShoalWarning")
@pytest.mark.parametrize("target", [0.01, 0.3])
def test_the_ratio_converges_on_a_quadratic(target):
    """Two members at -w and w, log p = -w² / 2, median bandwidth: push = s c / w, drive = w.

    The ratio is s c / w². A step of size lr multiplies w by 1 - lr (1 - r), and the strength that
    fits the last step meets the next one: r = target / (1 - lr (1 - r))² at the fixed point.
    """
    lr = 0.05
    ensemble = shoal.Ensemble.init(lambda: nn.Linear(1, 1, bias=False).double(), members=2)
    with torch.no_grad():
        for weight in ensemble.weights.values():
            weight.copy_(torch.tensor([-1.0, 1.0]).reshape(weight.shape))
    stepper = shoal.Stepper(
        ensemble, n=1, method="kde", optimizer="sgd", lr=lr, prior="flat",
        likelihood=shoal.likelihoods.Gaussian(1.0),
    )  # fmt: skip
    controller = Controller(target, every=1, most=1e9)
    batch = torch.ones(1, 1).double(), torch.zeros(1).double()
    places = [1.0]
    for _ in range(60):
        info = stepper(batch, strength=controller.strength)
        controller.see(float(info.drive), float(info.push))
        (weight,) = ensemble.weights.values()
        places.append(float(weight[1].detach()))
    wanted = target
    for _ in range(200):
        wanted = target / (1 - lr * (1 - wanted)) ** 2
    assert float(info.ratio) == pytest.approx(wanted, rel=1e-6)
    assert places[-1] / places[-2] == pytest.approx(1 - lr * (1 - wanted), rel=1e-6)


@pytest.mark.parametrize("method", ["kde", "f-kde"])
@pytest.mark.parametrize("likelihood", ["categorical", "heteroscedastic"])
def test_a_controller_that_changes_nothing_trains_as_fit_does(method, likelihood):
    draw = generator(0, "data")
    x = torch.randn(50, 3, generator=draw)
    y = (x[:, 0] > 0).long() if likelihood == "categorical" else 3 + 2 * x[:, 0] + 0.1 * x[:, 1]
    how = {"batch_size": 16, "lr": 0.01, "schedule": "cosine", "likelihood": likelihood}
    ensembles = [
        shoal.Ensemble.init(
            lambda: nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2)), members=3, seed=5
        )
        for _ in range(2)
    ]
    run = shoal.fit(
        ensembles[0], (x, y), method=method, strength=20.0, steps=11, seed=5, progress=False, **how
    )
    still = Controller(0.1, strength=20.0, most=1.0, first=1.0)
    found = train(ensembles[1], (x, y), method, still, steps=11, seed=5, **how)
    weights = [{n: t.detach() for n, t in e.weights.items()} for e in ensembles]
    assert_equal_trees(*weights)
    assert found.history[-1]["strength"] == 20.0
    wanted = shoal.predict(run, x).log_prob(y)
    torch.testing.assert_close(shoal.predict(found, x).log_prob(y), wanted)


def test_the_study_leaves_out_the_candidates_that_the_library_leaves_out():
    candidates = method_candidates()
    wide = ArrayBatches(torch.zeros(4, 1280), torch.zeros(4), 4)
    members = shoal.Ensemble.init(lambda: nn.Linear(1280, 10), members=2)
    kept = [
        candidate
        for candidate in candidates[1:]
        if candidate.label not in too_costly(candidates, members, wide)
    ]
    rule = rules.SHIPPED.on("features")
    assert [(candidate.method, candidate.strength) for candidate in kept] == [
        (method, float(strength)) for method, _, strength in (a.partition(":") for a in rule.arms)
    ]
    assert rules.SHIPPED.on("mnist") is rules.SHIPPED


def test_the_rule_of_the_study_is_that_of_the_library():
    shipped = rules.SHIPPED
    candidates = [
        (name, float(word))
        for name, _, word in (candidate.partition(":") for candidate in shipped.arms)
    ]
    assert candidates == [(name, strength) for name, strength in METHOD_CANDIDATES]
    assert (shipped.keep, shipped.errors) == (ROUNDS[1].keep, RULE.errors)
    assert [*(each.share for each in ROUNDS), 1.0] == list(make.STAGES.values())
    assert tuple(make.STAGES) == (*rules.ROUNDS, "1")
    assert make.CANDIDATES == (rules.PLAIN, *shipped.arms)


def short_trials(*differences):
    """The rows of one round: candidates a and b less the plain ensemble, clean and shifted."""
    values = [(0.0, 0.0), *differences]
    made = pd.DataFrame(values, [rules.PLAIN, "a", "b"], ["clean_diff", "shift_diff"])
    return made.assign(held_shifted=1.0, clean_se=0.01)


def test_a_rule_can_foretell_a_late_gain():
    first = short_trials((0.20, 0.20), (-0.01, 0.01))
    second = short_trials((0.05, 0.05), (0.00, 0.02))
    rule = rules.Rule(("a", "b"), keep=2)
    assert rule.choose(first, second) == rules.PLAIN
    assert replace(rule, slope=1.0).choose(first, second) == "a"  # 0.05 - 1.12 * 0.15
    assert replace(rule, keep=1, slope=1.0).choose(first, second) == rules.PLAIN


def test_the_guard_and_the_weight_of_the_shifted_nll_decide():
    trials = short_trials((0.015, -0.02), (0.00, -0.01))
    rule = rules.Rule(("a", "b"), keep=2)
    assert rule.choose(trials, trials) == "b"
    assert replace(rule, errors=2.0).choose(trials, trials) == "b"
    assert replace(rule, errors=2.0, weight=1.0).choose(trials, trials) == "a"


def test_the_price_of_a_trunk_counts_it_once():
    rule = rules.Rule(rules.SHIPPED.arms, trunk="0.5@0.6")
    assert rules.price(rule) == pytest.approx(0.5 * (0.6 + 0.4 * (1 + 1.1 + 2 * 2.2)))


def test_repulsion_is_absent_from_a_trunk():
    assert [make.Late(0.6)(step, 10) for step in range(10)] == [0.0] * 6 + [1.0] * 4
    x = torch.randn(40, 3, generator=generator(0, "data"))
    how = {"steps": 10, "batch_size": 8, "progress": False}
    runs = [
        shoal.fit(
            shoal.Ensemble.init(lambda: nn.Linear(3, 2), members=3), (x, (x[:, 0] > 0).long()),
            method="kde", strength=1e3, annealing=annealing, **how
        )
        for annealing in (make.Late(1.0), make.Late(0.5), None)
    ]  # fmt: skip
    plain = shoal.Ensemble.init(lambda: nn.Linear(3, 2), members=3)
    shoal.fit(plain, (x, (x[:, 0] > 0).long()), method="ensemble", **how)
    wanted, *others = (next(iter(e.weights.values())) for e in (plain, *(r.ensemble for r in runs)))
    torch.testing.assert_close(others[0], wanted)
    assert not torch.allclose(others[1], wanted) and not torch.allclose(others[1], others[2])


def test_regret_is_what_the_best_of_the_other_seeds_gains_beyond_the_chosen_candidate():
    nll = {"ensemble": (1.0, 1.0, 1.0), "kde:1e3": (0.7, 0.9, 1.2), "forde:4": (1.1, 0.8, 0.8),
           "forde:16": (2.0, 2.0, 2.0)}  # fmt: skip
    rows = pd.DataFrame(
        [
            {"set": "one", "seed": seed, "arm": arm, "stage": "1", "nll": value}
            for arm, values in nll.items()
            for seed, value in enumerate(values)
        ]
    ).assign(shifted_nll=1.0, auroc=0.5)
    chosen = pd.DataFrame({"set": "one", "seed": range(3), "arm": rules.PLAIN})
    found = late.regret(rows, chosen)
    found = found[found.score == "nll"]
    assert found.seen.tolist() == pytest.approx([0.3, 0.2, 0.2])
    assert found.best.tolist() == ["forde:4", "kde:1e3", "kde:1e3"]
    assert found.others.tolist() == pytest.approx([-0.1, 0.1, -0.2])


def test_what_short_trainings_foretell_is_counted_by_signs():
    short, whole = (-0.1, 0.1, 0.1, -0.1), (-0.1, -0.1, 0.1, 0.1)
    rows = pd.DataFrame(
        [
            {"set": "one", "seed": seed, "arm": arm, "stage": stage, "clean_diff": change,
             "shift_diff": 0.0, "nll": 1.0 + change, "shifted_nll": 1.0}
            for arm in make.CANDIDATES
            for stage, changes in (("0.125", short), ("1", whole))
            for seed, change in enumerate(changes if arm != rules.PLAIN else (0.0,) * 4)
        ]
    )  # fmt: skip
    (line,) = late.foretold(rows, ("0.125",)).splitlines()[2:]
    assert line.count("50 % / 50 % / 50 %") == 3


def test_the_margin_is_a_hundredth_of_a_nat_or_of_the_plain_score():
    rows = pd.DataFrame({"set": ["a", "b"], "arm": rules.PLAIN, "stage": "1", "nll": [0.1, -3.0],
                         "shifted_nll": [20.0, 0.5], "auroc": 0.9, "auroc_mi": 0.9})  # fmt: skip
    found = late.margins(rows)
    assert found.nll.tolist() == pytest.approx([0.01, 0.03])
    assert found.shifted_nll.tolist() == pytest.approx([0.2, 0.01])
    assert found.auroc.tolist() == [0.01, 0.01]


def test_the_score_of_a_rule_is_its_gain_in_margins_and_no_set_counts_more_than_ten():
    limits = pd.DataFrame({"nll": [0.01, 0.02], "shifted_nll": [0.01, 0.02]}, ["a", "b"])
    found = pd.DataFrame({"set": ["a", "b"], "nll": [-0.02, -5.0], "shifted_nll": [0.0, 0.02]})
    assert late.score(found, limits).to_dict() == pytest.approx({"a": 1.0, "b": 4.5})


def test_the_halves_of_the_sets_are_disjoint_and_equal():
    assert len(late.CHOOSING) == len(set(late.CHOOSING)) == len(problems.ALL) / 2
    assert set(late.CHOOSING) < set(problems.ALL)


@pytest.mark.parametrize("name", ["diabetes", "wine-cultivars", "breast-cancer"])
def test_tables_are_standardised_by_their_training_points(name):
    made = problems.problem(name, 0)
    torch.testing.assert_close(made.x.mean(0), torch.zeros(made.x.shape[1]), atol=1e-5, rtol=0)
    torch.testing.assert_close(made.x.std(0), torch.ones(made.x.shape[1]), atol=1e-5, rtol=0)
    assert made.shifted[0].shape == made.ood.shape == made.test[0].shape
    torch.testing.assert_close(made.ood.sort(0).values, made.test[0].sort(0).values)
    outputs = made.build()(made.x[:1]).shape[-1]
    assert outputs == (2 if made.y.is_floating_point() else len(made.y.unique()))


def test_the_unseen_sets_took_no_part_in_the_design():
    assert not set(problems.UNSEEN) & set(problems.DESIGN)
    assert set(problems.CHEAP) <= set(problems.DESIGN)

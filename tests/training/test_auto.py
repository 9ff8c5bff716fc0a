"""`method="auto"` and `strength="auto"`: the rule, the rounds, and what a search leaves behind."""

import copy
import json
import math
from dataclasses import replace

import pytest
import torch
from small_runs import (
    assert_equal_trees,
    assert_one_sentence,
    assert_same_run,
    both,
    differ,
    frozen,
    plain,
    points,
    quick,
    shoal_of,
)
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from triton_ready import needs_gpu

import shoal
from shoal.core.errors import ConfigError, DataError, StorageError
from shoal.data.batches.sources import ArrayBatches, batches_of
from shoal.engine.resources.graph import CapturedForward
from shoal.inference.likelihoods import Categorical
from shoal.interaction.methods import METHODS
from shoal.models.resnet import ResNet20
from shoal.prediction.predictive import Predictive
from shoal.training.folder.choice import CHOICE
from shoal.training.folder.run import RunFolder
from shoal.training.folder.run_folder import checked_config
from shoal.training.mover import prepare
from shoal.training.search import search as auto
from shoal.training.search.candidates import (
    BUDGET,
    MOST_AXES_PRICE,
    PLAIN,
    ROUNDS,
    STRENGTHS,
    PointScores,
    Round,
    Rule,
    axes_price,
    method_candidates,
    paired,
    share_of,
    strength_candidates,
    too_costly,
)
from shoal.training.search.search import held_out_data, point_losses

DATA = points(100)
NOISE = torch.randn(50, generator=torch.Generator().manual_seed(0))


def scores(clean=0.0, shifted=0.0, scale=0.1):
    """NLLs whose paired differences from `scores()` have these means, and a known error."""
    base = torch.linspace(0.5, 1.5, 50)
    wave = scale * (NOISE - NOISE.mean())
    return PointScores(base + clean + wave, base + 1 + shifted + wave)


class Scripted:
    """Candidates that train nothing: each has the scores, or the error, that a test gives it."""

    def __init__(self, monkeypatch, **given):
        self.given, self.calls = given, []

        def trained(search, candidate, steps):
            return self.scored(candidate, steps)

        monkeypatch.setattr(auto.Search, "_trained", trained)

    def scored(self, candidate, steps):
        self.calls.append((candidate.label, steps))
        usual = scores(scale=0.0) if candidate is PLAIN else scores()
        found = self.given.get(candidate.label.replace(":", "_"), usual)
        if isinstance(found, Exception):
            raise found
        return found


def search_of(monkeypatch, build=plain, data=DATA, **options):
    """The search of a call of `fit`, before it begins."""
    kept = []

    def stop(search, out, resume):
        kept.append(search)
        raise InterruptedError

    with monkeypatch.context() as changed, pytest.raises(InterruptedError):
        changed.setattr("shoal.training.fit.decide", stop)
        quick(build, data, **options)
    return kept[0]


# The rule


def test_the_paired_difference_and_its_error_are_those_of_the_textbook():
    a, b = torch.tensor([1.0, 4.0, 4.0]), torch.tensor([0.0, 1.0, 2.0])
    change, error = paired(a, b)
    assert change == 2
    assert error == pytest.approx(1 / math.sqrt(3))
    weighted = paired(a, b, torch.tensor([2.0, 1.0, 0.0]))[0]
    assert weighted == pytest.approx((2 * 1 + 3) / 3)
    assert paired(a[:1], b[:1])[1] == math.inf


@pytest.mark.parametrize(
    ("clean", "shifted", "wins"),
    [(0, -1, True), (-1, -1, True), (-1, 0, True), (-2, 1, True), (1, -2, False), (0, 0, False),
     (0, 1, False)],
)  # fmt: skip
def test_a_candidate_wins_if_its_mean_nll_falls_and_clean_points_lose_nothing(clean, shifted, wins):
    found = Rule().winner({"candidate": scores(clean, shifted)}, scores(scale=0.0))
    assert found == ("candidate" if wins else None)


def test_clean_points_may_lose_one_standard_error():
    error = paired(scores().clean, scores(scale=0.0).clean)[1]
    assert error > 0
    plain_scores = scores(scale=0.0)
    assert Rule().winner({"a": scores(0.9 * error, -2 * error)}, plain_scores) == "a"
    assert Rule().winner({"a": scores(1.1 * error, -2 * error)}, plain_scores) is None
    assert Rule().winner({"a": scores(0.9 * error, -0.8 * error)}, plain_scores) is None


def test_the_lowest_mean_of_clean_and_shifted_nll_wins_among_those_that_may():
    given = {"a": scores(0, -0.3), "b": scores(0, -0.5), "c": scores(1, -1.9)}
    assert Rule().winner(given, scores(scale=0.0)) == "b"
    assert Rule().ranked(given) == ["c", "b", "a"]


def test_without_shifted_copies_the_clean_points_decide():
    one = PointScores(scores(-1).clean)
    assert Rule().winner({"a": one}, PointScores(scores(scale=0.0).clean)) == "a"


# The rounds


def test_every_space_has_strengths_and_the_plain_ensemble_is_always_a_candidate():
    for method in METHODS.values():
        if method.repulsion is not None:
            first, *others = strength_candidates(method)
            assert first is PLAIN
            strengths = STRENGTHS[method.repulsion.space.base]
            assert [candidate.strength for candidate in others] == list(strengths)
    assert method_candidates()[0] is PLAIN


def test_a_round_is_shorter_if_its_candidates_cost_more_than_is_left():
    candidates = method_candidates()
    price = sum(candidate.price for candidate in candidates)
    assert share_of(Round(0.1, None), candidates, left=price) == 0.1
    assert share_of(Round(0.5, None), candidates, left=price / 4) == 0.25


@pytest.mark.parametrize("asked", [{"method": "auto"}] + [
    {"method": name, "strength": "auto"} for name in ("kde", "f-kde", "forde")
])  # fmt: skip
def test_a_search_costs_at_most_its_budget_and_ends_with_the_best(monkeypatch, asked):
    script = Scripted(monkeypatch)
    found = search_of(monkeypatch, steps=800, **asked).run()
    candidates = (
        method_candidates()
        if asked["method"] == "auto"
        else strength_candidates(METHODS[asked["method"]])
    )
    price = {candidate.label: candidate.price for candidate in candidates}
    unit = 1.0 if asked["method"] == "auto" else max(price.values())
    spent = sum(steps * price[label] for label, steps in script.calls) / 800 / unit
    assert found.cost == pytest.approx(spent)
    assert spent <= BUDGET
    first = [label for label, steps in script.calls if steps == 800 * ROUNDS[0].share]
    assert first == [candidate.label for candidate in candidates]
    last = [label for label, steps in script.calls[len(first) :]]
    assert last[0] == PLAIN.label
    assert len(last) == 1 + ROUNDS[1].keep
    assert len({steps for _, steps in script.calls[len(first) :]}) == 1


def test_failing_candidates_lose_and_do_not_stop_the_search(monkeypatch):
    lost = {"kde_1000": DataError("all members diverged"), "forde_4": scores(-1, math.nan)}
    script = Scripted(monkeypatch, **lost, forde_16=scores(0, -1))
    choice = search_of(monkeypatch, method="auto").run()
    assert choice.chosen == "forde:16"
    failed = {
        candidate.label: candidate.failed for candidate in choice.candidates if candidate.failed
    }
    assert failed.keys() == {"kde:1000", "forde:4"}
    assert "diverged" in failed["kde:1000"]
    assert [label for label, _ in script.calls[4:]] in ([], ["ensemble", "forde:16"])


@pytest.mark.parametrize("error", [ConfigError("no real inputs"), RuntimeError("no derivative")])
def test_a_candidate_that_cannot_train_this_network_loses(monkeypatch, error):
    Scripted(monkeypatch, forde_4=error, forde_16=error, kde_1000=scores(0, -1))
    choice = search_of(monkeypatch, method="auto").run()
    assert choice.chosen == "kde:1000"
    assert {candidate.label for candidate in choice.candidates if candidate.failed} == {
        "forde:4",
        "forde:16",
    }


def test_axes_cost_what_their_products_take_beside_three_forward_passes():
    members = shoal_of(lambda: nn.Sequential(nn.Linear(30, 7, bias=False), nn.Linear(7, 2)))
    forward = 2 * (30 * 7 + 7 * 2)
    assert axes_price(members, torch.zeros(5, 30)) == pytest.approx(4 * 30 * 30 / (3 * forward))
    images = shoal_of(lambda: nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(32, 2)))
    forward = 2 * (16 * 9 * 2 + 32 * 2)
    found = axes_price(images, torch.zeros(5, 1, 6, 6))
    assert found == pytest.approx(4 * 36 * 36 / (3 * forward))


@pytest.mark.parametrize(
    "build, shape, wide",
    [
        (lambda: nn.Linear(60, 2, bias=False), (60,), False),  # a third of its width: 20 steps
        (lambda: nn.Linear(61, 2, bias=False), (61,), True),
        (lambda: nn.Sequential(nn.Conv2d(1, 2, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten()),
         (1, 16, 16), False),  # weights that are used many times
    ],
)  # fmt: skip
def test_candidates_are_left_out_by_the_count_of_operations(build, shape, wide):
    members, x = shoal_of(build), torch.zeros(5, *shape)
    assert (axes_price(members, x) > MOST_AXES_PRICE) == wide
    left = too_costly(method_candidates(), members, ArrayBatches(x, torch.zeros(5).long(), 5))
    assert set(left) == ({"forde:4", "forde:16"} if wide else set())


def test_a_pass_that_counts_operations_changes_nothing():
    members = shoal_of(lambda: nn.Sequential(nn.BatchNorm1d(3), nn.Dropout(), nn.Linear(3, 2)))
    before, state = frozen(members), torch.get_rng_state()
    axes_price(members.train(), torch.randn(8, 3, generator=torch.Generator().manual_seed(0)))
    assert not differ(frozen(members), before)
    assert torch.equal(torch.get_rng_state(), state)


def test_candidates_with_axes_are_left_out_where_they_cost_many_trainings(monkeypatch):
    x = torch.randn(100, 400, generator=torch.Generator().manual_seed(1))
    wide = {"build": lambda: nn.Linear(400, 2), "data": (x, (x[:, 0] > 0).long())}
    script = Scripted(monkeypatch, kde_1000=scores(0, -1), forde_4=scores(0, -2))
    choice = search_of(monkeypatch, **wide, method="auto").run()
    assert choice.chosen == "kde:1000"
    assert {label for label, _ in script.calls} == {"ensemble", "kde:1000"}
    assert {candidate.label for candidate in choice.candidates if candidate.failed} == {
        "forde:4",
        "forde:16",
    }
    named = search_of(monkeypatch, **wide, method="forde", strength="auto").run()
    assert not any(candidate.failed for candidate in named.candidates)  # the user named the method


def test_if_all_others_fail_the_plain_ensemble_is_chosen_at_once(monkeypatch):
    lost = {f"kde_{strength:g}": DataError("diverged") for strength in STRENGTHS["weights"]}
    script = Scripted(monkeypatch, **lost)
    choice = search_of(monkeypatch, method="kde", strength="auto", steps=100).run()
    assert choice.chosen == PLAIN.label
    assert len(script.calls) == 1 + len(STRENGTHS["weights"])


def test_errors_of_the_plain_ensemble_and_of_a_named_method_are_raised(monkeypatch):
    Scripted(monkeypatch, ensemble=DataError("no data"))
    with pytest.raises(DataError, match="no data"):
        search_of(monkeypatch, method="auto").run()
    Scripted(monkeypatch, kde_1000=ConfigError("not for this network"))
    with pytest.raises(ConfigError, match="not for this network"):
        search_of(monkeypatch, method="kde", strength="auto").run()


def test_a_diverged_member_makes_a_candidate_lose(monkeypatch):
    best = scores(-1, -1)

    def trained(search, candidate, steps):
        search.ensemble.alive[0] = candidate.strength != 1000.0
        return scores(scale=0.0) if candidate is PLAIN else best

    monkeypatch.setattr(auto.Search, "_trained", trained)
    choice = search_of(monkeypatch, method="kde", strength="auto").run()
    assert [candidate.label for candidate in choice.candidates if candidate.failed] == ["kde:1000"]
    assert choice.chosen != PLAIN.label


# Held-out data


def test_losses_of_points_average_to_the_nll():
    pred = Predictive(torch.randn(3, 10, 4), Categorical())
    y = torch.randint(4, (10,))
    found, counts = point_losses(pred, y)
    assert counts.all()
    assert float(found.mean()) == pytest.approx(shoal.evaluate(pred, y)["nll"], rel=1e-6)


def test_a_sequence_is_one_point_and_ignored_targets_do_not_count():
    pred = Predictive(torch.randn(3, 2, 5, 4), Categorical(ignore_index=-100))
    y = torch.randint(4, (2, 5))
    y[0, 1:] = -100
    found, _ = point_losses(pred, y)
    alone = Predictive(pred.members[:, :1, 0], Categorical())
    assert found.shape == (2,)
    assert float(found[0]) == pytest.approx(shoal.evaluate(alone, y[0, :1])["nll"], rel=1e-6)
    y[0] = -100
    found, counts = point_losses(pred, y)
    assert found.shape == (1,)
    assert counts.tolist() == [False, True]


def test_a_loader_of_tensors_has_shifted_copies(monkeypatch):
    loader = DataLoader(TensorDataset(*points(30)), 10)
    search = search_of(monkeypatch, method="auto", validation=loader)
    held_out = held_out_data(search.data.held, 0, "validation data")
    assert list(held_out.copies) == ["noise"]
    found = held_out.scores(search.ensemble, Categorical())
    assert len(found.clean) == len(found.shifted) == 30
    nll = shoal.evaluate(shoal.predict(search.ensemble, points(30)[0]), points(30)[1])["nll"]
    assert found.mean(found.clean) == pytest.approx(nll, rel=1e-5)


# A run that was chosen


SHORT = {"method": "kde", "strength": "auto", "epochs": 6}


@pytest.fixture
def wins(monkeypatch):
    """The candidate at strength 1000 wins every search."""
    return Scripted(monkeypatch, kde_1000=scores(0, -1))


@pytest.mark.parametrize("asked", [{"method": "auto"}, {"method": "kde", "strength": "auto"}])
def test_a_chosen_run_equals_one_with_these_settings_and_a_folder_keeps_the_choice(
    wins, tmp_path, asked
):
    run = quick(both, DATA, out=tmp_path / "run", **asked)
    assert run.choice.chosen == "kde:1000"
    assert (run.config["method"], run.config["strength"]) == ("kde", 1000.0)
    assert run.config["asked"] == asked
    assert run.choice.why in run.notes
    assert_same_run(run, quick(both, DATA, method="kde", strength=1000.0))
    again = shoal.load(tmp_path / "run", both)
    assert again.choice == run.choice
    assert again.config == RunFolder(tmp_path / "run").config()


def test_a_search_leaves_the_members_as_they_were_and_depends_on_the_seed_alone(monkeypatch):
    choices = []
    for _ in range(2):
        search = search_of(monkeypatch, both, **SHORT)
        before = frozen(search.ensemble)
        choices.append(search.run())
        assert_equal_trees(before, frozen(search.ensemble))
    one, other = (replace(choice, seconds=0, candidates=timeless(choice)) for choice in choices)
    assert one == other
    trials = [trial for candidate in one.candidates for trial in candidate.trials]
    assert len({trial.nll for trial in trials}) == len(trials)


@pytest.mark.parametrize("held", [None, points(30)])
def test_axes_are_fitted_once_to_the_data_of_all_trials(held, monkeypatch):
    fits = []

    def noted(repulsion, batches):
        fits.append(len(batches.x))
        return fitted(repulsion, batches)

    fitted = prepare._fitted
    monkeypatch.setattr(prepare, "_fitted", noted)
    asked = {"method": "forde", "strength": "auto", "epochs": 6, "validation": held}
    run = quick(plain, DATA, **asked)
    chose_forde = run.config["method"] == "forde"
    in_trials, whole = 80 if held is None else 100, held is None and chose_forde
    assert fits == [in_trials, *([100] if whole else [])]


def test_a_loader_is_read_anew_for_axes():
    loader = DataLoader(TensorDataset(*DATA), 20)
    batches = batches_of(loader, 20, 0, torch.device("cpu"), torch.float32)
    known = prepare.Fitted()
    repulsion = METHODS["forde"].repulsion
    one, other = (known.tensors(repulsion, batches) for _ in range(2))
    assert one is not other
    assert_equal_trees(one, other)


def test_candidates_train_on_the_batches_that_were_asked_for(monkeypatch):
    trials = []
    for batches in ("common", "own"):
        trained = search_of(monkeypatch, both, batches=batches, **SHORT).run()
        trials.append([trial.nll for each in trained.candidates for trial in each.trials])
    common, own = trials
    assert all(a != b for a, b in zip(common, own, strict=True))


def timeless(choice):
    return tuple(
        replace(candidate, trials=tuple(replace(trial, seconds=0) for trial in candidate.trials))
        for candidate in choice.candidates
    )


def test_the_members_are_restored_if_a_search_is_interrupted(monkeypatch):
    search = search_of(monkeypatch, both, **SHORT)
    before = frozen(search.ensemble)

    def broken(self, *given):
        raise KeyboardInterrupt

    monkeypatch.setattr("shoal.training.search.search.HeldOutData.scores", broken)
    with pytest.raises(KeyboardInterrupt):
        search.run()
    assert_equal_trees(before, frozen(search.ensemble))


def test_a_killed_run_goes_on_without_a_second_search(wins, tmp_path, monkeypatch):
    def stop(end):
        raise KeyboardInterrupt

    how = {"save_every": 0, **SHORT, "epochs": 2}
    with pytest.raises(KeyboardInterrupt):
        quick(both, DATA, out=tmp_path / "a", callbacks=[stop], **how)
    searches = len(wins.calls)
    run = quick(both, DATA, out=tmp_path / "a", resume=True, **how)
    assert len(wins.calls) == searches
    assert run.choice.chosen == "kde:1000"
    assert_same_run(run, quick(both, DATA, method="kde", strength=1000.0, epochs=2))
    longer = quick(both, DATA, out=tmp_path / "a", resume=True, **(how | {"epochs": 3}))
    assert len(wins.calls) == searches
    assert len(longer.history) == 3


def test_the_chosen_settings_continue_a_chosen_run(wins, tmp_path):
    quick(both, DATA, out=tmp_path / "a", **SHORT)
    given = {"method": "kde", "strength": 1000.0, "epochs": 7}
    run = quick(both, DATA, out=tmp_path / "a", resume=True, **given)
    assert run.choice.chosen == "kde:1000"
    assert shoal.load(tmp_path / "a", both).choice == run.choice


def test_a_folder_with_another_run_is_refused_before_the_search(wins, tmp_path):
    quick(both, DATA, out=tmp_path / "a", method="kde")
    for options, words in (({}, "already holds"), ({"resume": True}, "no such search")):
        with pytest.raises(ConfigError, match=words) as error:
            quick(both, DATA, out=tmp_path / "a", **options, **SHORT)
        assert_one_sentence(error.value)
    assert wins.calls == []


def test_a_damaged_choice_is_reported(wins, tmp_path):
    quick(both, DATA, out=tmp_path / "a", **SHORT)
    path = tmp_path / "a" / CHOICE
    table = json.loads(path.read_text())
    for changed in ({"chosen": "none"}, {"arms": 3}, {"points": "many"}, {"new": 1}):
        path.write_text(json.dumps({**table, **changed}))
        with pytest.raises(StorageError):
            shoal.load(tmp_path / "a", both)


@pytest.mark.parametrize("asked", [3, {}, {"method": 3}])
def test_a_config_with_another_question_is_refused(asked, tmp_path):
    with pytest.raises(StorageError, match="asked"):
        checked_config({"asked": asked}, tmp_path)


def test_members_are_added_to_a_chosen_run(wins, tmp_path):
    run = quick(plain, DATA, **SHORT)
    grown = shoal.grow(run, more=1, data=DATA, epochs=1, progress=False)
    assert grown.config["strength"] == 1000.0
    assert grown.choice is None
    again = shoal.grow(run, more=1, data=DATA, epochs=1, strength="auto", progress=False)
    assert again.choice.chosen == "kde:1000"


# What cannot be searched


def test_one_member_or_no_temperature_needs_no_search(monkeypatch):
    script = Scripted(monkeypatch)
    assert quick(shoal_of(members=1), DATA, method="auto").choice.chosen == PLAIN.label
    assert quick(data=DATA, temperature=0, **SHORT).choice.chosen == PLAIN.label
    assert script.calls == []


def test_the_plain_ensemble_has_no_strength_to_choose():
    for method in ("ensemble", METHODS["ensemble"]):
        with pytest.raises(ConfigError, match="method='auto'") as error:
            quick(data=DATA, method=method, strength="auto")
        assert_one_sentence(error.value)


def test_a_loader_needs_validation_data(wins):
    loader = DataLoader(TensorDataset(*DATA), 20)
    with pytest.raises(ConfigError, match="validation") as error:
        quick(plain, loader, **SHORT)
    assert_one_sentence(error.value)
    run = quick(plain, loader, method="auto")
    assert run.config["method"] == "ensemble"
    assert "validation" in run.choice.why
    assert wins.calls == []
    assert quick(plain, loader, validation=points(30), **SHORT).choice.chosen == "kde:1000"


def test_short_trainings_of_a_loader_do_not_change_the_run():
    loader = DataLoader(TensorDataset(*DATA), 20, shuffle=True)
    run = quick(plain, loader, validation=points(30), **SHORT)
    chosen = {name: run.config[name] for name in ("method", "strength")}
    assert_same_run(run, quick(plain, loader, validation=points(30), epochs=6, **chosen))


def test_data_that_can_be_read_only_once_cannot_be_searched(monkeypatch):
    batches = [(DATA[0][:20], DATA[1][:20])] * 4
    with pytest.raises(ConfigError, match="once"):
        quick(plain, iter(batches), steps=4, validation=points(30), method="kde", strength="auto")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"method": "auto", "strength": 3.0}, "leave strength out"),
        ({"method": "kde", "strength": "auto", "calibrated": True}, "calibrated"),
        ({"method": "auto", "calibrated": True}, "calibrated"),
        ({"strength": "strong"}, "auto"),
        ({"method": "auto", "keep_every": 1}, "keep_every"),
    ],
)
def test_options_that_do_not_go_together_are_refused(options, words):
    with pytest.raises(ConfigError, match=words) as error:
        quick(data=DATA, **options)
    assert_one_sentence(error.value)


def test_few_points_cannot_judge():
    with pytest.raises(ConfigError, match="points"):
        quick(data=points(8), **SHORT)
    assert quick(data=points(8), method="auto").config["method"] == "ensemble"


def test_own_loops_name_their_strength():
    with pytest.raises(ConfigError, match="auto"):
        shoal.Stepper(shoal_of(), n=100, method="kde", strength="auto")(DATA)


def test_weights_of_data_points_count_in_the_scores(monkeypatch):
    weight = torch.ones(100)
    weight[:50] = 3.0
    search = search_of(monkeypatch, sample_weight=weight, **SHORT)
    _, held_out = search._divided()
    found = held_out.scores(search.ensemble, Categorical())
    assert set(found.weight.tolist()) == {1.0, 3.0}
    assert search.run().points == 20


def test_images_and_regression_are_searched(monkeypatch):
    x, y = torch.rand(40, 1, 6, 6), torch.rand(40, 1)
    choice = quick(
        lambda: nn.Sequential(nn.Flatten(), nn.Linear(36, 1)), (x, y), method="f-kde",
        strength="auto",
    ).choice  # fmt: skip
    assert choice.shifts == ("noise", "translation", "contrast", "blur")
    assert choice.points == 8


@needs_gpu
def test_a_captured_pass_scores_as_an_eager_one(monkeypatch):
    x = torch.rand(400, 3, 8, 8, generator=torch.Generator().manual_seed(0)).cuda()
    y = torch.arange(400).remainder(5).cuda()
    held_out = held_out_data(ArrayBatches(x, y, 20), 0, "images")
    ensemble = shoal.Ensemble.init(lambda: ResNet20((4, 6)).build((3, 8, 8), 5), 3).to("cuda")
    replays, found = [], []
    replay = torch.cuda.CUDAGraph.replay
    monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", lambda g: replays.append(1) or replay(g))
    monkeypatch.setattr(CapturedForward, "LAUNCH_SHARE", 0.0)
    for seconds in (-1.0, 1e9):
        monkeypatch.setattr(CapturedForward, "CAPTURE_SECONDS", seconds)
        members = copy.deepcopy(ensemble)  # passes are kept for members that predicted before
        found.append(held_out.scores(members, Categorical()))
        passes = 5 * held_out.clean.steps_per_epoch  # the images, and four shifted copies
        assert len(replays) == passes - CapturedForward.WARM > 0
    captured, eager = found
    assert torch.equal(captured.clean, eager.clean)
    assert torch.equal(captured.shifted, eager.shifted)

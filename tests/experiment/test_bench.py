"""`shoal bench`: what is timed does what it says, and whatever cannot run is told, not raised."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from shoal.cli.main import main
from shoal.cli.parser import parse
from shoal.core.errors import ConfigError
from shoal.experiment.bench import agreement as agreements
from shoal.experiment.bench.battery import (
    LOOP,
    PRODUCTS,
    BareProducts,
    Case,
    EnsembleSteps,
    ModuleLoop,
    contestants,
    measure,
)
from shoal.experiment.bench.measure import Timing, interleave
from shoal.experiment.bench.networks import (
    NETWORKS,
    CausalTransformer,
    Network,
    RecurrentReader,
    SequenceCNN,
    perceptron,
)
from shoal.experiment.bench.plan import BenchPlan
from shoal.experiment.bench.prediction import LoopPrediction, PredictionWork
from shoal.experiment.variants import parse_method

pytestmark = pytest.mark.usefixtures("warm")

CPU = torch.device("cpu")
BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
TINY = ["--quick", "--quiet", "--device", "cpu", "--members", "2", "--batch-size", "4"]
TINY += ["--seconds", "0.02"]


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch, tmp_path):
    """What a trial of engines finds is not remembered on this machine."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def tiny(**changes):
    case = Case(perceptron(8), 3, 4, "float64", "sgd", CPU, points=10, lr=0.1)
    return replace(case, **changes)


# What is timed -------------------------------------------------------------------------------


SMALL = {
    "mlp": perceptron(8),
    "small-cnn": NETWORKS["small-cnn"],
    "gru": Network("gru", RecurrentReader("gru", 3), (4, 2)),
    "cnn1d": Network("cnn1d", SequenceCNN((2, 3), 3), (2, 8)),
    "gpt2": Network("gpt2", CausalTransformer(4, 1, 2), (5,), classes=7, words=7, places=(5,)),
}


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
@pytest.mark.parametrize("name", SMALL)
def test_the_module_loop_trains_the_ensemble_it_is_held_against(name, optimizer):
    network = SMALL[name]
    case = tiny(network=network, optimizer=optimizer)
    ensemble, twin = case.make(), case.make()
    loop, ours = ModuleLoop(case, twin), EnsembleSteps(case, ensemble, "ensemble", "vmap")
    loop(4), ours(4)  # an epoch of 4 + 4 + 2 points, and the first batch of the next
    for i, module in enumerate(loop.modules):
        for weight_name, weight in module.named_parameters():
            torch.testing.assert_close(ensemble.weights[weight_name][i], weight, atol=1e-9, rtol=0)


def test_bare_products_are_the_arithmetic_of_a_step():
    case = tiny(points=8)
    loop, bare = ModuleLoop(case, case.make()), BareProducts(case)
    with FlopCounterMode(display=False) as wanted:
        loop(1)
    with FlopCounterMode(display=False) as found:
        bare(1)
    assert found.get_total_flops() == wanted.get_total_flops() > 0


def test_steps_go_on_when_a_run_is_over():
    case = tiny()
    steps = EnsembleSteps(case, case.make(), "f-kde", "loop")
    steps.trainer.steps = 5
    steps(12)
    assert steps.trainer.step == 2


def test_axes_come_from_the_data_that_are_timed():
    case = tiny(points=12)
    steps = EnsembleSteps(case, case.make(), "forde+fraction=0.5", "vmap")
    steps(2)
    space = steps.trainer.mover.repulsion.space
    assert space.space.space.space.fraction == 0.5
    centred = case.data()[0] - case.data()[0].mean(0)
    along = centred @ space.space.basis
    factors = along.square().sum(0) / centred.square().sum() * centred.shape[1]
    torch.testing.assert_close(space.factor.square(), factors, atol=1e-8, rtol=1e-6)


@pytest.mark.parametrize(
    "word, sentence",
    [
        (
            "forde+fraction",
            "such as forde\\+fraction=0.25, or points and their name, "
            "such as f-kde\\+points=mixup, not 'fraction'",
        ),
        ("forde+share=0.5", "has no setting 'share'"),
        ("ford", "there is no method called 'ford'"),
    ],
)
def test_misspelt_methods_are_told(word, sentence):
    with pytest.raises(ConfigError, match=sentence):
        parse_method(word)


def test_a_bare_network_has_no_normalisation():
    layers = [*NETWORKS["resnet18-bare"].blueprint().modules()]
    assert any(isinstance(layer, torch.nn.Conv2d) for layer in layers)
    assert not any(isinstance(layer, torch.nn.BatchNorm2d) for layer in layers)


# Predictions ---------------------------------------------------------------------------------


def test_predictions_are_timed_beside_a_loop_that_says_the_same():
    case = tiny(points=10)
    ours, loop = PredictionWork(case), LoopPrediction(case)
    x = case.data()[0]
    torch.testing.assert_close(ours.outputs(x), loop.outputs(x), rtol=1e-12, atol=1e-12)
    calls = []
    ours.outputs = lambda x: calls.append(len(x))
    ours(5)  # two full batches of 4 points are there
    assert calls == [8, 8, 4]


def test_a_benchmark_of_predictions_has_speed_and_deviation(tmp_path, capsys):
    out = tmp_path / "predictions.json"
    models = ["--models", "mlp,vit", "--precision", "float32", "--members", "2"]
    assert main(["bench", *TINY, "--predict", *models, "-o", str(out)]) == 0
    value = json.loads(out.read_text())
    rows = value["predictions"]
    assert value["steps"] == [] and value["settings"]["predict"]
    kinds = [(row["model"], row["what"]) for row in rows]
    assert kinds == [(name, what) for name in ("mlp", "vit") for what in (LOOP, "shoal")]
    for row in rows:
        assert row["points_per_second"] == pytest.approx(1e3 * 4 / row["ms"])
    assert all(row["deviation"] < 1e-5 for row in rows if row["what"] == "shoal")
    shown = capsys.readouterr().out
    assert "ms per batch" in shown and shown.count("points/s") == 2


# Clocks --------------------------------------------------------------------------------------


def test_a_slow_round_that_hits_everybody_leaves_ratios_alone():
    quick, slow = Timing([1.0, 8.0, 2.0], 10), Timing([3.0, 24.0, 6.0], 5)
    assert slow.over(quick) == pytest.approx(3)
    assert quick.over(slow) == pytest.approx(1 / 3)


def test_quartiles_hold_half_of_the_rounds():
    timing = Timing([5.0, 1.0, 4.0, 2.0, 3.0], 1)
    assert (timing.median, timing.quartiles) == (3.0, (2.0, 4.0))
    assert timing.spread == pytest.approx(1 / 3)


def test_everything_takes_its_turn():
    order = []
    works = [lambda steps, who=who: order.append(who) for who in "abc"]
    timings = interleave(works, CPU, seconds=1e-9, block=0.0)
    rounds = len(timings[0].rounds)
    assert len(timings) == 3 and "".join(order).endswith("abc" * rounds)


# Batteries -----------------------------------------------------------------------------------


def test_what_cannot_run_has_a_reason_and_the_others_go_on():
    entries = contestants(tiny(), ["ensemble", "nonsense"], ["vmap", "warp", "chunk:2"])
    rows = {(row["what"], row["method"], row["engine"]): row for row in measure(entries, 1e-3)}
    failed = {key: row["error"] for key, row in rows.items() if "error" in row}
    assert set(failed) == {key for key in rows if "nonsense" in key or "warp" in key}
    assert all(reason and "\n" not in reason for reason in failed.values())
    for key in ((LOOP, None, None), (PRODUCTS, None, None), ("shoal", "ensemble", "chunk:2")):
        assert rows[key]["ms"] > 0
    assert rows[LOOP, None, None]["times_faster_than_loop"] == 1
    assert rows[PRODUCTS, None, None]["times_bare_products"] == 1


def test_threads_are_left_as_they_were():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        measure(contestants(tiny(), ["ensemble"], ["vmap"]), 1e-3)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


# Agreement -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("methods", "engines"),
    [
        (["f-kde"], ["auto", "vmap", "loop", "chunk:3"]),
        (["ensemble", "kde"], ["auto"]),
        pytest.param(["ensemble", "kde"], ["vmap", "loop", "chunk:3"], marks=pytest.mark.nightly),
    ],
)
def test_every_engine_agrees_with_float64_on_the_cpu(methods, engines):
    rows = agreements.agreement(methods, engines, CPU, ["float32"])
    assert len(rows) == len(agreements.COMPARED) * len(methods) * len(engines)
    assert max(row["deviation"] for row in rows) < 1e-5


def test_agreement_notices_an_engine_that_is_wrong(monkeypatch):
    monkeypatch.setattr(agreements, "COMPARED", agreements.COMPARED[:2])
    right = agreements.trainer

    def wrong(case, ensemble, method, engine, *rest, **options):
        case = replace(case, lr=1.001 * case.lr) if engine == "vmap" else case
        return right(case, ensemble, method, engine, *rest, **options)

    monkeypatch.setattr(agreements, "trainer", wrong)
    rows = agreements.agreement(["ensemble"], ["loop", "vmap"], CPU, ["float32"])
    deviations = {(row["model"], row["engine"]): row["deviation"] for row in rows}
    for (_, engine), deviation in deviations.items():
        assert (deviation > 1e-5) == (engine == "vmap")


# The command ---------------------------------------------------------------------------------


def test_the_result_has_every_figure(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(agreements, "COMPARED", agreements.COMPARED[:1])
    file = tmp_path / "figures.json"
    asked = ["--methods", "ensemble,nonsense", "--engines", "vmap", "--models", "mlp,small-cnn"]
    status = main(
        ["bench", *TINY, *asked, "--check", "--train-mnist-like", "--json", "-o", str(file)]
    )
    value = json.loads(capsys.readouterr().out)
    assert status == 0 and json.loads(file.read_text()) == value
    assert {"processor", "cores", "threads", "device", "load"} <= value["machine"].keys()
    assert {"python", "torch", "numpy", "safetensors"} <= value["versions"].keys()
    assert value["settings"]["members"] == 2 and value["settings"]["quick"]
    timed = [row for row in value["steps"] if "error" not in row]
    assert [row["what"] for row in timed] == [LOOP, PRODUCTS, "shoal", LOOP, "shoal"]
    promised = {"ms", "spread", "quartiles_ms", "rounds_ms", "member_samples_per_second"}
    promised |= {"memory_mib", "times_faster_than_loop", "times_bare_products", "threads"}
    assert all(promised <= row.keys() for row in timed)
    assert {row["precision"] for row in value["agreement"]} == {"float32", "bfloat16"}
    (trained, untrained) = value["training"]
    assert trained["seconds"] > 0 and trained["steps"] == 10 and "nonsense" in untrained["error"]


def test_the_table_names_everything(capsys):
    assert main(["bench", *TINY, "--models", "mlp", "--engines", "loop,warp"]) == 0
    shown = capsys.readouterr().out
    for words in ("module loop", "bare products", "f-kde, loop", "kde, warp cannot run: engine"):
        assert words in shown


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (["--models", "mlpp"], "mlp"),
        (["--members", "0"], "--members must be positive"),
        (["--batch-size", "-1"], "--batch-size must be positive"),
        (["--precision", "float8"], "there is no precision 'float8'"),
        (["--device", "nowhere"], "nowhere"),
    ],
)
def test_mistakes_are_told_in_a_line(wrong, words, capsys):
    assert main(["bench", "--quick", "--quiet", *wrong]) == 2
    complaint = capsys.readouterr().err
    assert words in complaint and len(complaint.splitlines()) == 1


def test_large_networks_wait_for_a_gpu():
    plan = BenchPlan.of(parse(["bench", "--device", "cpu"]))
    assert {"mlp", "small-cnn"} == set(plan.models)
    by_network = [{entry.case.network.name for entry in battery} for battery in plan.batteries()]
    assert by_network == [{"mlp"}, {"small-cnn"}]


def test_a_gpu_takes_one_engine_of_a_convolutional_network_at_a_time():
    plan = BenchPlan("cuda", ("mlp", "resnet18"), ("ensemble",), ("auto", "loop"))
    engines = [{entry.engine for entry in battery} - {None} for battery in plan.batteries()]
    assert engines == [{"auto", "loop"}, {"auto"}, {"loop"}]


def test_common_and_own_batches_are_timed_in_turns():
    asked = ["bench", "--device", "cpu", "--models", "mlp", "--batches", "common,own"]
    (battery,) = BenchPlan.of(parse([*asked, "--methods", "kde", "--engines", "auto"])).batteries()
    labels = [entry.label for entry in battery if entry.what == "shoal"]
    assert labels == ["mlp, kde, auto, float32", "mlp, kde, auto, own batches, float32"]


def test_an_unknown_network_is_refused_before_anything_runs():
    with pytest.raises(ConfigError, match="resnet18"):
        BenchPlan("cpu", ("resnet", "mlp"), (), ()).batteries()


# The scripts ---------------------------------------------------------------------------------


def script(name, *arguments):
    command = [sys.executable, str(BENCHMARKS / name), "--quick", "--device", "cpu", *arguments]
    return subprocess.run(
        [*command, "--threads", "1"], capture_output=True, text=True, check=True,
        cwd=BENCHMARKS.parent,
    )  # fmt: skip


def test_the_released_update_and_ours_do_the_same(tmp_path):
    file = tmp_path / "published.json"
    script(
        "published.py", "--members", "4", "--batch-size", "8", "--seconds", "0.02", "-o", str(file)
    )
    value = json.loads(file.read_text())
    assert set(value["difference"]) == {"kde", "f-kde"}
    assert max(value["difference"].values()) < 1e-12
    assert all(row["times_faster_than_published"] > 0 for row in value["steps"])

"""A limit of memory: the choice of chunks, the same numbers with every choice, and refusals."""

import gc
import json
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from small_runs import (
    assert_equal_trees,
    assert_one_sentence,
    assert_same_run,
    both,
    frozen,
    points,
    quick,
    shoal_of,
)
from torch import nn

import shoal
from shoal.cli.main import main
from shoal.core.errors import ConfigError
from shoal.engine.members.member_runner import MemberRunner
from shoal.engine.resources.footprint import Footprint
from shoal.engine.resources.memory import MemoryLimit
from shoal.inference.likelihoods import Categorical
from shoal.inference.posterior import Posterior
from shoal.inference.priors import Flat
from shoal.training.forces import forces
from shoal.training.mover.memory import (
    _ENDLESS,
    MemoryChoice,
    choose_runner,
    state_bytes,
    tried_out,
)
from shoal.training.options.options import Options
from shoal.training.step.drive import StepContext

MEMBERS, WIDTH = 6, 200
CPU = torch.device("cpu")


def wide() -> nn.Module:
    """Activations that outweigh the weights."""
    layers = [nn.Linear(3, WIDTH), nn.BatchNorm1d(WIDTH), nn.ReLU(), nn.Linear(WIDTH, 4)]
    return nn.Sequential(*layers)


def trained(memory, method="kde", **options):
    ensemble = shoal_of(wide, MEMBERS).to("cpu", torch.float64)
    return quick(ensemble, points(320), method=method, batch_size=160, memory=memory, **options)


def needed(method="kde", **options) -> dict[int, int]:
    """Bytes that suffice for some numbers of members at a time: a step is linear in them."""
    one, two = (
        trained("1TB", method, engine=engine, steps=1, **options).provenance["memory"]["predicted"]
        for engine in ("chunk:1", "chunk:2")
    )
    return {chunk: one + (chunk - 1) * (two - one) for chunk in (1, 2, 3, 4, MEMBERS)}


@pytest.mark.parametrize(
    "value, taken",
    [
        ("8GiB", 8 * 2**30), ("800MB", 800_000_000), ("1.5 GiB", 3 * 2**29), ("2kib", 2048),
        (4096, 4096), (8e9, 8_000_000_000), (0.5, 0.5), (1.0, 1.0), (1, 1), (None, None),
        ("auto", "auto"),
    ],
)  # fmt: skip
def test_sizes(value, taken):
    found = Options(memory=value).memory
    assert found == taken and type(found) is type(taken)


@pytest.mark.parametrize("value", ["8", "many", "8 GiB each", "-8GiB", "0MB", 0, -1, 1.5, True])
def test_what_is_no_size(value):
    with pytest.raises(ConfigError, match='^memory must be a size such as "8GiB"') as caught:
        Options(memory=value)
    assert_one_sentence(caught.value, "0.5")


METHODS = ["ensemble", "kde", "f-kde", "f-svgd", "forde-identity"]


@pytest.mark.parametrize(
    "method",
    [
        method if method in ("kde", "f-kde") else pytest.param(method, marks=pytest.mark.nightly)
        for method in METHODS
    ],
)
def test_numbers_are_the_same_with_every_choice(method):
    expected, limits = frozen(trained(None, method).ensemble), needed(method)
    for chunk, limit in limits.items():
        run = trained(limit, method)
        assert (run.provenance["memory"]["chunk"] or MEMBERS) <= chunk
        assert run.provenance["memory"]["predicted"] <= limit
        for name, tensor in frozen(run.ensemble).items():
            torch.testing.assert_close(tensor, expected[name], rtol=1e-10, atol=1e-10, msg=name)


def test_a_limit_that_is_wide_enough_changes_no_bit():
    plain, limited = quick(both, method="f-kde"), quick(both, method="f-kde", memory="1TB")
    assert_same_run(plain, limited)
    assert plain.notes == limited.notes


def test_the_choice_is_told_and_recorded():
    run = trained(needed()[3])
    assert any("chunks of 3" in note for note in run.notes)
    assert run.provenance["memory"]["chunk"] == 3


def test_chunks_are_equal_where_members_do_not_meet_before_the_backward_pass():
    limit = needed()[4]  # four and two members at a time would be no faster than three and three
    assert trained(limit, "kde").provenance["memory"]["chunk"] == 3
    assert trained(needed("f-kde")[4], "f-kde").provenance["memory"]["chunk"] == 4


@pytest.mark.parametrize("method", ["ensemble", "f-kde", "forde-identity"])
def test_chunks_but_the_first_repeat_their_forward_pass_where_members_meet(method):
    passes = []

    class Counted(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(3, 4)

        def forward(self, x):
            passes.append(1)
            return self.layer(x)

    repulsion = shoal.methods.get(method).repulsion
    ensemble, posterior = shoal_of(Counted, MEMBERS).train(), Posterior(Categorical(), Flat(), 40)
    passes.clear()
    forces(ensemble, posterior, repulsion, points(), mapping=MemberRunner("loop", chunk=2))
    assert len(passes) == (MEMBERS if method == "ensemble" else MEMBERS + MEMBERS - 2)


def test_a_limit_below_the_need_is_refused_before_training():
    ensemble = shoal_of(wide, MEMBERS)
    before = frozen(ensemble)
    with pytest.raises(ConfigError, match="needs at least") as caught:
        quick(ensemble, points(320), batch_size=160, memory="100kB")
    assert_one_sentence(caught.value, "97.7 KiB", "memory")
    assert_equal_trees(frozen(ensemble), before)
    least = re.search(r"at least ([\d.]+) ([KM]iB)", str(caught.value))
    run = quick(ensemble, points(320), batch_size=160, memory="".join(least.groups()))
    assert run.provenance["memory"]["chunk"] == 1


def test_what_needs_all_members_at_once_is_refused_or_runs_whole():
    attack = shoal.Adversarial(0.1, shared=True)
    whole = needed(adversarial=attack)[MEMBERS]
    assert trained(whole, adversarial=attack).provenance["memory"]["chunk"] is None
    with pytest.raises(ConfigError, match="too small"):
        trained(whole // 2, adversarial=attack)


def test_members_are_measured_in_training_mode():
    def predicted(p):
        def build():
            return nn.Sequential(nn.Linear(3, WIDTH), nn.Dropout(p), nn.Linear(WIDTH, 4))

        ensemble = shoal_of(build, 2)
        run = quick(ensemble, points(), memory="1TB", steps=1)
        assert not ensemble.training
        return run.provenance["memory"]["predicted"]

    assert predicted(0.5) > predicted(0.0)


def test_a_share_is_of_the_machine():
    table = trained(1.0).provenance["memory"]
    assert table["limit"] > 2**30 and table["chunk"] is None


@pytest.mark.parametrize("method", ["kde", "f-kde"])
def test_a_limited_run_resumes_with_the_same_numbers(tmp_path, method):
    limit = needed(method)[2]
    options = {"method": method, "batch_size": 160, "memory": limit, "epochs": 3}

    def start(folder, callbacks=(), **more):
        ensemble = shoal_of(wide, MEMBERS).to("cpu", torch.float64)
        given = options | more
        return quick(ensemble, points(320), out=folder, callbacks=callbacks, save_every=0, **given)

    whole = start(tmp_path / "whole")

    def stop(event):
        if event.epoch == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        start(tmp_path / "stopped", [stop])
    # The member runner comes from the checkpoint, also where there is more memory.
    again = start(tmp_path / "stopped", memory=None, resume=True)
    assert_same_run(again, whole)
    stored = json.loads((tmp_path / "whole" / "provenance.json").read_text())
    assert stored["memory"]["chunk"] == 2
    assert "memory" not in (tmp_path / "whole" / "config.toml").read_text()


def test_a_stepper_has_the_same_limit():
    limit, x_y = int(1.05 * needed()[2]), points(160)

    def moved(memory):
        ensemble = shoal_of(wide, MEMBERS).to("cpu", torch.float64)
        stepper = shoal.Stepper(ensemble, n=320, method="kde", memory=memory)
        stepper(x_y)
        return stepper

    whole, limited = moved(None), moved(limit)
    assert limited._mover.memory.mapping.chunk == 2 and whole._mover.memory.mapping.chunk is None
    for name, tensor in frozen(whole.ensemble).items():
        torch.testing.assert_close(frozen(limited.ensemble)[name], tensor, rtol=1e-10, atol=1e-10)
    with pytest.raises(ConfigError, match="needs at least"):
        moved("1kB")


def test_the_command_line_takes_a_limit(tmp_path, capsys):
    typed = ["fit", "digits", "epochs=1", "members=4", "model.hidden=[256]", "method=kde", "--json"]
    assert main([*typed, "-o", str(tmp_path / "run"), "--memory", "2.2MB"]) == 0
    notes = json.loads(capsys.readouterr().out)["notes"]
    assert any("to stay within 2.1 MiB" in note for note in notes)
    assert main([*typed, "-o", str(tmp_path / "other"), "--memory", "some"]) == 2
    assert "memory must be a size" in capsys.readouterr().err


def blocks() -> nn.Module:
    """Activations of blocks that outweigh their inputs."""
    inner = [
        nn.Sequential(nn.Linear(8, WIDTH), nn.BatchNorm1d(WIDTH), nn.Tanh(), nn.Linear(WIDTH, 8))
        for _ in range(4)
    ]
    return nn.Sequential(nn.Linear(3, 8), nn.Sequential(*inner), nn.Linear(8, 4))


@pytest.mark.parametrize("method", ["kde", "f-kde"])
def test_activations_are_computed_twice_where_those_of_one_member_do_not_fit(method):
    def run(memory, **options):
        ensemble = shoal_of(blocks, 3).to("cpu", torch.float64)
        options = {"method": method, "batch_size": 400, "steps": 2} | options
        return quick(ensemble, points(800), memory=memory, **options)

    whole, one = run(None), run("1TB", engine="chunk:1", steps=1)
    assert not one.provenance["memory"]["recompute"]
    light = run(int(0.75 * one.provenance["memory"]["predicted"]))
    assert light.provenance["memory"]["recompute"] and light.provenance["memory"]["chunk"] == 1
    assert any("activations twice" in note for note in light.notes)
    for name, tensor in frozen(whole.ensemble).items():
        torch.testing.assert_close(frozen(light.ensemble)[name], tensor, rtol=1e-9, atol=1e-9)


def test_a_captured_step_that_holds_too_much_is_captured_again_in_smaller_chunks():
    stepper = shoal.Stepper(shoal_of(wide, MEMBERS), n=320, method="kde", memory="1TB")
    stepper(points(160))
    mover = stepper._mover
    assert mover.memory.fits_captured() and mover.memory.mapping.chunk is None
    mover.memory.limit = SimpleNamespace(exceeded=True)
    for chunk in (3, 2, 1):
        with pytest.warns(shoal.ShoalWarning, match=f"chunks of {chunk}"):
            assert not mover.memory.fits_captured()
        assert mover.memory.mapping.chunk == chunk and mover.memory.captures
    assert not mover.memory.fits_captured() and not mover.memory.captures


@pytest.mark.parametrize(
    "spec, copies",
    [
        ({"name": "sgd"}, 0),
        ({"name": "sgd", "momentum": 0.9}, 1),
        ({"name": "adam"}, 2),
        ({"name": "adam", "amsgrad": True}, 3),
    ],
)
def test_states_of_an_optimiser(spec, copies):
    weights = {"w": torch.zeros(3, 50), "v": torch.zeros(3, 2, 5)}
    assert state_bytes(spec, 0.1, weights) == copies * 4 * (150 + 30)


def test_a_step_that_fails_on_its_own_leaves_the_choice_to_the_first_step():
    context = StepContext(posterior=Posterior(Categorical(), Flat(), 4), repulsion=None)
    fixed = Footprint(members=2, resident=1, gradients=1)
    runner, limit = MemberRunner("loop"), MemoryLimit(100, CPU, 0)
    choice = choose_runner(runner, context, fixed, limit, lambda most, mapping: None, CPU)
    assert choice.mapping == runner and choice.sentence is None
    with pytest.raises(ConfigError, match="at least"):
        little = MemoryLimit(1, CPU, 0)
        choose_runner(runner, context, fixed, little, lambda most, mapping: None, CPU)


def test_an_allocator_that_refuses_one_member_is_no_need_that_would_fit():
    context = StepContext(posterior=Posterior(Categorical(), Flat(), 4), repulsion=None)
    fixed, limit = Footprint(members=2, resident=1, gradients=1), MemoryLimit(100, CPU, 0)
    endless = replace(fixed, member=_ENDLESS)
    with pytest.raises(ConfigError, match="needs more, of which"):
        choose_runner(MemberRunner(), context, fixed, limit, lambda *_: endless, CPU)


@pytest.mark.parametrize(
    ("limit", "frugal", "chunk", "light", "told"),
    [
        (2000, False, None, False, None),
        (
            1000,
            False,
            None,
            True,
            "Members run with normalised layers twice to stay within",
        ),
        (790, False, 5, False, "Members run in chunks of 5 to stay within"),
        (550, False, 5, True, "in chunks of 5 and compute normalised layers twice to stay within"),
        (2000, True, 5, True, "in chunks of 5 and compute normalised layers twice to save memory."),
    ],
)
def test_cheap_layers_are_computed_twice_where_that_saves_a_pass(limit, frugal, chunk, light, told):
    context = StepContext(posterior=Posterior(Categorical(), Flat(), 4), repulsion=None)
    fixed = Footprint(members=10, resident=100, gradients=100)
    streams, room = MemberRunner("loop", streams=10), MemoryLimit(limit, CPU, 0)

    def measured(most, mapping):
        return replace(fixed, member=60 if mapping.light else 110)

    choice = choose_runner(streams, context, fixed, room, measured, CPU, True, frugal)
    choice = replace(choice, frugal=frugal)
    assert (choice.mapping.chunk, choice.mapping.light) == (chunk, light)
    assert (choice.sentence is None) if told is None else told in choice.sentence


MEASURED = {10: None, 5: 80, 4: 72, 3: 50, 2: 40, 1: 20}
"""Bytes that trial steps hold, by members at a time; ten do not fit at all."""


@pytest.mark.parametrize(
    ("limit", "captures", "chunk", "captured", "taken"),
    [
        (95, False, 5, False, 80),
        (95, True, 5, True, 95),  # ten bytes of velocity twice, and five members' cast weights
        (89, True, 4, True, 88),
        (58, True, 2, True, 58),
        (45, True, 1, True, 39),
        (38, True, 1, False, 20),  # fits, but not captured
    ],
)
def test_trial_steps_choose_the_largest_chunk_that_is_held(limit, captures, chunk, captured, taken):
    footprint = Footprint(members=10, resident=1, gradients=10, delayed=1)
    choice = MemoryChoice(MemberRunner("loop"), limit, footprint)
    tried = []

    def held(runner):
        tried.append(runner.chunk)
        return MEASURED[runner.chunk or 10]

    found, captures = tried_out(choice, held, 10, captures)
    assert (found.mapping.chunk, captures, found.tried) == (chunk, captured, taken)
    assert found.reduced and tried[:2] == [None, 5]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
class TestOnAGpu:
    def build(self):
        return shoal.models.ResNet18().build((3, 32, 32), 10)

    def run(self, memory, method="ensemble", **options):
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(640, 3, 32, 32, generator=generator)
        y = torch.randint(10, (640,), generator=generator)
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_reserved()
        run = shoal.fit(
            shoal.Ensemble.init(self.build, 4, seed=0), (x, y), method=method, steps=8,
            optimizer="sgd", lr=0.001, memory=memory, device="cuda", progress=False, **options
        )  # fmt: skip
        return run, torch.cuda.max_memory_reserved() - before, torch.cuda.max_memory_allocated()

    @pytest.mark.parametrize("engine", ["auto", "auto+eager"])
    def test_the_prediction_is_within_a_quarter(self, engine):
        run, _, peak = self.run("100GiB", engine=engine)
        predicted = run.provenance["memory"]["predicted"]
        assert 0.75 < predicted / peak < 1.25

    @pytest.mark.parametrize("method", ["ensemble", "f-kde"])
    @pytest.mark.parametrize("engine", ["auto", "auto+eager"])
    def test_the_limit_is_kept(self, method, engine):
        self.run("100GiB", method, engine=engine)  # libraries try kernels with more memory, once
        whole, _, peak = self.run("100GiB", method, engine=engine)
        limit = int(0.6 * peak)  # of what tensors take: freed blocks can always be given back
        limited, taken, _ = self.run(limit, method, engine=engine)
        assert taken <= limit and limited.provenance["memory"]["chunk"] is not None
        for name, tensor in frozen(whole.ensemble).items():
            if tensor.is_floating_point():
                other = frozen(limited.ensemble)[name]
                torch.testing.assert_close(
                    other,
                    tensor,
                    rtol=1e-3,
                    atol=1e-3,
                    msg=lambda text, name=name: f"{name}: {text}",
                )


def test_the_example_of_the_page_runs_in_chunks():
    page = (Path(__file__).parents[2] / "docs" / "memory.md").read_text()
    names = {}
    exec(re.search(r"```python\n(.*?)```", page, re.DOTALL)[1], names)
    assert 1 <= names["run"].provenance["memory"]["chunk"] < 8

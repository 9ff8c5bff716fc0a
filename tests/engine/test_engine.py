"""How a run is executed never changes what it computes."""

import warnings
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import shoal
from shoal.data.batches.sources import batches_of
from shoal.engine.kernels import small_matrices as small
from shoal.engine.members.member_runner import MemberRunner
from shoal.engine.members.precision import calculating_in
from shoal.engine.resources import autotune as trial
from shoal.engine.resources.plan import EnginePlan, has_convolutions, parse_engine
from shoal.training.loop.trainer import Trainer
from shoal.training.mover import mover as mover_module
from shoal.training.options.options import Options
from shoal.training.options.settings import Settings
from shoal.training.step.stages import Stages

MEMBERS = 4


class Convolutions(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(1, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        return self.head(torch.relu(self.norm(self.stem(x))).mean((-2, -1)))


def mlp():
    return nn.Sequential(nn.Flatten(), nn.Linear(36, 8), nn.ReLU(), nn.Linear(8, 3))


def data(dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(48, 1, 6, 6, generator=generator, dtype=torch.float64).to(dtype)
    return x, torch.randint(3, (48,), generator=generator)


def settings(engine="auto", method="f-kde", steps=10, precision=None):
    options = Options(
        method=shoal.methods.get(method).with_strength(30.0), likelihood="categorical",
        optimizer="sgd", lr=0.05, schedule="cosine", steps=steps, batch_size=12,
        annealing="linear", seed=3, precision=precision, engine=engine,
    )  # fmt: skip
    return Settings.resolve(options)


def ensemble_of(build, dtype=torch.float32):
    ensemble = shoal.Ensemble.init(build, MEMBERS, seed=1).to(dtype=dtype)
    return ensemble.train()


def trained(build, engine, method, dtype=torch.float32):
    ensemble = ensemble_of(build, dtype)
    trainer = Trainer(
        ensemble, settings(engine, method), batches_of(data(dtype), 12, 3, dtype=dtype)
    )
    for _ in trainer.run():
        pass
    return {name: tensor.detach().double() for name, tensor in ensemble.state.items()}


@pytest.mark.parametrize("method", ["ensemble", "kde", "svgd", "f-kde", "f-svgd"])
@pytest.mark.parametrize("build", [mlp, Convolutions])
def test_ten_steps_in_single_precision_follow_the_double_loop(build, method):
    exact = trained(build, "loop", method, torch.float64)
    for engine in ("vmap", "loop", "chunk:1", "chunk:3"):
        found = trained(build, engine, method)
        for name, tensor in exact.items():
            torch.testing.assert_close(found[name], tensor, rtol=1e-5, atol=1e-5, msg=name)


@pytest.mark.parametrize(
    "method",
    ["f-svgd", *(pytest.param(m, marks=pytest.mark.nightly) for m in ("ensemble", "kde")),
     "forde-identity"],
)  # fmt: skip
def test_compiled_stages_give_the_same_steps(method, monkeypatch):
    """Traced as for any compiler, and run without one, which not every machine has."""

    def traced():
        return Stages(*(torch.compile(s, dynamic=False, backend="aot_eager") for s in Stages()))

    monkeypatch.setattr(mover_module, "compiled_stages", traced)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="Dynamo detected")
        found = trained(Convolutions, "vmap+compile", method)
    for name, tensor in trained(Convolutions, "vmap", method).items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.parametrize("error", ["OutOfMemoryError", "not enough memory"])
def test_when_memory_runs_out_members_go_in_chunks_with_the_same_result(monkeypatch, error):
    expected = trained(Convolutions, "vmap", "f-kde")
    velocity_of = mover_module.velocity_of
    chunks = []

    def scarce(context, *args):
        chunk = context.mapping.chunk
        chunks.append(chunk)
        result = velocity_of(context, *args)
        if chunk is None or chunk > 1:
            raise {
                "OutOfMemoryError": torch.OutOfMemoryError("out"),
                "not enough memory": RuntimeError("DefaultCPUAllocator: not enough memory"),
            }[error]
        return result

    monkeypatch.setattr(mover_module, "velocity_of", scarce)
    with pytest.warns(shoal.ShoalWarning, match="chunks of") as caught:
        found = trained(Convolutions, "vmap", "f-kde")
    assert len(caught) == 2
    assert chunks[:4] == [None, 2, 1, 1]
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-5, atol=1e-6, msg=name)


def test_when_one_member_is_too_large_it_is_said(monkeypatch):
    def never(*args, **options):
        raise torch.OutOfMemoryError("out")

    monkeypatch.setattr(mover_module, "velocity_of", never)
    with pytest.raises(shoal.DataError, match="memory is too small for one member"):
        trained(mlp, "chunk:1", "kde")


def test_other_errors_are_not_taken_for_a_lack_of_memory(monkeypatch):
    def broken(*args, **options):
        raise RuntimeError("something else")

    monkeypatch.setattr(mover_module, "velocity_of", broken)
    with pytest.raises(RuntimeError, match="something else"):
        trained(mlp, "vmap", "kde")


def test_types_in_lower_precision():
    """Networks calculate in bfloat16; statistics, outputs, forces and weights do not."""
    seen = {}

    class Watched(Convolutions):
        def forward(self, x):
            h = self.stem(x)
            seen.update(inputs=x.dtype, convolved=h.dtype, filters=self.stem.weight.dtype)
            h = self.norm(h)
            seen.update(normed=h.dtype, scale=self.norm.weight.dtype)
            return self.head(torch.relu(h).mean((-2, -1)))

    ensemble = ensemble_of(Watched).compute_in(torch.bfloat16)
    posterior = shoal.Posterior(shoal.likelihoods.Categorical(), shoal.priors.Gaussian(), 48)
    repulsion = shoal.methods.get("f-kde").repulsion
    velocity, info = shoal.forces(
        ensemble, posterior, repulsion, data(), mapping=MemberRunner("loop")
    )
    low = torch.bfloat16
    assert seen == {"inputs": low, "convolved": low, "filters": low, "normed": low,
                    "scale": torch.float32}  # fmt: skip
    assert ensemble.buffers["norm.running_mean"].dtype == torch.float32
    assert {t.dtype for t in velocity.values()} == {torch.float32}
    assert info.loss.dtype == info.h2.dtype == torch.float32


def test_lower_precision_is_near_single_precision():
    """Two to three digits: bfloat16 has eight bits."""
    x, y = data()
    posterior = shoal.Posterior(shoal.likelihoods.Categorical(), shoal.priors.Gaussian(), 48)
    repulsion = shoal.methods.get("kde").repulsion
    full, _ = shoal.forces(ensemble_of(Convolutions), posterior, repulsion, (x, y),
                           mapping=MemberRunner("loop"))  # fmt: skip
    low, _ = shoal.forces(ensemble_of(Convolutions).compute_in(torch.bfloat16), posterior,
                          repulsion, (x, y), mapping=MemberRunner("loop"))  # fmt: skip
    for name, tensor in full.items():
        if name != "stem.bias":  # before batch statistics its gradient is zero but for rounding
            assert (low[name] - tensor).norm() < 0.05 * tensor.norm(), name


def test_a_run_in_lower_precision_learns_and_leaves_the_ensemble_as_it_was():
    x = torch.randn(200, 5)
    y = (x[:, 0] > 0).long()
    ensemble = shoal.Ensemble.init(lambda: nn.Linear(5, 2), 3)
    shoal.fit(ensemble, (x, y), epochs=30, lr=0.05, precision="bfloat16", progress=False)
    assert ensemble.dtype == torch.float32
    assert ensemble.groups[0].compute is None
    assert shoal.evaluate(shoal.predict(ensemble, x), y)["accuracy"] > 0.95


def settled(engine, ensemble, steps, device, waits_for_host=False):
    return parse_engine(engine).settled_for(
        ensemble.groups, torch.device(device), steps, waits_for_host
    )


class TestPlan:
    def test_the_rule_on_a_cpu(self):
        plan = settled("auto", ensemble_of(mlp), 10**6, "cpu")
        assert plan == EnginePlan(MemberRunner("vmap"), graph=False, compiled=False)

    @pytest.mark.parametrize(
        ("network", "precision", "compiled"),
        [("mlp", None, True), ("mlp", "bfloat16", True)]
        + [("convolutions", None, True), ("convolutions", "bfloat16", False)],
    )
    def test_long_runs_on_a_gpu_are_compiled_unless_layers_are_fused(
        self, network, precision, compiled
    ):
        ensemble = ensemble_of({"mlp": mlp, "convolutions": Convolutions}[network])
        with calculating_in(precision, ensemble):
            assert settled("auto", ensemble, 10**6, "cuda").compiled is compiled
            assert settled("auto", ensemble, 1000, "cuda").compiled is False
            assert settled("auto+compile", ensemble, 1000, "cuda").compiled is True

    def test_networks_on_a_shared_trunk_are_compiled_as_a_whole_on_request(self):
        trunk = nn.Linear(3, 4).requires_grad_(False)
        ensemble = shoal.Ensemble.init(lambda: nn.Sequential(trunk, nn.Linear(4, 2)), 2)
        assert settled("auto+compile", ensemble, 1000, "cuda").mapping.compiled
        assert not settled("auto", ensemble, 10**6, "cuda").mapping.compiled
        assert not settled("auto+compile", ensemble_of(mlp), 1000, "cuda").mapping.compiled

    def test_a_step_that_waits_for_the_host_is_not_captured(self):
        ensemble = ensemble_of(mlp)
        assert settled("auto", ensemble, 10**6, "cuda").graph
        waiting = settled("auto", ensemble, 10**6, "cuda", waits_for_host=True)
        assert not waiting.graph and not waiting.compiled

    def test_a_plan_can_be_forced(self):
        assert parse_engine("chunk:3").mapping == MemberRunner(chunk=3)
        assert parse_engine("loop+eager") == EnginePlan(
            MemberRunner("loop"), graph=False, compiled=False
        )
        assert parse_engine("vmap+compile").compiled is True

    @pytest.mark.parametrize("engine", ["vmapp", "chunk:0", "vmap+fast", "", "+eager"])
    def test_a_name_that_is_none_is_refused(self, engine):
        with pytest.raises(shoal.ConfigError, match="engine"):
            parse_engine(engine)

    def test_convolutions_are_found(self):
        assert has_convolutions(ensemble_of(Convolutions).groups)
        assert not has_convolutions(ensemble_of(mlp).groups)

    @pytest.mark.parametrize(("method", "waits"), [("ssge", True), ("sge", False), ("kde", False)])
    def test_methods_that_need_eigenpairs_are_not_captured(self, method, waits):
        where = MEMBERS, torch.device("cpu"), torch.float32
        assert settings(method=method).waits_for_host(*where) is waits

    def test_eigenpairs_of_few_members_do_not_wait_where_our_kernels_run(self, monkeypatch):
        monkeypatch.setattr(small, "small_kernels", SimpleNamespace(LARGEST=64))
        gpu = torch.device("cuda")
        assert not small.waits_for_host(gpu, torch.float32, 64)
        assert small.waits_for_host(gpu, torch.float32, 65)
        assert small.waits_for_host(gpu, torch.float64, 5)
        assert small.waits_for_host(torch.device("cpu"), torch.float32, 5)


class TestTrial:
    @pytest.fixture(autouse=True)
    def cache(self, tmp_path, monkeypatch):
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    def test_the_faster_mapping_is_remembered(self, monkeypatch):
        times = {"vmap": 2.0, "loop": 1.0}
        monkeypatch.setattr(trial, "_seconds", lambda step, mapping: times[mapping.kind])
        ensemble, shape = ensemble_of(Convolutions), torch.Size((12, 1, 6, 6))
        assert trial.faster_runner(None, ensemble.groups, shape) == MemberRunner("loop")
        times["vmap"] = 0.5
        assert trial.faster_runner(None, ensemble.groups, shape) == MemberRunner("loop")
        assert trial.faster_runner(None, ensemble.groups, torch.Size((6, 1, 6, 6))) == MemberRunner(
            "vmap"
        )

    def test_a_spoilt_memory_is_no_memory(self, tmp_path, monkeypatch):
        (tmp_path / "shoal").mkdir()
        (tmp_path / "shoal" / "engines.json").write_text("[not json")
        monkeypatch.setattr(trial, "_seconds", lambda step, mapping: 1.0)
        found = trial.faster_runner(None, ensemble_of(Convolutions).groups, torch.Size((1,)))
        assert found.kind in ("vmap", "loop")

    def test_a_trial_changes_nothing(self):
        ensemble = ensemble_of(Convolutions)
        before = {name: tensor.clone() for name, tensor in ensemble.state.items()}
        trainer = Trainer(ensemble, settings(steps=1000), batches_of(data(), 12, 3))
        threads = torch.get_num_threads()
        assert 1 <= trainer.autotune_threads() <= threads
        assert torch.get_num_threads() == threads
        for name, tensor in ensemble.state.items():
            assert torch.equal(tensor, before[name]), name

    def test_a_short_run_is_not_tried(self, monkeypatch):
        monkeypatch.setattr(trial, "_seconds", lambda *_: pytest.fail("tried"))
        with warnings.catch_warnings():
            trainer = Trainer(ensemble_of(mlp), settings(steps=10), batches_of(data(), 12, 3))
            trainer.autotune_threads()

"""Shared tensors: stored once, computed once, and trained together as a literal loop does."""

import copy
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.func import functional_call

import shoal
from shoal.core.errors import ConfigError
from shoal.core.random import generator
from shoal.engine.members.member_runner import MemberRunner
from shoal.inference.posterior import Posterior
from shoal.inference.priors import Gaussian
from shoal.interaction import methods
from shoal.interaction.axes import Inputs, fitted
from shoal.training.forces import forces

ENGINES = [MemberRunner(), MemberRunner("loop"), MemberRunner(chunk=2)]


class Trunk(nn.Module):
    """A convolutional trunk with batch normalisation."""

    calls = 0

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4)

    def forward(self, x):
        Trunk.calls += 1
        return self.norm(self.conv(x)).relu().mean((2, 3))


class Network(nn.Module):
    """A trunk with a private head."""

    def __init__(self, trunk: nn.Module, train_trunk: bool = False) -> None:
        super().__init__()
        self.trunk = trunk.requires_grad_(train_trunk).train(train_trunk)
        self.head = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))

    def forward(self, x):
        return self.head(self.trunk(x))


def frozen(members: int = 6) -> shoal.Ensemble:
    trunk = Trunk()
    trunk(torch.randn(50, 1, 6, 6, generator=generator(0, "statistics")))
    return shoal.Ensemble.init(lambda: Network(copy.deepcopy(trunk)), members)


def batch(points: int = 8, dtype: torch.dtype = torch.float32):
    random = generator(1, "batch")
    x = torch.randn(points, 1, 6, 6, generator=random).to(dtype)
    return x, torch.randint(3, (points,), generator=random)


def bytes_of(ensemble: shoal.Ensemble) -> int:
    """Bytes of all tensors that an ensemble holds, its networks included."""
    tensors = list(ensemble.state.values())
    for group in ensemble.groups:
        for module in (group.prototype, group.skeleton):
            own = [*module.parameters(), *module.buffers()]
            tensors += [tensor for tensor in own if not tensor.is_meta]
        tensors += group.initial.values()
    places = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(places.values())


def test_a_frozen_trunk_is_held_once():
    trunk = nn.Linear(3000, 4)

    def build():
        return Network(copy.deepcopy(trunk))

    ensemble = shoal.Ensemble.init(build, 20)
    private = sum(p.numel() for p in build().head.parameters())
    held = 4 * (trunk.weight.numel() + trunk.bias.numel() + 20 * private)
    assert bytes_of(ensemble) == pytest.approx(held, rel=0.01)
    assert set(ensemble.shared) == {"trunk.weight", "trunk.bias"}
    assert not ensemble.trained_shared
    assert {name.split(".")[0] for name in ensemble.weights} == {"head"}


def test_outputs_equal_those_of_the_networks():
    ensemble = frozen()
    x, _ = batch()
    for engine in ENGINES:
        outputs = ensemble(x, engine)
        for i, module in enumerate(ensemble):
            torch.testing.assert_close(outputs[i], module(x))


def test_frozen_tensors_that_differ_stay_private():
    ensemble = shoal.Ensemble.init(lambda: Network(Trunk()), 3)
    assert "trunk.conv.weight" in ensemble.buffers
    assert not torch.equal(*ensemble.buffers["trunk.conv.weight"][:2])


def test_statistics_that_training_moves_stay_private():
    ensemble = shoal.Ensemble.init(lambda: Network(Trunk(), train_trunk=True), 3)
    assert "trunk.norm.running_mean" in ensemble.buffers


def test_a_buffer_that_forward_writes_to_becomes_private():
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(2, 2)
            self.register_buffer("seen", torch.zeros(2))
            self.register_buffer("constant", torch.ones(2))

        def forward(self, x):
            y = self.head(x) * self.constant
            if self.training:
                self.seen.add_(y.detach().mean(0))
            return y

    ensemble = shoal.Ensemble.init(Counting, 3)
    x = torch.randn(4, 2, generator=generator(0, "x"))
    ensemble.keep_written(x)
    assert set(ensemble.buffers) == {"seen"} and set(ensemble.shared) == {"constant"}
    outputs = ensemble.train()(x)
    torch.testing.assert_close(ensemble.buffers["seen"], outputs.detach().mean(1))


def test_the_trunk_runs_once_and_stays_in_evaluation_mode():
    ensemble = frozen()
    x, y = batch(40)
    ensemble.keep_written(x[:2])
    for engine in (MemberRunner(), MemberRunner("loop")):
        ensemble.train()(x, engine)
    before = ensemble.shared["trunk.norm.running_mean"].clone()
    shoal.fit(ensemble, (x, y), epochs=2, batch_size=10, progress=False)
    assert torch.equal(ensemble.shared["trunk.norm.running_mean"], before)
    assert not ensemble.groups[0].skeleton.trunk.training


def test_a_name_that_is_not_there_is_refused():
    with pytest.raises(ConfigError, match=r"trunk\.conv\.weight"):
        shoal.Ensemble.init(lambda: Network(Trunk(), True), 2, shared=("trunk.conv.wieght",))
    with pytest.raises(ConfigError, match="one function"):
        shoal.Ensemble.init(lambda: nn.Linear(2, 2), 2, shared=("*",))
    with pytest.raises(ConfigError, match="shared must be a list"):
        shoal.Ensemble.init(lambda: nn.Linear(2, 2), 2, shared="weight")


class Shared(nn.Module):
    """A network whose first layer members train together."""

    shared_tensors = ("first.*",)

    def __init__(self) -> None:
        super().__init__()
        self.first, self.drop = nn.Linear(4, 6), nn.Dropout(0.3)
        self.last = nn.Linear(6, 3)

    def forward(self, x):
        return self.last(self.drop(self.first(x).tanh()))


METHODS = ["ensemble", "kde", "sge", "ssge", "svgd", "f-kde", "f-sge", "f-svgd", "forde"]


def as_copies(ensemble: shoal.Ensemble) -> shoal.Ensemble:
    """The same members, each with its own copy of the shared tensors."""
    own = shoal.Ensemble.init(Shared, ensemble.members)
    own.to(ensemble.dtype)
    own.groups[0].rearrange((), list(own.shared))
    with torch.no_grad():
        for name, tensor in own.weights.items():
            source = ensemble.weights.get(name)
            tensor.copy_(ensemble.shared[name] if source is None else source)
    return own


@pytest.mark.parametrize("engine", ENGINES, ids=str)
@pytest.mark.parametrize("method", METHODS)
def test_shared_tensors_move_by_the_mean_of_the_members_velocities(method, engine):
    """With a private copy for every member, and the same kernel, the mean velocity is the same.

    Weight-space kernels of the copies see equal coordinates, so distances do not change.
    """
    ensemble = shoal.Ensemble.init(Shared, 5, seed=3).to(torch.float64)
    x = torch.randn(7, 4, generator=generator(5, "x"), dtype=torch.float64)
    y = torch.randint(3, (7,), generator=generator(6, "y"))
    repulsion = methods.get(method).repulsion
    if method == "forde":
        repulsion = replace(repulsion, space=fitted(repulsion.space, Inputs(lambda: iter([x]))))
    posterior = Posterior(shoal.likelihoods.Categorical(), Gaussian(0.5), n=20)
    given = {"mapping": engine, "seed": 2, "step": 4, "annealing": 0.7}
    ensemble.train()
    velocity, _ = forces(ensemble, posterior, repulsion, (x, y), **given)
    copies = as_copies(ensemble).train()
    literal, _ = forces(copies, posterior, repulsion, (x, y), **given)
    for name, tensor in velocity.items():
        wanted = literal[name].mean(0) if name in ensemble.shared else literal[name]
        torch.testing.assert_close(tensor, wanted, rtol=1e-10, atol=1e-12)


def test_a_plain_step_equals_a_torch_loop_with_one_shared_parameter():
    ensemble = shoal.Ensemble.init(Shared, 4).to(torch.float64)
    x = torch.randn(9, 4, generator=generator(5, "x"), dtype=torch.float64)
    y = torch.randint(3, (9,), generator=generator(6, "y"))
    modules = [module.double() for module in ensemble]
    for module in modules[1:]:
        module.first = modules[0].first
    loss = sum(nn.functional.cross_entropy(module(x), y) for module in modules)
    loss.backward()
    first = modules[0].first.weight
    expected = first.detach() - 0.1 * first.grad / 4
    stepper = shoal.Stepper(ensemble, n=9, method="ensemble", prior="flat", optimizer="sgd", lr=0.1)
    ensemble.eval()
    stepper((x, y))
    torch.testing.assert_close(ensemble.shared["first.weight"].detach(), expected)
    last = modules[2].last.weight
    torch.testing.assert_close(
        ensemble.weights["last.weight"][2].detach(), last.detach() - 0.1 * last.grad
    )


def test_a_diverged_member_does_not_spoil_what_all_train():
    ensemble = shoal.Ensemble.init(Shared, 4)
    with torch.no_grad():
        ensemble.weights["last.weight"][1] = torch.inf
    x, y = torch.randn(40, 4), torch.arange(40) % 3
    with pytest.warns(shoal.ShoalWarning, match="Member 1 diverged"):
        run = shoal.fit(ensemble, (x, y), method="ensemble", epochs=3, progress=False)
    assert ensemble.shared["first.weight"].isfinite().all()
    assert run.ensemble.alive.tolist() == [True, False, True, True]
    assert ensemble.weights["last.weight"][0].isfinite().all()


@pytest.mark.parametrize("method", ["kde", "f-kde", "svgd"])
def test_save_load_resume_and_grow(tmp_path, method):
    x, y = torch.randn(60, 4, generator=generator(0, "x")), torch.arange(60) % 3
    given = {"method": method, "batch_size": 20, "progress": False, "clip": 0.5}

    def fresh():
        return shoal.Ensemble.init(Shared, 3)

    whole = shoal.fit(fresh(), (x, y), epochs=4, out=tmp_path / "whole", **given)
    stop = [lambda event: (_ for _ in ()).throw(KeyboardInterrupt) if event.epoch == 2 else None]
    with pytest.raises(KeyboardInterrupt):
        shoal.fit(
            fresh(), (x, y), epochs=4, out=tmp_path / "cut", save_every=0, callbacks=stop, **given
        )
    again = shoal.fit(fresh(), (x, y), epochs=4, out=tmp_path / "cut", resume=True, **given)
    loaded = shoal.load(tmp_path / "cut", Shared)
    for name, tensor in whole.ensemble.state.items():
        assert torch.equal(tensor, again.ensemble.state[name]), name
        assert torch.equal(tensor, loaded.ensemble.state[name]), name
    assert set(loaded.ensemble.trained_shared) == {"first.weight", "first.bias"}
    grown = shoal.grow(loaded, 2, data=(x, y), epochs=1, progress=False)
    assert grown.ensemble.members == 5
    for name, tensor in loaded.ensemble.state.items():
        rows = grown.ensemble.state[name]
        kept = rows if name.startswith("shared/") else rows[:3]
        assert torch.equal(kept, tensor), f"{name}: growing must not change the old members"


def test_a_run_stores_a_frozen_trunk_once(tmp_path):
    trunk = nn.Linear(20_000, 4)
    data = torch.randn(12, 20_000), torch.arange(12) % 3

    def build():
        return Network(copy.deepcopy(trunk))

    ensemble = shoal.Ensemble.init(build, 10)
    run = shoal.fit(
        ensemble, data, epochs=3, batch_size=4, out=tmp_path / "run", save_every=0, progress=False,
        method="kde",
    )  # fmt: skip
    size = sum(path.stat().st_size for path in (tmp_path / "run").rglob("*") if path.is_file())
    assert size < 1.2 * 4 * trunk.weight.numel()
    loaded = shoal.load(tmp_path / "run", lambda: Network(nn.Linear(20_000, 4)))
    x = data[0]
    torch.testing.assert_close(loaded.ensemble(x), run.ensemble(x))
    changed = tmp_path / "run" / "shared.safetensors"
    content = bytearray(changed.read_bytes())
    content[-1] ^= 1
    changed.write_bytes(content)
    with pytest.raises(shoal.ShoalError):
        shoal.load(tmp_path / "run", build)


def test_old_states_with_a_trunk_per_member_still_load(tmp_path):
    ensemble = frozen(3)
    old = {name: t for name, t in ensemble.state.items() if not name.startswith("shared/")}
    for name, tensor in ensemble.shared.items():
        old[f"buffers/{name}"] = tensor.expand(3, *tensor.shape).clone()
    loaded = shoal.Ensemble.from_state(old, lambda: Network(Trunk()))
    x, _ = batch()
    torch.testing.assert_close(loaded(x), ensemble(x))


def test_a_member_is_an_ordinary_module():
    ensemble = frozen()
    x, _ = batch()
    module = ensemble.member(2)
    tensors = dict(module.named_parameters()) | dict(module.named_buffers())
    assert not any(tensor.is_meta for tensor in tensors.values())
    with torch.no_grad():
        module.trunk.conv.weight.zero_()
    assert ensemble.shared["trunk.conv.weight"].abs().sum() > 0
    torch.testing.assert_close(functional_call(module, {}, (x,)).shape, torch.Size([8, 3]))


class Counted(nn.Module):
    """A network whose trunk multiplies by a frozen matrix and counts the products."""

    products = 0

    def __init__(self, spoils: str = "") -> None:
        super().__init__()
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        nn.init.eye_(self.frozen.weight)
        nn.init.zeros_(self.frozen.bias)
        self.head, self.spoils = nn.Linear(4, 3), spoils

    def forward(self, x):
        h = Product.apply(x, self.frozen.weight)
        h = torch.tanh(h) + torch.arange(4.0)
        if self.spoils == "read early":
            early = self.head(h)
            return early + self.head(h.mul_(2))
        if self.spoils == "written":
            h.add_(self.head.bias.sum())
        if self.spoils == "random":
            h = nn.functional.dropout(h, 0.5)
        return self.head(h.relu_())


class Product:
    """x W^T by a torch function that is counted."""

    @staticmethod
    def apply(x, weight):
        return torch.nn.functional.linear(x, weight)


class Counting(torch.overrides.TorchFunctionMode):
    """Counts the calls of linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.linear += func is torch.nn.functional.linear
        return func(*args, **(kwargs or {}))


def test_a_loop_computes_the_trunk_once():
    ensemble = shoal.Ensemble.init(Counted, 5)
    x = torch.randn(6, 4, generator=generator(0, "x"))
    with Counting() as counting:
        outputs = ensemble(x, MemberRunner("loop"))
    assert counting.linear == 1 + 5
    for i, module in enumerate(ensemble):
        torch.testing.assert_close(outputs[i], module(x))


@pytest.mark.parametrize("spoils", ["read early", "written", "random"])
def test_a_loop_repeats_what_members_do_not_compute_alike(spoils):
    ensemble = shoal.Ensemble.init(lambda: Counted(spoils), 3)
    x = torch.randn(6, 4, generator=generator(0, "x"))
    for _ in range(2):
        outputs = ensemble(x, MemberRunner("loop"))
        if spoils != "random":
            for i, module in enumerate(ensemble):
                torch.testing.assert_close(outputs[i], module(x))
    if spoils == "random":
        alike = shoal.Ensemble.init(lambda: Counted(spoils), 2)
        with torch.no_grad():
            for tensor in alike.weights.values():
                tensor[1] = tensor[0]
        for _ in range(2):
            first, second = alike(x, MemberRunner("loop"))
            assert not torch.equal(first, second), "members draw their own dropout masks"

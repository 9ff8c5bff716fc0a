"""Members with batches of their own: an ensemble of networks that were trained alone."""

import pytest
import torch
from small_runs import (
    BATCH,
    CLASSES,
    ENGINES,
    Fuse,
    Pairs,
    assert_equal_trees,
    assert_one_sentence,
    assert_same_run,
    assert_trained_alone,
    both,
    differ,
    frozen,
    normed,
    plain,
    points,
    quick,
    shoal_of,
)
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from triton_ready import needs_gpu

import shoal
from shoal.core.errors import ConfigError, DataError, ShoalWarning
from shoal.core.random import derive, key
from shoal.data.batches.augment import CropFlip, augmented
from shoal.data.batches.orders import Orders
from shoal.engine.processes.mesh import Mesh
from shoal.training.members.division import check_mesh
from shoal.training.options import settings as settings_module
from shoal.training.options.options import Options
from shoal.training.options.settings import Settings

MEMBERS, EPOCHS, RATE, STD = 5, 3, 0.1, 0.7
SIZES = 3 * [BATCH] + [7]  # the last batch of 37 points is smaller
N = sum(SIZES)
SGD = {"optimizer": "sgd", "lr": RATE, "prior": {"name": "gaussian", "std": STD}}


def own(build=plain, data=None, members=MEMBERS, **options):
    """A run with batches of their own, in float64."""
    data = points(N) if data is None else data
    options = {"epochs": EPOCHS, "precision": "float64", "batches": "own"} | options
    return quick(shoal_of(build, members), data, **options)


def alone(build, x, y, loss, weight=None, change=lambda x, member, step: x):
    """The members of `own`, each trained by itself in a loop of torch."""
    orders = Orders(N, BATCH, own=range(MEMBERS))
    trained = []
    for member, network in enumerate(shoal_of(build, MEMBERS).to("cpu", torch.float64)):
        optimizer = torch.optim.SGD(network.parameters(), lr=RATE)
        network.train()
        step = 0
        for epoch in range(EPOCHS):
            for rows in orders(epoch).split(orders.width):
                mine = rows.reshape(MEMBERS, -1)[member]
                each = loss(network(change(x[mine], member, step)), y[mine])
                each = each if weight is None else each * weight[mine]
                total = N if weight is None else weight.sum()
                counted = len(mine) if weight is None else weight[mine].sum()
                squares = sum(p.square().sum() for p in network.parameters())
                optimizer.zero_grad()
                (each.sum() / counted + squares / (2 * STD**2 * total)).backward()
                optimizer.step()
                step += 1
        trained.append(network)
    return trained


@pytest.mark.parametrize("how", ENGINES, ids=str)
@pytest.mark.parametrize("build", [plain, normed])
def test_a_plain_ensemble_is_networks_trained_alone(build, how):
    x, y = points(N)
    networks = alone(build, x.double(), y, lambda f, t: F.cross_entropy(f, t, reduction="none"))
    assert_trained_alone(own(build, method="ensemble", **SGD, **how), networks)


def test_so_it_is_with_weights_of_points():
    x, y = points(N)
    weight = torch.arange(N) % 4 / 2.0
    loss = lambda f, t: F.cross_entropy(f, t, reduction="none")  # noqa: E731
    run = own(method="ensemble", sample_weight=weight, **SGD)
    assert_trained_alone(run, alone(plain, x.double(), y, loss, weight.double()))


@pytest.mark.parametrize("columns", [(), (1,), (2,)], ids=["[N]", "[N, 1]", "[N, 2]"])
def test_so_it_is_with_numbers_as_targets(columns):
    x, _ = points(N)
    y = torch.sin(x[:, :2] if columns == (2,) else x[:, :1]).reshape(N, *columns)
    outputs = 2 if columns == (2,) else 1
    build = lambda: nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, outputs))  # noqa: E731

    def loss(f, t):
        return 0.5 * ((f - t.reshape(f.shape)) / 0.5).square().sum(1)

    fixed = shoal.likelihoods.Gaussian(noise_std=0.5)
    run = own(build, (x, y), method="ensemble", likelihood=fixed, **SGD)
    assert_trained_alone(run, alone(build, x.double(), y.double(), loss))


def test_every_member_has_its_own_augmentation():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(N, 1, 4, 4, generator=generator, dtype=torch.float64)
    y = torch.arange(N) % CLASSES
    build = lambda: nn.Sequential(nn.Flatten(), nn.Linear(16, CLASSES))  # noqa: E731
    crop = CropFlip(padding=1)

    def change(x, member, step):
        return augmented(crop, x[None], key(0, "augment", step), range(member, member + 1), True)[0]

    loss = lambda f, t: F.cross_entropy(f, t, reduction="none")  # noqa: E731
    run = own(build, (x, y), method="ensemble", augment=crop, **SGD)
    assert_trained_alone(run, alone(build, x, y, loss, change=change))


MIXED = {"name": "f-kde", "points": "mixup"}
METHODS = ["kde", "svgd", "f-kde", "forde", {"name": "forde", "fraction": 0.5}]


@pytest.mark.parametrize("method", [*METHODS, MIXED], ids=str)
def test_every_engine_gives_the_same_members(method):
    build = plain if method == "svgd" else both
    first = frozen(own(build, method=method, strength=20.0, engine="vmap").ensemble)
    for how in ENGINES[1:]:
        run = own(build, method=method, strength=20.0, **how)
        torch.testing.assert_close(frozen(run.ensemble), first, rtol=0, atol=1e-10)


@pytest.mark.parametrize("method", ["ensemble", *METHODS], ids=str)
def test_batches_that_are_common_to_the_last_point_are_common_batches(method, monkeypatch):
    whole = property(lambda settings: BATCH * (settings.options.batches == "own"))
    monkeypatch.setattr(settings_module.Settings, "common_points", whole)
    options = SGD | ({} if method == "ensemble" else {"strength": 20.0})
    run, common = (
        own(normed, method=method, batches=each, **options) for each in ("own", "common")
    )
    torch.testing.assert_close(frozen(run.ensemble), frozen(common.ensemble), rtol=0, atol=1e-12)


def test_a_member_sees_every_point_once_per_epoch_and_the_head_of_each_batch_is_common():
    for common in (0, 3, BATCH):
        orders = Orders(N, BATCH, seed=1, own=range(2, 5), common=common)
        steps = [rows.reshape(3, -1) for rows in orders(4).split(orders.width)]
        assert [rows.shape[1] for rows in steps] == SIZES
        for member in torch.cat(steps, 1):
            assert sorted(member.tolist()) == list(range(N))
        heads = [rows[:, :common] for rows in steps]
        assert all((head == head[0]).all() for head in heads)
        assert common == BATCH or not any(
            (rows[:, common:] == rows[0, common:]).all() for rows in steps
        )


def test_a_member_does_not_depend_on_how_many_there_are():
    three, five = own(method="ensemble", members=3), own(method="ensemble")
    few, many = frozen(three.ensemble), frozen(five.ensemble)
    torch.testing.assert_close(few, {name: t[:3] for name, t in many.items()}, rtol=0, atol=1e-12)
    assert differ(frozen(own(method="ensemble", batches="common").ensemble), many)


@pytest.mark.parametrize("method", ["ensemble", "f-kde", "forde"])
def test_a_resumed_run_is_the_same_to_the_last_bit(method, tmp_path):
    options = {"method": method, "save_every": 0}
    whole = own(both, out=tmp_path / "one", schedule=Fuse(), **options)
    with pytest.raises(Fuse.Blown):
        own(both, out=tmp_path / "two", schedule=Fuse(6), **options)
    again = own(both, out=tmp_path / "two", schedule=Fuse(), resume=True, **options)
    assert_same_run(again, whole)
    assert shoal.load(tmp_path / "two", both).config["batches"] == "own"


def test_a_dataset_gives_the_batches_of_arrays():
    run = own(data=Pairs(*points(N)), method="f-kde")
    assert_equal_trees(frozen(run.ensemble), frozen(own(method="f-kde").ensemble))


def test_inputs_may_be_structures():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(3, CLASSES), nn.Linear(3, CLASSES)

        def forward(self, a, b):
            return self.a(a) + self.b(b).tanh()

    (x, y), first = points(N), None
    for how in ENGINES:
        run = own(Two, ({"a": x, "b": x**2}, y), method="f-kde", **how)
        first = first or frozen(run.ensemble)
        torch.testing.assert_close(frozen(run.ensemble), first, rtol=0, atol=1e-10)


def test_a_grown_run_has_batches_of_its_own():
    run = own(method="kde", members=2)
    grown = shoal.grow(run, 2, data=points(N), progress=False)
    assert grown.config["batches"] == "own" and grown.ensemble.members == 4


class InOrder(torch.utils.data.Sampler):
    """The rows of one member, as `Orders` has them."""

    def __init__(self, member):
        self.member, self.epoch = member, 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return len(SIZES)

    def __iter__(self):
        orders = Orders(N, BATCH, own=range(MEMBERS))
        steps = orders(self.epoch).split(orders.width)
        return (rows.reshape(MEMBERS, -1)[self.member].tolist() for rows in steps)


def loaders(*more, members=MEMBERS, data=None, **options):
    """One shuffling loader per member, or loaders with these samplers."""
    data = TensorDataset(*points(N)) if data is None else data
    if more:
        return [DataLoader(data, batch_sampler=each, **options) for each in more]
    return [DataLoader(data, BATCH, shuffle=True, **options) for _ in range(members)]


@pytest.mark.parametrize("how", [*ENGINES, {"epochs": None, "steps": EPOCHS * len(SIZES)}], ids=str)
def test_one_loader_per_member_trains_networks_alone(how):
    x, y = points(N)
    networks = alone(plain, x.double(), y, lambda f, t: F.cross_entropy(f, t, reduction="none"))
    run = own(data=loaders(*map(InOrder, range(MEMBERS))), method="ensemble", **SGD, **how)
    assert_trained_alone(run, networks)


@pytest.mark.parametrize("kind", ["map", "stream"])
def test_a_loader_shuffles_for_its_member_as_if_alone(kind):
    how = {"steps": 9, "epochs": None, "batches": "common"} | SGD

    def data():
        return Stream() if kind == "stream" else TensorDataset(*points(N))

    def loader():
        return DataLoader(data(), BATCH, shuffle=None if kind == "stream" else True)

    many = [loader() for _ in range(3)]
    together = own(members=3, data=many, method="ensemble", **how | {"batches": "own"})
    singles = [
        quick(
            shoal.Ensemble.of([shoal_of(plain, 3)[member]]), loader(),
            method="ensemble", precision="float64", seed=derive(0, "member", member), **how,
        )
        for member in range(3)
    ]  # fmt: skip
    assert_trained_alone(together, [run.ensemble[0] for run in singles])
    assert differ(frozen(singles[0].ensemble), frozen(singles[1].ensemble))


class Stream(torch.utils.data.IterableDataset):
    """Points without a length, in a random order."""

    def __iter__(self):
        x, y = points(N)
        return ((x[i], y[i]) for i in torch.randperm(N).tolist())


def test_a_resumed_run_reads_each_loader_on(tmp_path):
    options = {"method": "forde", "save_every": 0}
    whole = own(data=loaders(), out=tmp_path / "one", schedule=Fuse(), **options)
    with pytest.raises(Fuse.Blown):
        own(data=loaders(), out=tmp_path / "two", schedule=Fuse(6), **options)
    again = own(data=loaders(), out=tmp_path / "two", schedule=Fuse(), resume=True, **options)
    assert_same_run(again, whole)


def test_a_loader_may_be_a_list_of_batches_with_weights():
    x, y = points(N)
    weight = torch.ones(N)

    def batches(member):
        rows = torch.arange(N).roll(member).split(BATCH)
        return [(x[r], y[r], weight[r]) for r in rows]

    given = tuple(batches(member) for member in range(MEMBERS))
    run = own(data=given, method={"name": "f-kde", "points": "mixup"})
    light = [[(a, b) for a, b, _ in each] for each in given]
    other = own(data=light, method={"name": "f-kde", "points": "mixup"})
    torch.testing.assert_close(
        frozen(run.ensemble), frozen(other.ensemble), rtol=0, atol=1e-10
    )  # fmt: skip


def test_targets_have_the_unit_of_the_first_batch():
    x, _ = points(N)
    y = 5 * x[:, 0] + 100
    build = lambda: nn.Linear(3, 1)  # noqa: E731
    whole = TensorDataset(x, y)
    for data in (torch.utils.data.Subset(whole, range(N)), loaders(data=whole, members=2)):
        run = own(
            build,
            data,
            members=2,
            epochs=60,
            lr=0.05,
            method="ensemble",
            likelihood="homoscedastic",
        )
        assert (shoal.predict(run, x).mean.flatten() - y).abs().mean() < 3


def test_grown_members_have_loaders_of_their_own():
    run = own(method="kde", members=2)
    grown = shoal.grow(run, 3, data=loaders(members=3), progress=False)
    assert grown.ensemble.members == 5 and grown.config["batches"] == "own"


def uneven(*sizes):
    return [DataLoader(TensorDataset(*points(size)), BATCH) for size in sizes]


BATCHES = [points(BATCH), points(BATCH)]
WRONG = {
    "2 loaders came for 3 members": lambda: loaders(members=2),
    "3 or 4 batches": lambda: uneven(37, 37, 30),
    "35 or 37 data points": lambda: uneven(37, 35, 37),
    "member 1, there are no data": lambda: [*uneven(10), DataLoader([]), *uneven(10)],
    "0 or 2 batches": lambda: [BATCHES, [], list(BATCHES)],
    "read only once": lambda: [iter(BATCHES), *uneven(20, 20)],
    "loader of another member": lambda: 3 * uneven(37),
    "member 1 ended after 2 batches": lambda: some(40, 20, 40),
    "member 1, the loader gave no batches": lambda: some(40, 0, 40),
    "7 data points for one member and 10": lambda: some(40, 37, 40),
    "cannot be stacked": lambda: [[points(5)], [points(5)], [(points(5)[0][:, :2], points(5)[1])]],
}  # fmt: skip


def some(*sizes):
    return [DataLoader(Some(size), BATCH) for size in sizes]


class Some(torch.utils.data.IterableDataset):
    """So many points, without a length."""

    def __init__(self, n):
        self.n = n

    def __iter__(self):
        return zip(*points(self.n), strict=True) if self.n else iter(())


@pytest.mark.parametrize("words", WRONG)
def test_loaders_that_do_not_fit_are_named_in_one_sentence(words):
    ensemble = shoal_of(plain, 3)
    before = frozen(ensemble)
    with pytest.raises(DataError, match=words) as error:
        quick(ensemble, WRONG[words](), steps=50, batches="own", method="ensemble")
    assert_one_sentence(error.value)
    begins = "ended" in words or "7 data points for" in words
    assert differ(frozen(ensemble), before) == begins


def test_loaders_of_members_need_own_batches_and_points_for_outputs():
    with pytest.raises(DataError, match="batches='own'") as error:
        own(data=loaders(), batches="common")
    assert_one_sentence(error.value)
    with pytest.raises(ConfigError, match="name points") as error:
        own(data=loaders(), method="f-kde")
    assert_one_sentence(error.value)


@pytest.mark.parametrize("method", ["kde", "forde", MIXED], ids=str)
def test_the_stepper_takes_the_steps_of_fit(method):
    x, y = (each.double() if each.is_floating_point() else each for each in points(N))
    run = own(method=method, strength=20.0)
    stepper = shoal.Stepper(
        shoal_of(plain, MEMBERS), n=N, method=method, strength=20.0, precision="float64", inputs=x
    )
    orders = Orders(N, BATCH, own=range(MEMBERS))
    for epoch in range(EPOCHS):
        for rows in orders(epoch).split(orders.width):
            mine = rows.reshape(MEMBERS, -1)
            stepper((x[mine], y[mine]), own=True)
    torch.testing.assert_close(
        frozen(stepper.ensemble), frozen(run.ensemble), rtol=0, atol=1e-10
    )  # fmt: skip


def test_a_loader_gives_common_batches_and_the_run_says_so():
    loader = DataLoader(TensorDataset(*points(N)), BATCH)
    with pytest.warns(ShoalWarning, match="give arrays, a torch Dataset, or a list"):
        run = own(data=loader, method="ensemble")
    assert run.config["batches"] == "common"


@pytest.mark.parametrize(
    "options",
    [{"method": "f-svgd"}, {"prior": "function-space"}, {"adversarial": 0.1}],
    ids=str,
)
def test_what_needs_common_batches_says_so(options):
    with pytest.raises(ConfigError, match="batches='common'") as error:
        own(**options)
    assert_one_sentence(error.value)


@pytest.mark.parametrize(
    ("refused", "options"),
    [
        (True, {"method": {"name": "f-kde", "points": "mixup"}}),
        (True, {"method": "forde", "frozen": 1}),
        (False, {"method": "f-kde", "frozen": 1}),
        (False, {"method": "forde"}),
        (False, {"method": "kde", "frozen": 1}),
    ],
    ids=str,
)
def test_several_processes_refuse_what_the_inputs_of_one_member_decide(refused, options):
    """Each process has the inputs of its own members alone."""
    settings = Settings.resolve(Options(likelihood="categorical", batches="own", **options))
    start, mesh = shoal.Ensemble.init(plain, 3), object.__new__(Mesh)
    if not refused:
        check_mesh(mesh, start, settings)
        return
    with pytest.raises(ConfigError, match="one process") as error:
        check_mesh(mesh, start, settings)
    assert_one_sentence(error.value)


@needs_gpu
@pytest.mark.parametrize("method", ["ensemble", "kde", "svgd", "f-kde", "forde"])
def test_captured_steps_are_those_of_the_loop(method):
    options = {"method": method, "device": "cuda", "epochs": 6} | SGD
    captured = own(normed, **options)
    torch.testing.assert_close(
        frozen(captured.ensemble), frozen(own(normed, engine="loop", **options).ensemble),
        rtol=0, atol=1e-9,
    )  # fmt: skip

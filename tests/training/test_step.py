"""`forces` against textbook updates, member by member and pair by pair."""

import math

import pytest
import reference
import torch
from published_priors import drawn_outputs, published_prior
from torch import nn

import shoal
from shoal.core.errors import ConfigError
from shoal.engine.members.member_runner import MemberRunner
from shoal.interaction.bandwidths import Fixed, Median

pytestmark = pytest.mark.usefixtures("double")

MEMBERS, BATCH, N = 4, 6, 9
GAMMA, T, STRENGTH, PRIOR_STD = 0.7, 1.3, 0.6, 0.8
TOLERANCE = {"rtol": 1e-10, "atol": 1e-10}
NAMES = [name for name in shoal.methods.METHODS if not name.startswith("forde")]


def network(outputs=3):
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, outputs))


def ensemble_and_members(build=network, members=MEMBERS, seed=3):
    ensemble = shoal.Ensemble.init(build, members, seed=seed)
    return ensemble, [ensemble.member(i) for i in range(members)]


def classes(seed=1, outputs=3):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(BATCH, 4, generator=generator)
    return x, torch.randint(outputs, (BATCH,), generator=generator)


def numbers(seed=1, columns=1):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(BATCH, 4, generator=generator)
    return x, torch.randn(BATCH, columns, generator=generator)


def posterior(likelihood=None, prior=None):
    likelihood = likelihood or shoal.likelihoods.Categorical()
    return shoal.Posterior(likelihood, prior or shoal.priors.Gaussian(PRIOR_STD), N, temperature=T)


def textbook(modules, batch, likelihood=("categorical", 1.0), **options):
    settings = {"annealing": GAMMA, "temperature": T, "strength": STRENGTH, "prior_std": PRIOR_STD}
    return reference.Textbook(modules, batch, N, likelihood, **(settings | options))


def expected(book, name, legacy, **options):
    space = book.function_space if name.startswith("f-") else book.weight_space
    return space(name.removeprefix("f-"), legacy, **options) / N


@pytest.mark.parametrize("legacy", [False, True], ids=["corrected", "published"])
@pytest.mark.parametrize("name", NAMES)
def test_every_method_is_its_literal_update(name, legacy):
    ensemble, modules = ensemble_and_members()
    batch = classes()
    method = shoal.methods.get(name, legacy=legacy).with_strength(STRENGTH)
    velocity, info = shoal.forces(ensemble, posterior(), method.repulsion, batch, annealing=GAMMA)
    target = expected(textbook(modules, batch), name, legacy)
    torch.testing.assert_close(reference.flat_velocity(velocity, modules), target, **TOLERANCE)
    assert (info.push > 1e-3 * info.drive) == (name != "ensemble")


@pytest.mark.parametrize("name", [name for name in NAMES if name.startswith("f-")])
def test_published_function_space_methods_have_their_functional_prior(name):
    ensemble, modules = ensemble_and_members()
    batch = classes()
    method = shoal.methods.get(name, legacy=True).with_strength(STRENGTH)
    assert method.functional_prior
    velocity, _ = shoal.forces(
        ensemble, posterior(prior=published_prior(PRIOR_STD)), method.repulsion, batch,
        annealing=GAMMA, seed=11, step=5,
    )  # fmt: skip
    draws = drawn_outputs(ensemble.member(0), batch[0], MEMBERS, PRIOR_STD, seed=11, step=5)
    book = textbook(modules, batch, prior_std=None)
    target = expected(book, name, True, prior_draws=draws)
    without = expected(book, name, True)
    assert (target - without).abs().max() > 1e-6
    torch.testing.assert_close(reference.flat_velocity(velocity, modules), target, **TOLERANCE)


def test_prior_draws_are_new_at_each_step_and_seed():
    ensemble, _ = ensemble_and_members()
    method = shoal.methods.get("f-kde", legacy=True)

    def velocity(seed, step):
        target = posterior(prior=published_prior(PRIOR_STD))
        return shoal.forces(ensemble, target, method.repulsion, classes(), seed=seed, step=step)[0]

    first, again = velocity(0, 0)["0.weight"], velocity(0, 0)["0.weight"]
    assert torch.equal(first, again)
    assert not torch.equal(first, velocity(0, 1)["0.weight"])
    assert not torch.equal(first, velocity(1, 0)["0.weight"])


KERNELS = {
    "laplace": (shoal.kernels.Laplace(), reference.laplace),
    "imq": (shoal.kernels.IMQ(), reference.imq),
    "matern-3/2": (shoal.kernels.Matern(1.5), reference.matern32),
    "matern-5/2": (shoal.kernels.Matern(2.5), reference.matern52),
    "rbf": (shoal.kernels.RBF(), reference.rbf),
}
FLOWS = {
    "kde": shoal.flows.Wasserstein(shoal.estimators.KDE()),
    "sge": shoal.flows.Wasserstein(shoal.estimators.SGE()),
    "svgd": shoal.flows.Stein(),
}


@pytest.mark.parametrize("fixed", [True, False], ids=["fixed", "median"])
@pytest.mark.parametrize("space", ["weights", "outputs"])
@pytest.mark.parametrize("flow", FLOWS)
@pytest.mark.parametrize("kernel", KERNELS)
def test_every_kernel_in_every_flow(kernel, flow, space, fixed):
    ensemble, modules = ensemble_and_members()
    batch = classes()
    ours, theirs = KERNELS[kernel]
    repulsion = shoal.Repulsion(
        shoal.spaces.Weights() if space == "weights" else shoal.spaces.Outputs(),
        ours,
        Fixed(0.8) if fixed else Median(),
        FLOWS[flow],
        STRENGTH,
    )
    velocity, _ = shoal.forces(ensemble, posterior(), repulsion, batch, annealing=GAMMA)
    with torch.no_grad():
        outputs = torch.stack([m(batch[0]).flatten() for m in modules])
    z = reference.flat_weights(modules) if space == "weights" else outputs
    h2 = 0.8 if fixed else reference.median_h2(z, False, "log")
    name = flow if space == "weights" else f"f-{flow}"
    target = expected(textbook(modules, batch), name, False, kernel=theirs, h2=h2)
    torch.testing.assert_close(reference.flat_velocity(velocity, modules), target, **TOLERANCE)


def test_linear_kernel_in_the_stein_flow():
    ensemble, modules = ensemble_and_members()
    batch = classes()
    repulsion = shoal.Repulsion(
        shoal.spaces.Weights(),
        shoal.kernels.LinearKernel(),
        flow=shoal.flows.Stein(),
        strength=STRENGTH,
    )
    velocity, _ = shoal.forces(ensemble, posterior(), repulsion, batch, annealing=GAMMA)
    W = reference.flat_weights(modules)
    s = textbook(modules, batch).weight_space("ensemble", False)
    # (1/M) sum_j [k(w_j, w_i) s_j + d k(w_j, w_i) / d w_j], the second written out: it is w_i.
    rows = [
        sum((1 + W[i] @ W[j]) * s[j] + T * STRENGTH * W[i] for j in range(MEMBERS)) / MEMBERS
        for i in range(MEMBERS)
    ]
    flat = reference.flat_velocity(velocity, modules)
    torch.testing.assert_close(flat, torch.stack(rows) / N, **TOLERANCE)


REGRESSION = {
    "gaussian": (shoal.likelihoods.Gaussian(0.3), ("gaussian", 0.3), 1),
    "gaussian-2": (shoal.likelihoods.Gaussian(1.7), ("gaussian", 1.7), 2),
    "heteroscedastic": (shoal.likelihoods.HeteroscedasticGaussian(), ("learned", None), 1),
    "heteroscedastic-2": (shoal.likelihoods.HeteroscedasticGaussian(), ("learned", None), 2),
}


@pytest.mark.parametrize("name", ["ensemble", "kde", "svgd", "f-sge", "f-svgd"])
@pytest.mark.parametrize("case", REGRESSION)
def test_regression_likelihoods(case, name):
    likelihood, theirs, columns = REGRESSION[case]
    ensemble, modules = ensemble_and_members(lambda: network(likelihood.width(columns)))
    batch = numbers(columns=columns)
    method = shoal.methods.get(name).with_strength(STRENGTH)
    velocity, _ = shoal.forces(
        ensemble, posterior(likelihood), method.repulsion, batch, annealing=GAMMA
    )
    target = expected(textbook(modules, batch, theirs), name, False)
    torch.testing.assert_close(reference.flat_velocity(velocity, modules), target, **TOLERANCE)


def test_one_column_of_targets_may_be_a_vector():
    ensemble, _ = ensemble_and_members(lambda: network(1))
    x, y = numbers()
    target = posterior(shoal.likelihoods.Gaussian(0.5))
    one, _ = shoal.forces(ensemble, target, None, (x, y))
    other, _ = shoal.forces(ensemble, target, None, (x, y.squeeze(1)))
    assert all(torch.equal(one[name], other[name]) for name in one)


# Energies: the push of a Wasserstein flow with KDE is the gradient of sum_i log sum_j k(z_i, z_j),
# the second argument held fixed, whatever the coordinates z are.


def kde_push(coordinates, kernel=reference.rbf):
    """d/d(inputs) of the literal energy, for a function that gives [M, D] and its inputs [M, d]."""
    function, inputs = coordinates
    inputs = inputs.detach().clone().requires_grad_()
    z = function(inputs)
    fixed = z.detach()
    h2 = reference.median_h2(fixed, False, "log")
    energy = sum(
        torch.log(sum(kernel(z[i], fixed[j], h2) for j in range(len(z)))) for i in range(len(z))
    )
    return torch.autograd.grad(energy, inputs)[0]


def rotation(size):
    generator = torch.Generator().manual_seed(4)
    return torch.linalg.qr(torch.randn(size, size, generator=generator)).Q[:, : size - 2]


def wrapped(space, size):
    """Wrapper around a space, and the same as a function of flat coordinates."""
    factor = torch.linspace(0.5, 2.0, size)
    U = rotation(size)
    spaces = shoal.spaces
    return {
        "itself": (space, lambda z: z),
        "normalised": (
            spaces.Normalised(space),
            lambda z: torch.stack([row / torch.sqrt((row**2).sum() + 1e-12) for row in z]),
        ),
        "scaled by a number": (spaces.Scaled(space, 1.7), lambda z: 1.7 * z),
        "scaled": (spaces.Scaled(space, factor), lambda z: z * factor),
        "rotated": (spaces.Rotated(space, U), lambda z: z @ U),
        "rotated, then normalised": (
            spaces.Normalised(spaces.Rotated(space, U), eps=0.3),
            lambda z: torch.stack([r @ U / torch.sqrt(((r @ U) ** 2).sum() + 0.3) for r in z]),
        ),
        "normalised, then scaled": (
            spaces.Scaled(spaces.Normalised(space), factor),
            lambda z: torch.stack([row / torch.sqrt((row**2).sum() + 1e-12) for row in z]) * factor,
        ),
    }


WRAPPERS = list(wrapped(shoal.spaces.Weights(), 5))
ONE_TENSOR = ("scaled", "rotated", "rotated, then normalised", "normalised, then scaled")


def push_of(ensemble, repulsion, batch):
    """What the repulsion takes from the velocity, without the factor T strength / N."""
    plain, _ = shoal.forces(ensemble, posterior(), None, batch)
    pushed, _ = shoal.forces(ensemble, posterior(), repulsion, batch)
    scale = N / (T * repulsion.strength)
    return {name: scale * (plain[name] - pushed[name]) for name in plain}


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_wrapped_weights(wrapper):
    one = wrapper in ONE_TENSOR
    build = (lambda: nn.Linear(4, 3, bias=False)) if one else network
    ensemble, modules = ensemble_and_members(build)
    W = reference.flat_weights(modules)
    space, function = wrapped(shoal.spaces.Weights(), W.shape[1])[wrapper]
    push = push_of(ensemble, shoal.Repulsion(space, strength=STRENGTH), classes())
    target = kde_push((function, W))
    torch.testing.assert_close(reference.flat_velocity(push, modules), target, **TOLERANCE)


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("probabilities", [False, True], ids=["logits", "probabilities"])
def test_wrapped_outputs(wrapper, probabilities):
    ensemble, modules = ensemble_and_members()
    x, y = classes()
    outputs = [module(x) for module in modules]
    inner = shoal.spaces.Outputs(probabilities=probabilities)
    space, function = wrapped(inner, outputs[0].numel())[wrapper]

    def coordinates(flat):
        f = flat.reshape(MEMBERS, *outputs[0].shape)
        return function((f.softmax(-1) if probabilities else f).flatten(1))

    cotangents = kde_push((coordinates, torch.stack([f.flatten() for f in outputs])))
    rows = [
        reference._flat_grad(f.flatten(), module, grad_outputs=c)
        for f, module, c in zip(outputs, modules, cotangents, strict=True)
    ]
    push = push_of(ensemble, shoal.Repulsion(space, strength=STRENGTH), (x, y))
    flat = reference.flat_velocity(push, modules)
    torch.testing.assert_close(flat, torch.stack(rows), **TOLERANCE)


# Surrogate losses: the push as a constant cotangent in an ordinary loss.


def surrogate(ensemble, batch, push_term):
    """Gradient of -(gamma / N) log p + (T / N) strength <z, constant> at the stacked weights."""
    x, y = batch
    weights = ensemble.weights
    outputs = ensemble(x)
    log_lik = sum(reference.log_likelihood("categorical", f, y) for f in outputs) / BATCH
    log_prior = sum(
        torch.distributions.Normal(0, PRIOR_STD).log_prob(w).sum() for w in weights.values()
    )
    z, constant = push_term(weights, outputs)
    loss = -GAMMA * (log_lik + log_prior / N) + T * STRENGTH / N * (z * constant).sum()
    gradients = torch.autograd.grad(loss, list(weights.values()))
    return dict(zip(weights, gradients, strict=True))


@pytest.mark.parametrize("legacy", [False, True], ids=["corrected", "published"])
@pytest.mark.parametrize("name", ["kde", "sge", "ssge", "f-kde", "f-sge", "f-ssge"])
def test_surrogate_loss_has_the_same_gradient(name, legacy):
    ensemble, modules = ensemble_and_members()
    batch = classes()
    flow = name.removeprefix("f-")

    def push_term(weights, outputs):
        flat = [w.flatten(1) if w.ndim > 1 else w[:, None] for w in weights.values()]
        z = outputs.flatten(1) if name.startswith("f-") else torch.cat(flat, 1)
        return z, reference.interaction(flow, legacy, z.detach())[1]

    method = shoal.methods.get(name, legacy=legacy).with_strength(STRENGTH)
    velocity, _ = shoal.forces(ensemble, posterior(), method.repulsion, batch, annealing=GAMMA)
    gradient = surrogate(ensemble, batch, push_term)
    for tensor, value in velocity.items():
        torch.testing.assert_close(-gradient[tensor], value, **TOLERANCE)


# What a step says of itself.


@pytest.mark.parametrize("name", ["kde", "svgd", "f-kde", "f-svgd"])
def test_step_info(name):
    ensemble, modules = ensemble_and_members()
    x, y = classes()
    method = shoal.methods.get(name).with_strength(STRENGTH)
    _, info = shoal.forces(ensemble, posterior(), method.repulsion, (x, y), annealing=GAMMA)
    with torch.no_grad():
        f = torch.stack([m(x).flatten() for m in modules])
        losses = [-reference.log_likelihood("categorical", m(x), y) / BATCH for m in modules]
    z = f if name.startswith("f-") else reference.flat_weights(modules)
    h2 = reference.median_h2(z, False, "log")
    K, push = reference.interaction(name.removeprefix("f-"), False, z)
    torch.testing.assert_close(info.loss, torch.stack(losses))
    torch.testing.assert_close(info.h2, torch.tensor(h2).float())
    length = T * STRENGTH / N * (push**2).sum(1).mean().sqrt()
    torch.testing.assert_close(info.push, length.float())
    torch.testing.assert_close(info.effective, (MEMBERS**2 / K.sum()).float())
    torch.testing.assert_close(info.ratio, info.push / info.drive)
    assert info.alive.all()


def test_a_step_changes_nothing():
    ensemble, _ = ensemble_and_members()
    before = {name: tensor.detach().clone() for name, tensor in ensemble.weights.items()}
    method = shoal.methods.get("f-kde", legacy=True)
    shoal.forces(ensemble, posterior(prior=published_prior(PRIOR_STD)), method.repulsion, classes())
    for name, tensor in ensemble.weights.items():
        assert torch.equal(tensor, before[name])
        assert tensor.grad is None


# Scaling: batch size, N and temperature enter as the posterior says.


@pytest.mark.parametrize("name", [name for name in NAMES if not name.endswith("svgd")])
def test_temperature_zero_is_the_plain_ensemble(name):
    ensemble, _ = ensemble_and_members()
    cold = shoal.Posterior(shoal.likelihoods.Categorical(), shoal.priors.Gaussian(1.0), N, 0.0)
    method = shoal.methods.get(name)
    velocity, _ = shoal.forces(ensemble, cold, method.repulsion, classes())
    plain, _ = shoal.forces(ensemble, cold, None, classes())
    for tensor in plain:
        torch.testing.assert_close(velocity[tensor], plain[tensor], rtol=0, atol=1e-15)


@pytest.mark.parametrize("name", ["kde", "svgd"])
def test_the_mean_over_batches_is_the_whole_data(name):
    ensemble, _ = ensemble_and_members()
    x, y = classes()
    repulsion = shoal.methods.get(name).repulsion
    whole, _ = shoal.forces(ensemble, posterior(), repulsion, (x, y))
    parts = [
        shoal.forces(ensemble, posterior(), repulsion, (x[i : i + 2], y[i : i + 2]))[0]
        for i in range(0, BATCH, 2)
    ]
    for tensor, value in whole.items():
        mean = sum(part[tensor] for part in parts) / len(parts)
        torch.testing.assert_close(value, mean, **TOLERANCE)


def test_mixed_architectures_have_no_common_weight_space():
    builds = [(network, 2), (lambda: nn.Linear(4, 3), 2)]
    ensemble = shoal.Ensemble.init(builds)
    with pytest.raises(ConfigError, match="no common weight space.*'f-kde'"):
        shoal.forces(ensemble, posterior(), shoal.methods.get("kde").repulsion, classes())


@pytest.mark.parametrize("name", ["f-kde", "f-sge", "f-ssge", "f-svgd", "ensemble"])
def test_mixed_architectures_in_function_space(name):
    builds = [(network, 2), (lambda: nn.Linear(4, 3), 3)]
    ensemble = shoal.Ensemble.init(builds, seed=2)
    modules = [ensemble.member(i) for i in range(5)]
    x, y = classes()
    velocity, _ = shoal.forces(ensemble, posterior(), shoal.methods.get(name).repulsion, (x, y))
    f = torch.stack([m(x).detach().flatten() for m in modules])
    flow = name.removeprefix("f-")
    K, push = reference.interaction(flow, False, f) if flow != "ensemble" else (torch.eye(5), 0 * f)
    a = [torch.eye(3)[y] - m(x).softmax(-1) for m in modules]
    a = torch.stack(a).detach().flatten(1) / BATCH
    mix = K / 5 if flow == "svgd" else torch.eye(5)
    cotangents = mix @ a - T / N * push
    for i, module in enumerate(modules):
        row = reference._flat_grad(module(x).flatten(), module, grad_outputs=cotangents[i])
        row = row + mix[i].sum() / N * reference._flat_grad(
            reference.log_prior(module, PRIOR_STD), module
        )
        group, index = (0, i) if i < 2 else (1, i - 2)
        ours = torch.cat(
            [velocity[f"group{group}.{n}"][index].flatten() for n, _ in module.named_parameters()]
        )
        torch.testing.assert_close(ours, row, **TOLERANCE)


def test_strength_and_temperature_are_factors_of_the_push_alone():
    ensemble, _ = ensemble_and_members()
    repulsion = shoal.methods.get("kde").repulsion
    plain, _ = shoal.forces(ensemble, posterior(), None, classes())

    def push(strength, temperature):
        target = shoal.Posterior(
            shoal.likelihoods.Categorical(), shoal.priors.Gaussian(PRIOR_STD), N, temperature
        )
        chosen = shoal.Repulsion(repulsion.space, strength=strength)
        velocity, _ = shoal.forces(ensemble, target, chosen, classes())
        return plain["0.weight"] - velocity["0.weight"]

    torch.testing.assert_close(push(3.0, 1.0), 3 * push(1.0, 1.0))
    torch.testing.assert_close(push(1.0, 0.25), push(0.25, 1.0))
    assert math.isclose(push(1.0, 2.0).norm() / push(1.0, 1.0).norm(), 2.0, rel_tol=1e-9)


# Memory layouts: a velocity is right whatever order the numbers of a tensor have in memory.


class Layouts(nn.Module):
    """Matrices that are used as they are, transposed, read by row, and in products of three."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(9, 4)
        self.scale = nn.Parameter(torch.randn(3, 4))
        self.filters = nn.Conv1d(3, 5, 2)
        self.square = nn.Parameter(torch.randn(5, 5))
        self.cube = nn.Parameter(torch.randn(2, 5, 3))
        self.norm, self.free = nn.LayerNorm(5), nn.Parameter(torch.randn(()))

    def forward(self, x):
        h = self.filters(self.table(x) * self.scale).tanh().mean(-1)
        h = self.norm(h @ self.square + h @ self.square.mT) * self.free
        return torch.einsum("bi,kio->bo", h, self.cube)


@pytest.mark.parametrize(
    "mapping", [MemberRunner(), MemberRunner("loop"), MemberRunner(chunk=3)], ids=repr
)
@pytest.mark.parametrize("name", ["kde", "sge", "svgd", "f-kde", "f-svgd"])
def test_every_layout_in_memory(name, mapping):
    ensemble, modules = ensemble_and_members(Layouts)
    generator = torch.Generator().manual_seed(0)
    batch = torch.randint(9, (BATCH, 3), generator=generator), torch.arange(BATCH) % 3
    method = shoal.methods.get(name).with_strength(STRENGTH)
    velocity, _ = shoal.forces(
        ensemble, posterior(), method.repulsion, batch, annealing=GAMMA, mapping=mapping
    )
    target = expected(textbook(modules, batch), name, False)
    torch.testing.assert_close(reference.flat_velocity(velocity, modules), target, **TOLERANCE)


class Tied(nn.Module):
    """The gradients of `left` and `right` are one tensor."""

    def __init__(self):
        super().__init__()
        self.left, self.right = (nn.Parameter(torch.randn(4, 3)) for _ in range(2))

    def forward(self, x):
        return x @ (self.left + self.right)


@pytest.mark.parametrize("engine", ["vmap", "loop"])
def test_a_prior_is_added_once_to_gradients_that_share_their_memory(engine):
    ensemble, members = ensemble_and_members(Tied)
    batch = classes()
    velocity, _ = shoal.forces(
        ensemble, posterior(), None, batch, annealing=GAMMA, mapping=MemberRunner(engine)
    )
    for i, member in enumerate(members):
        loss = nn.functional.cross_entropy(member(batch[0]), batch[1])
        for name, parameter in member.named_parameters():
            (data,) = torch.autograd.grad(loss, parameter, retain_graph=True)
            wanted = -GAMMA * (data + parameter / PRIOR_STD**2 / N)
            torch.testing.assert_close(velocity[name][i], wanted.detach(), **TOLERANCE)

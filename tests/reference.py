"""Textbook updates, written out: flat weights [M, d], loops over pairs, autograd for gradients.

Nothing here is shared with the library. Every function follows a printed formula literally and
slowly; `phi` is the ascent direction of the *unscaled* log posterior, so that the velocity of the
library is phi / N.

    s_i  gradient of log p(theta_i | D)        k_ij  kernel of members i and j
    G_i  sum_j of the gradient of k(z_i, z_j) with respect to its first argument
"""

import math
from contextlib import contextmanager, nullcontext

import torch
from torch import nn
from torch.distributions import Categorical, Normal
from torch.nn import functional as F

# Kernels of two points -----------------------------------------------------------------------


def rbf(a, b, h2):
    return torch.exp(-((a - b) ** 2).sum() / (2 * h2))


def laplace(a, b, h2):
    return torch.exp(-_distance(a, b) / math.sqrt(h2))


def imq(a, b, h2):
    return 1 / torch.sqrt(1 + ((a - b) ** 2).sum() / h2)


def matern32(a, b, h2):
    r = math.sqrt(3) * _distance(a, b) / math.sqrt(h2)
    return (1 + r) * torch.exp(-r)


def matern52(a, b, h2):
    r = math.sqrt(5) * _distance(a, b) / math.sqrt(h2)
    return (1 + r + r**2 / 3) * torch.exp(-r)


def linear(a, b, h2):
    return 1 + (a * b).sum()


def _distance(a, b):
    """Euclidean distance whose gradient at coincident points is zero."""
    square = ((a - b) ** 2).sum()
    return torch.sqrt(square) if square > 0 else 0 * square


# Kernel matrices, bandwidths, score estimates ------------------------------------------------


def kernel_matrix(Z, kernel, h2, Y=None):
    Y = Z if Y is None else Y
    return torch.stack([torch.stack([kernel(a, b, h2) for b in Y]) for a in Z])


def summed_gradient(Z, kernel, h2):
    """G_i = sum_j d k(z_i, z_j) / d z_i, the second argument held fixed."""
    rows = []
    for i in range(len(Z)):
        z = Z[i].detach().clone().requires_grad_()
        total = sum(kernel(z, Z[j].detach(), h2) for j in range(len(Z)))
        rows.append(torch.autograd.grad(total, z)[0])
    return torch.stack(rows)


def median_h2(Z, legacy, scale):
    """Squared bandwidth by the median heuristic, from a Python list of squared distances."""
    M = len(Z)
    values = [
        float(((Z[i] - Z[j]) ** 2).sum()) for i in range(M) for j in range(M) if legacy or i != j
    ]
    return _middle(values) / (2 * math.log(M + 1) if scale == "log" else 1)


def _middle(values):
    values, n = sorted(values), len(values)
    return values[n // 2] if n % 2 else (values[n // 2 - 1] + values[n // 2]) / 2


def kde_score(K, G):
    return torch.stack([G[i] / K[i].sum() for i in range(len(K))])


def sge_score(K, G, eta):
    return torch.linalg.inv(K + eta * torch.eye(len(K), dtype=K.dtype)) @ G


def ssge_score(K, G, eta, share=1.0):
    """K (K + eta)^-2 G on the leading eigenpairs that carry `share` of the trace."""
    eigenvalues, U = torch.linalg.eigh(K)
    total, carried, score = float(eigenvalues.sum()), 0.0, torch.zeros_like(G)
    for j in reversed(range(len(K))):
        if carried >= share * total:
            break
        carried += float(eigenvalues[j])
        factor = eigenvalues[j] / (eigenvalues[j] + eta) ** 2
        score = score + factor * torch.outer(U[:, j], U[:, j]) @ G
    return score


ESTIMATORS = {
    ("kde", False): lambda K, G: kde_score(K, G),
    ("kde", True): lambda K, G: kde_score(K, G),
    ("sge", False): lambda K, G: sge_score(K, G, 0.01),
    ("sge", True): lambda K, G: sge_score(K, G, 0.01),
    ("ssge", False): lambda K, G: ssge_score(K, G, 0.0, share=0.99),
    ("ssge", True): lambda K, G: ssge_score(K, G, 0.01),
}


def interaction(flow, legacy, Z, kernel=rbf, h2=None):
    """K [M, M], and the push P [M, D] that is subtracted from the mixed drives."""
    if len(Z) == 1:
        return torch.ones(1, 1, dtype=Z.dtype), torch.zeros_like(Z)
    h2 = median_h2(Z, legacy, "log") if h2 is None else h2
    K, G = kernel_matrix(Z, kernel, h2), summed_gradient(Z, kernel, h2)
    if flow == "svgd":
        return K, G / len(Z)
    return K, ESTIMATORS[flow, legacy](K, G)


# Members -------------------------------------------------------------------------------------


def flat_weights(modules):
    """W [M, d]."""
    rows = [torch.cat([p.detach().reshape(-1) for p in m.parameters()]) for m in modules]
    return torch.stack(rows)


def flat_velocity(velocity, modules):
    """The library's dict of tensors [M, ...] as [M, d], in the order of `flat_weights`."""
    names = [name for name, _ in modules[0].named_parameters()]
    return torch.cat([velocity[name].reshape(len(modules), -1) for name in names], 1)


def _flat_grad(value, module, **options):
    parameters = list(module.parameters())
    gradients = torch.autograd.grad(value, parameters, allow_unused=True, **options)
    pairs = zip(gradients, parameters, strict=True)
    return torch.cat([(torch.zeros_like(p) if g is None else g).reshape(-1) for g, p in pairs])


def log_likelihood(kind, outputs, y, noise_std=1.0):
    """sum_b log p(y_b | f_b)."""
    if kind == "categorical":
        return Categorical(logits=outputs).log_prob(y).sum()
    y = y.reshape(len(outputs), -1)
    if kind == "gaussian":
        return Normal(outputs, noise_std).log_prob(y).sum()
    K = outputs.shape[1] // 2
    variance = F.softplus(outputs[:, K:]) + 1e-6
    return Normal(outputs[:, :K], variance.sqrt()).log_prob(y).sum()


def log_prior(module, std):
    return sum(Normal(0.0, std).log_prob(p).sum() for p in module.parameters())


def worst_inputs(modules, x, losses, epsilon, shared):
    """Fast gradient sign neighbours, one tensor for each member."""
    gradients = []
    for module, loss in zip(modules, losses, strict=True):
        inputs = x.detach().clone().requires_grad_()
        gradients.append(torch.autograd.grad(loss(module(inputs)), inputs)[0])
    if shared:
        return [x + epsilon * torch.sign(sum(gradients))] * len(modules)
    return [x + epsilon * torch.sign(g) for g in gradients]


class Textbook:
    """The published updates on M separate modules.

    Args:
        modules: the members.
        batch: (x, y), B of the N data points.
        n: N.
        likelihood: (kind, noise_std).
        prior_std: of the normal prior on every weight; None for no prior.
        annealing, temperature, strength: gamma, T and the factor of the push.
        adversarial: None or (epsilon, shared).
    """

    def __init__(self, modules, batch, n, likelihood=("categorical", 1.0), prior_std=None,
                 annealing=1.0, temperature=1.0, strength=1.0, adversarial=None):  # fmt: skip
        self.modules, (self.x, self.y), self.n = modules, batch, n
        self.likelihood, self.prior_std = likelihood, prior_std
        self.annealing, self.push = annealing, temperature * strength
        self.shown = [[(1.0, self.x)] for _ in modules]
        if adversarial is not None:
            losses = [lambda f: -log_likelihood(likelihood[0], f, self.y, likelihood[1])]
            worst = worst_inputs(modules, self.x, losses * len(modules), *adversarial)
            self.shown = [[(0.5, self.x), (0.5, w)] for w in worst]

    def weight_space(self, flow, legacy, kernel=rbf, h2=None):
        """phi for the methods whose kernel compares weights."""
        s = self.annealing * torch.stack([self._score(i) for i in range(len(self.modules))])
        if flow == "ensemble":
            return s
        K, push = interaction(flow, legacy, flat_weights(self.modules), kernel, h2)
        return self._mixed(flow, K, s) - self.push * push

    def function_space(self, flow, legacy, prior_draws=None, kernel=rbf, h2=None, points=None):
        """phi for the methods whose kernel compares outputs; `prior_draws`: outputs [P, B, C].

        `points` are the inputs at which members are compared, if not at those of the batch. The
        drive stays at the batch; the push is pulled back from the points.
        """
        f = torch.stack([m(self.x).detach().reshape(-1) for m in self.modules])
        apart = points is not None
        at = torch.stack([m(points).detach().reshape(-1) for m in self.modules]) if apart else f
        K, push = interaction(flow, legacy, at, kernel, h2)
        prior = 0.0 if prior_draws is None else functional_prior(f, prior_draws.flatten(1))
        phi = torch.zeros_like(flat_weights(self.modules))
        for part in range(len(self.shown[0])):
            share = self.shown[0][part][0]
            a = torch.stack([self._output_score(i, part) for i in range(len(self.modules))])
            cotangent = self.annealing * self._mixed(flow, K, share * a)
            if part == 0:
                cotangent = cotangent if apart else cotangent - self.push * push
                cotangent = cotangent + self.annealing * self._mixed(flow, K, prior)
            phi = phi + self._pulled_back(cotangent, part)
        if apart:
            phi = phi - self.push * self._pulled_back(push, 0, points)
        return phi + self._weight_prior(flow, K)

    def gradient_space(self, *how, **more):
        """phi for the first-order repulsive ensemble."""
        return torch.stack(self.gradient_rows(*how, **more))

    def gradient_rows(
        self, legacy=False, U=None, spread=None, target="logit", rows=None, own=False, points=None,
        coupled=False,
    ):  # fmt: skip
        """phi_i = gamma s_i - (N / B) d log sum_j k_ij / d theta_i, member by member.

        `U` [D, R] are the axes and `spread` [R] the weights of the kernel; `rows` are the points of
        the batch on which members are compared, by a forward pass of their own, in which they are
        normalised by the statistics that the weights give the whole batch, or by their `own`. They
        may be `coupled`.
        `points` are other inputs on which members are compared, with targets for the score.
        """
        M, x = len(self.modules), self.x if rows is None else self.x[rows]
        y = self.y if rows is None else self.y[rows]
        x, y = (x, y) if points is None else points
        z = []
        for module in self.modules:
            with nullcontext() if rows is None or own else normalised_as(module, self.x, coupled):
                z.append(_directions(module, x, y, U, spread, target))
        h2 = [[_site_h2([v[b] for v in z], j, legacy) for j in range(M)] for b in range(len(x))]
        phi = []
        for i, module in enumerate(self.modules):
            row = 0.0
            for j in range(M):
                sites = [rbf(z[i][b], z[j][b].detach(), h2[b][j]) for b in range(len(x))]
                row = row + sum(sites) / len(sites)
            push = _flat_grad(torch.log(row), module, retain_graph=True)
            drive = self.annealing * self._score(i)
            phi.append(drive - self.push * self.n / len(self.x) * push)
        return phi

    def _score(self, i):
        module, B = self.modules[i], len(self.x)
        kind, noise = self.likelihood
        value = sum(
            share * self.n / B * log_likelihood(kind, module(x), self.y, noise)
            for share, x in self.shown[i]
        )
        if self.prior_std is not None:
            value = value + log_prior(module, self.prior_std)
        return _flat_grad(value, module)

    def _output_score(self, i, part):
        f = self.modules[i](self.shown[i][part][1]).detach().requires_grad_()
        kind, noise = self.likelihood
        value = self.n / len(self.x) * log_likelihood(kind, f, self.y, noise)
        return torch.autograd.grad(value, f)[0].reshape(-1)

    def _pulled_back(self, cotangent, part, x=None):
        rows = []
        for i, module in enumerate(self.modules):
            f = module(self.shown[i][part][1] if x is None else x).reshape(-1)
            rows.append(_flat_grad(f, module, grad_outputs=cotangent[i]))
        return torch.stack(rows)

    def _mixed(self, flow, K, rows):
        """(1/M) sum_j k_ij row_j for the Stein flow, the rows themselves otherwise."""
        if flow != "svgd" or isinstance(rows, float):
            return rows
        M = len(K)
        return torch.stack([sum(K[i, j] * rows[j] for j in range(M)) / M for i in range(M)])

    def _weight_prior(self, flow, K):
        if self.prior_std is None:
            return 0.0
        rows = [_flat_grad(log_prior(m, self.prior_std), m) for m in self.modules]
        scale = K.sum(1) / len(K) if flow == "svgd" else torch.ones(len(K), dtype=K.dtype)
        return self.annealing * torch.stack([c * r for c, r in zip(scale, rows, strict=True)])


@contextmanager
def normalised_as(module, x, coupled=False):
    """A block in which batch normalisation uses the moments that its inputs have for `x`.

    `coupled`: gradients at the normalised inputs h become g - <g> - h <g h>, where h is fixed.
    """
    layers = [m for m in module.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
    moments, hooks = {}, []

    def note(layer, inputs, output):
        dims = [d for d in range(inputs[0].ndim) if d != 1]
        moments[layer] = [f(inputs[0], dims, keepdim=True) for f in (torch.mean, _variance)]

    def use(layer, inputs, output):
        mean, variance = moments[layer]
        shape = (1, -1, *[1] * (inputs[0].ndim - 2))
        h = (inputs[0] - mean) / (variance + layer.eps).sqrt()
        if coupled:
            dims, fixed = [d for d in range(h.ndim) if d != 1], h.detach()
            h.register_hook(lambda g: g - g.mean(dims, True) - fixed * (g * fixed).mean(dims, True))
        return h * layer.weight.view(shape) + layer.bias.view(shape)

    for hook in (note, use):
        for taken in hooks:
            taken.remove()
        hooks = [layer.register_forward_hook(hook) for layer in layers]
        if hook is note:
            module(x)
    yield
    for taken in hooks:
        taken.remove()


def _variance(x, dims, keepdim):
    return (x - x.mean(dims, keepdim=True)).square().mean(dims, keepdim=keepdim)


def _directions(module, x, y, U, spread, target):
    """Normalised input gradients of one member, rotated and scaled [B, R], with their graph."""
    x = x.detach().clone().requires_grad_()
    outputs = module(x)
    if target == "log-probability":
        outputs = outputs - torch.logsumexp(outputs, 1, keepdim=True)
    if y.is_floating_point():
        score = outputs[:, : y.reshape(len(y), -1).shape[1]].sum()
    else:
        score = sum(outputs[b, y[b]] for b in range(len(y)))
    g = torch.autograd.grad(score, x, create_graph=True)[0].reshape(len(x), -1)
    z = torch.stack([row / torch.sqrt((row**2).sum() + 1e-15) for row in g])
    z = z if U is None else z @ U
    return z if spread is None else z * torch.sqrt(spread)


def _site_h2(points, j, legacy):
    """Squared bandwidth at one datum; in released code one for each second argument j."""
    M, points = len(points), [p.detach() for p in points]
    if not legacy:
        return median_h2(torch.stack(points), False, "log")
    column = [float(((points[i] - points[j]) ** 2).sum()) for i in range(M)]
    return (_middle(column) / math.log(M) + 1e-12) / 2  # exp(-q / h) = exp(-q / 2 h2)


def functional_prior(f, draws):
    """Released code: spectral estimate at f from draws, eta = 0.01, every eigenpair.

    psi = sqrt(P) K(f, F) U / lambda and beta = U^T G / (sqrt(P) lambda), lambda the eigenvalues of
    K(F, F) + eta; the widths of K(f, F) and K(F, F) are two different medians.
    """
    P, eta = len(draws), 0.01
    h2 = median_h2(draws, True, "log")
    K, G = kernel_matrix(draws, rbf, h2), summed_gradient(draws, rbf, h2)
    eigenvalues, U = torch.linalg.eigh(K + eta * torch.eye(P, dtype=K.dtype))
    across = [float(((a - b) ** 2).sum()) for a in f for b in draws]
    across_h2 = _middle(across) / (2 * math.log(P + 1))
    psi = math.sqrt(P) * kernel_matrix(f, rbf, across_h2, draws) @ U / eigenvalues
    beta = (U.mT @ G) / (math.sqrt(P) * eigenvalues[:, None])
    return psi @ beta

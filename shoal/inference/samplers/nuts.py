r"""The no-U-turn sampler: trajectories that end where they would turn back.

Hoffman & Gelman (2014, arXiv 1111.4246), in the implementation of NumPyro (Phan, Pradhan &
Jankowiak 2019, arXiv 1912.11554). A chain at x gets a momentum, and follows the flow of the energy
H(x, p) = |p|² / 2 - log p(x) forwards or backwards in time. The trajectory doubles as a binary tree
until its ends approach each other. The draw is chosen among all its points with their weights
exp(-H). So neither a number of steps nor a Metropolis test is needed. Dual averaging and windows of
the warm-up set step size and units of every chain.

NumPyro compiles a whole tree with JAX. The log density stays in torch: JAX calls it back for every
gradient, for all chains at once. The numbers cross as pairs of 32-bit integers, since JAX has no
double precision in the threads from which it calls. A batch of chains waits for its largest tree.

A chain that uses fewer columns than others has a standard normal density in the other columns. So
they are independent of its own.
"""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar
from weakref import WeakKeyDictionary, ref

import numpy as np
import torch
from torch import Tensor

from shoal.core.errors import ConfigError, ShoalWarning
from shoal.core.optional import require
from shoal.core.random import derive
from shoal.core.types import Tree
from shoal.inference.samplers.sampler import Clock, Density, OnAllData, registry

__all__ = ["NUTS"]

MANY = 5000
"""Weights of a chain above which trees are long, and a warning names other samplers."""

_LEAF = "numpyro"
"""Names of NumPyro's own numbers in the state begin so."""


@registry.register("nuts", cite=("hoffman2014nuts", "phan2019composable"))
@dataclass(frozen=True)
class NUTS(OnAllData):
    """The no-U-turn sampler of NumPyro: exact, for few weights.

    Attributes:
        depth: largest number of doublings of a trajectory, which has up to 2^depth - 1 gradients.
        acceptance: wanted mean acceptance, over the points of a trajectory.
        dense: measure correlations of coordinates in the warm-up, and not only a unit of each.
    """

    depth: int = 10
    acceptance: float = 0.8
    dense: bool = False

    lengths: ClassVar[tuple[int, int]] = 500, 1
    """Usual trajectories before the first draw, and from draw to draw."""

    def __post_init__(self) -> None:
        if not 1 <= self.depth <= 20:
            raise ConfigError(f"depth must lie between 1 and 20, not {self.depth}")
        if not 0 < self.acceptance < 1:
            raise ConfigError(f"acceptance must lie between 0 and 1, not {self.acceptance}")

    def begin(self, density: Density, x: Tensor, seed: int) -> Tree:
        """See `Sampler`."""
        require("numpyro", "fidelity")
        most = int(density.numbers.max())
        if most > MANY:
            warnings.warn(
                f"nuts moves {most:,} weights, and a draw may take {2**self.depth - 1:,} "
                f"gradients; 'mclmc' takes two gradients a step, and of= selects fewer weights",
                ShoalWarning,
                stacklevel=2,
            )
        log_density, _ = density(x, 0)  # here, what is wrong with a density has its own words
        zero = torch.zeros_like(log_density)
        counts = {name: zero.clone() for name in ("accepted", "diverged", "gradients", "steps")}
        return {"x": x.clone(), **_Trees(self, density, x, seed, 0).begin(), **counts}

    def step(self, density: Density, state: Tree, clock: Clock) -> None:
        """See `Sampler`."""
        moved, z = _trees(self, density, state["x"], clock).step(state)
        state.update(moved)
        state["x"] = z.to(state["x"]) * density.used
        if clock.step < clock.warmup:
            return
        state["accepted"] += state[f"{_LEAF}.accept_prob"]
        state["diverged"] += state[f"{_LEAF}.diverging"]
        state["gradients"] += state[f"{_LEAF}.num_steps"]
        state["steps"] += 1

    def diagnostics(self, state: Tree) -> dict[str, Tensor]:
        """See `Sampler`; `refused` is the share of trajectories that diverged."""
        steps = state["steps"].clamp(min=1)
        return {
            "acceptance": state["accepted"] / steps,
            "refused": state["diverged"] / steps,
            "gradients": state["gradients"] / steps,
            "step size": state[f"{_LEAF}.adapt_state.step_size"],
        }


class _Trees:
    """NumPyro's kernel for the chains of one density, compiled once."""

    def __init__(self, sampler: NUTS, density: Density, x: Tensor, seed: int, warmup: int) -> None:
        self.jax, infer = require("jax", "fidelity"), require("numpyro.infer", "fidelity")
        self.sampler, self.warmup, self.device = sampler, warmup, x.device
        self.shape, self.error = tuple(x.shape), None
        self._density, self._dtype = ref(density), x.dtype  # the density keeps these trees
        kernel = infer.NUTS(
            potential_fn=self._potential(),
            max_tree_depth=sampler.depth,
            target_accept_prob=sampler.acceptance,
            dense_mass=sampler.dense,
        )
        self._first = self.jax.jit(lambda keys, z: kernel.init(keys, warmup, z, (), {}))
        with self._double():
            key = self.jax.random.PRNGKey(derive(seed, "nuts") % 2**63)
            keys = self.jax.random.split(key, len(x))
            self._begin = keys, self.jax.numpy.asarray(x.detach().cpu().double().numpy())
            form = self.jax.eval_shape(self._first, *self._begin)
        flat, self._form = self.jax.tree_util.tree_flatten_with_path(form)
        self._names = [_LEAF + self.jax.tree_util.keystr(path) for path, _ in flat]
        self._types = [leaf.dtype for _, leaf in flat]
        self._move = self.jax.jit(lambda state: kernel.sample(state, (), {}))

    def begin(self) -> Tree:
        """NumPyro's numbers of chains that begin."""
        with self._double():
            numbers = self._read(self._first(*self._begin))
        self._raise()
        return numbers

    def step(self, state: Tree) -> tuple[Tree, Tensor]:
        """The numbers after one trajectory of every chain, and the positions [M, D]."""
        with self._double():
            pairs = zip(self._names, self._types, strict=True)
            leaves = [state[name].cpu().numpy().astype(dtype) for name, dtype in pairs]
            moved = self._move(self.jax.tree_util.tree_unflatten(self._form, leaves))
            numbers = self._read(moved)
        self._raise()
        return numbers, numbers[f"{_LEAF}.z"]

    def _read(self, state: Any) -> Tree:
        """The leaves as tensors, with keys of random numbers as 64-bit integers."""
        leaves = [np.array(leaf) for leaf in self.jax.tree_util.tree_leaves(state)]
        wide = [leaf.astype(np.int64) if leaf.dtype.kind in "ui" else leaf for leaf in leaves]
        tensors = [torch.from_numpy(leaf).to(self.device) for leaf in wide]
        return dict(zip(self._names, tensors, strict=True))

    def _raise(self) -> None:
        """Raise what went wrong in the density; JAX would wrap it."""
        error, self.error = self.error, None
        if error is not None:
            raise error

    @contextmanager
    def _double(self) -> Iterator[None]:
        """JAX on the CPU with double precision, without changing the settings of others."""
        with self.jax.enable_x64(True), self.jax.default_device(self.jax.devices("cpu")[0]):
            yield

    def _potential(self) -> Callable[[Any], Any]:
        """-log p of one chain [D] as a function of JAX, whose derivative comes with the value."""
        jax, width = self.jax, self.shape[1]
        cast, integer = jax.lax.bitcast_convert_type, jax.numpy.uint32

        def both(z: Any) -> tuple[Any, Any]:
            form = jax.ShapeDtypeStruct((width + 1, 2), integer)
            bits = jax.pure_callback(
                self._call, form, cast(z, integer), vmap_method="broadcast_all"
            )
            numbers = cast(bits, jax.numpy.float64)
            return numbers[0], numbers[1:]

        potential = jax.custom_vjp(lambda z: both(z)[0])
        potential.defvjp(both, lambda gradient, factor: (factor * gradient,))
        return potential

    def _call(self, bits: Any) -> np.ndarray:
        """-log p and its gradient [M, 1 + D], all numbers as pairs of integers."""
        z = torch.from_numpy(np.array(bits).view(np.float64)[..., 0].reshape(self.shape))
        result = torch.full((self.shape[0], self.shape[1] + 1), torch.nan, dtype=torch.float64)
        try:
            density = self._density()
            assert density is not None, "it is called from its own step"
            used = density.used.to(self.device, self._dtype)
            x = z.to(self.device, self._dtype)
            values, gradient = density(x * used, 0)
            spare = z * (1 - used).to(z)
            result[:, 0] = 0.5 * spare.square().sum(1) - values.to(z)
            result[:, 1:] = spare - gradient.to(z)
        except BaseException as error:  # the step raises it
            self.error = error
        return result.numpy().view(np.uint32).reshape(*result.shape, 2)


_KNOWN: WeakKeyDictionary[Density, _Trees] = WeakKeyDictionary()
"""The trees of the densities in use."""


def _trees(sampler: NUTS, density: Density, x: Tensor, clock: Clock) -> _Trees:
    """The compiled trees of a density, whose warm-up has the length of the clock's."""
    trees = _KNOWN.get(density)
    if trees is None or (trees.sampler, trees.warmup) != (sampler, clock.warmup):
        trees = _KNOWN[density] = _Trees(sampler, density, x, clock.seed, clock.warmup)
    return trees

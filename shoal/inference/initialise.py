"""Seeded, independent members from any factory of modules."""

import warnings
from collections.abc import Callable

import torch
from torch import Tensor, nn

from shoal.core.errors import ConfigError, ShoalWarning
from shoal.core.seeds import derive, seeded

__all__ = ["Build", "build_members"]

Build = Callable[[], nn.Module]


def build_members(build: Build, indices: range, seed: int) -> list[nn.Module]:
    """One module for each index, member i drawn from a seed of its own; no two are equal.

    A factory that draws nothing at random, or that seeds itself, makes equal members: each of those
    is perturbed by a tenth of the size of its weights, and a warning says so.
    """
    if isinstance(build, nn.Module):
        raise ConfigError(
            "build must be a function that makes a new network at each call, not a network; "
            "type: lambda: MyNetwork()"
        )
    modules = []
    for index in indices:
        own = derive(seed, "member", index)
        with torch.random.fork_rng(), seeded(own):
            torch.manual_seed(own)  # the generators of the GPUs too
            module = build()
        if not isinstance(module, nn.Module):
            raise ConfigError(f"build() must return an nn.Module, not {type(module).__name__}")
        modules.append(module)
    _check_alike(modules)
    _tell_apart(modules, indices, seed)
    return modules


def _check_alike(modules: list[nn.Module]) -> None:
    shapes = [{name: t.shape for name, t in module.state_dict().items()} for module in modules]
    if not any(True for _ in modules[0].parameters()):
        raise ConfigError("build() returned a network without parameters: nothing can be trained")
    if len({id(module) for module in modules}) < len(modules):
        raise ConfigError("build() returned the same module twice; make a new one at each call")
    if any(shape != shapes[0] for shape in shapes):
        raise ConfigError(
            "build() returned networks of different shapes; for mixed architectures pass a list of "
            "(build, count) pairs"
        )


def _tell_apart(modules: list[nn.Module], indices: range, seed: int) -> None:
    equal = [i for i in range(1, len(modules)) if any(_same(modules[i], m) for m in modules[:i])]
    if not equal:
        return
    for i in equal:
        generator = torch.Generator().manual_seed(derive(seed, "perturb", indices[i]))
        for parameter in modules[i].parameters():
            if parameter.requires_grad:
                parameter.data += _noise(parameter, generator)
    warnings.warn(
        f"build() made equal members (it draws nothing at random, or seeds itself); members "
        f"{[indices[i] for i in equal]} were perturbed so that they differ",
        ShoalWarning,
        stacklevel=4,
    )


def _same(a: nn.Module, b: nn.Module) -> bool:
    return all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters(), strict=True))


def _noise(parameter: Tensor, generator: torch.Generator) -> Tensor:
    size = parameter.detach().float().square().mean().sqrt().item() or 1.0
    noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    return (0.1 * size * noise).to(parameter)

"""An ensemble as a calculator of ASE: energies and forces of all members, and their deviations.

from shoal.integrations.ase import Committee, ForceAlarm

atoms.calc = Committee(run, cutoff=5.0)
atoms.get_forces()                      # the mean of the members
atoms.calc.results["forces_comm"]       # [M, n, 3]
dynamics.attach(ForceAlarm(dynamics, threshold=0.3))
"""

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shoal.core.arguments import positive
from shoal.core.errors import ConfigError, DataError
from shoal.core.optional import require
from shoal.inference.ensemble import Ensemble
from shoal.inference.likelihoods import Gaussian, WithDerivatives
from shoal.prediction.decisions.alarm import Alarm
from shoal.prediction.predict import predict
from shoal.prediction.predictive import Predictive
from shoal.training.folder.run import Run, load

__all__ = ["AtomsBatch", "Committee", "ForceAlarm"]

_Base: Any = object
all_changes: Sequence[str] = ()
try:
    from ase.calculators.calculator import Calculator as _Base  # pyright: ignore
    from ase.calculators.calculator import all_changes  # pyright: ignore
except Exception:  # optional: `Committee` says how to install it
    pass

_VOIGT = ((0, 0), (1, 1), (2, 2), (1, 2), (0, 2), (0, 1))


class AtomsBatch:
    """One structure of atoms as a batch object, with the names that graph libraries use.

    Attributes:
        z: atomic numbers [n].
        pos: positions [n, 3].
        batch: zeros [n], the structure that an atom belongs to.
        cell: the cell [1, 3, 3].
        edge_index: pairs (i, j) of neighbours [2, E]; None without a cutoff.
        shifts: what is added to pos[j] - pos[i] in a periodic structure [E, 3]; None without one.
        strain: zeros [1, 3, 3] if stress is wanted. The network then adds pos @ strain to pos, and
            shifts @ strain to shifts. None otherwise.
    """

    def __init__(self, **tensors: Tensor | None) -> None:
        names = ("z", "pos", "batch", "cell", "edge_index", "shifts", "strain")
        for name in names:
            setattr(self, name, tensors.get(name))

    @classmethod
    def of(
        cls, atoms: Any, cutoff: float | None, strained: bool, dtype: torch.dtype, unit: float = 1.0
    ) -> "AtomsBatch":
        """The batch of an `ase.Atoms`.

        Args:
            atoms: the structure.
            cutoff: largest distance of neighbours, in the unit of ASE; None for no neighbours.
            strained: add a strain, for stress.
            dtype: type of real numbers.
            unit: the network's unit of length, in Å.
        """

        def real(array: Any) -> Tensor:
            return torch.as_tensor(np.asarray(array) / unit, dtype=dtype)

        cell, edges = np.asarray(atoms.cell), {}
        if cutoff is not None:
            neighbours = require("ase.neighborlist", extra="ase").neighbor_list
            i, j, steps = neighbours("ijS", atoms, cutoff)
            edges = {"edge_index": torch.as_tensor(np.stack([i, j])), "shifts": real(steps @ cell)}
        return cls(
            z=torch.as_tensor(atoms.numbers, dtype=torch.int64),
            pos=real(atoms.positions),
            batch=torch.zeros(len(atoms), dtype=torch.int64),
            cell=real(cell)[None],
            strain=torch.zeros(1, 3, 3, dtype=dtype) if strained else None,
            **edges,
        )

    def to(self, device: Any) -> "AtomsBatch":
        """The batch on a device."""
        moved = {n: t.to(device) for n, t in vars(self).items() if isinstance(t, Tensor)}
        return AtomsBatch(**moved)


class Committee(_Base):
    """A calculator of ASE whose energy and forces are the means of an ensemble's members.

    The results have `energy`, `free_energy` and `forces`; `energy_comm` [M] and `forces_comm`
    [M, n, 3] of every member; and `energy_var`, `forces_var`, `energy_std` and `forces_std` over
    members, with the population variance, as calculators of MACE give it. With `stress` there are
    `stress`, `stress_comm`, `stress_var` and `stress_std`, in the order of Voigt.

    Args:
        source: a run, its folder, or an ensemble such as `Ensemble.of(networks)`. Its output is the
            energy. Forces need no training on forces.
        cutoff: largest distance of neighbours, whose list the networks then get; in Å.
        inputs: makes the network's inputs from `ase.Atoms`; None for an `AtomsBatch`.
        of: name of the positions among the inputs.
        stress: also compute stress, with networks that take `AtomsBatch.strain`.
        energy_units_to_eV: the network's unit of energy.
        length_units_to_A: the network's unit of length.
        device: device to compute on; None for that of the ensemble.
    """

    implemented_properties: Sequence[str] = (
        "energy", "free_energy", "forces", "energy_comm", "forces_comm", "energy_var",
        "forces_var", "energy_std", "forces_std",
    )  # fmt: skip

    def __init__(
        self,
        source: Run | Ensemble | str | os.PathLike[str],
        *,
        cutoff: float | None = None,
        inputs: Callable[[Any], Any] | None = None,
        of: str = "pos",
        stress: bool = False,
        energy_units_to_eV: float = 1.0,
        length_units_to_A: float = 1.0,
        device: str | torch.device | None = None,
        **settings: Any,
    ) -> None:
        require("ase", extra="ase")
        if stress and inputs is not None:
            raise ConfigError("stress needs an AtomsBatch with its strain; leave inputs out")
        super().__init__(**settings)
        opened: Any = load(Path(source)) if isinstance(source, str | os.PathLike) else source
        ensemble = getattr(opened, "ensemble", opened)
        self.source, self.inputs, self.of, self.device = opened, inputs, of, device
        self.dtype, self.cutoff, self.strained = ensemble.dtype, cutoff, stress
        self.energy_unit = positive("energy_units_to_eV", energy_units_to_eV)
        self.length_unit = positive("length_units_to_A", length_units_to_A)
        self.implemented_properties = list(self.implemented_properties)
        if stress:
            self.implemented_properties += ["stress", "stress_comm", "stress_var", "stress_std"]

    def calculate(
        self,
        atoms: Any = None,
        properties: Sequence[str] = ("energy",),
        system_changes: Sequence[str] = all_changes,
    ) -> None:
        """Compute all results of a structure; ASE calls this when the structure has changed."""
        super().calculate(atoms, properties, system_changes)
        pred = self.predict(self.atoms)
        energies = pred.of_values.columns.member_means.reshape(pred.size, -1)
        if energies.shape[1] != 1:
            raise DataError(
                f"the networks give {energies.shape[1]} outputs for one structure, not its energy"
            )
        force_unit = self.energy_unit / self.length_unit
        parts = {"energy": self.energy_unit * _array(energies[:, 0])}
        parts["forces"] = force_unit * _array(_downhill(pred)[:, 0])
        if self.strained:
            slopes = -_downhill(self.predict(self.atoms, "strain"))[:, 0]
            volume = self.atoms.get_volume()
            each = self.energy_unit * _array((slopes + slopes.mT) / 2) / volume
            parts["stress"] = np.stack([each[:, i, j] for i, j in _VOIGT], -1)
        self.results = {}
        for name, each in parts.items():
            mean, variance = each.mean(0), each.var(0)
            found = {"": mean, "_comm": each, "_var": variance, "_std": np.sqrt(variance)}
            self.results |= {f"{name}{end}": _plain(value) for end, value in found.items()}
        self.results["free_energy"] = self.results["energy"]

    def predict(self, atoms: Any, of: str | None = None) -> Predictive:
        """The prediction for a structure or a list of structures, with derivatives by `of`.

        `shoal.decisions.ood_alarm` takes it, with the score "derivative_deviation".
        """
        frames = atoms if isinstance(atoms, list) else [atoms]
        batches = [self._inputs(frame) for frame in frames]
        known = {} if hasattr(self.source, "likelihood") else {"likelihood": Gaussian()}
        options = {"derivatives_of": of or self.of, "device": self.device, **known}
        return predict(self.source, batches, **options)

    def _inputs(self, atoms: Any) -> Any:
        if self.inputs is not None:
            return self.inputs(atoms)
        return AtomsBatch.of(atoms, self.cutoff, self.strained, self.dtype, self.length_unit)


def _downhill(pred: Predictive) -> Tensor:
    """Minus the derivatives of the energies [M, B, ...], whatever the sign of the likelihood."""
    likelihood = pred.likelihood
    assert isinstance(likelihood, WithDerivatives)
    return -likelihood.sign * pred.derivatives


def _array(tensor: Tensor) -> np.ndarray:
    return tensor.detach().cpu().double().numpy()


def _plain(value: Any) -> Any:
    return float(value) if np.ndim(value) == 0 else value


class ForceAlarm:
    """Stops a simulation, or keeps its structure, where the members disagree on the forces.

    Attach it to dynamics of ASE. The measure is the largest deviation of an atom's force,
    max_i sqrt(mean_m |F_mi - F_i|²), in eV/Å (`max_devi_f` of DP-GEN).

    Args:
        dynamics: the dynamics, whose atoms have a `Committee`.
        threshold: deviation above which the alarm is raised, as by one that is NaN; or what
            `shoal.decisions.ood_alarm` found with score="derivative_deviation" for
            `Committee.predict(frames)`.
        stop: end the run of the dynamics after the step that raised the alarm.
        keep: called with a copy of the structure, such as `frames.append`.

    Attributes:
        deviations: the deviation of every structure that was looked at.
        raised: whether the last of them raised the alarm.
    """

    def __init__(
        self,
        dynamics: Any,
        threshold: float | Alarm,
        *,
        stop: bool = True,
        keep: Callable[[Any], Any] | None = None,
    ) -> None:
        self.dynamics, self.stop, self.keep = dynamics, stop, keep
        self.unit = 1.0
        if isinstance(threshold, Alarm):
            if threshold.score != "derivative_deviation":
                raise ConfigError(
                    f"the alarm is one of {threshold.score}, not of forces; type "
                    f"ood_alarm(pred, score='derivative_deviation')"
                )
            calc = dynamics.atoms.calc
            self.unit = calc.energy_unit / calc.length_unit
            threshold = threshold.threshold * self.unit
        self.threshold = positive("threshold", threshold)
        self.deviations: list[float] = []
        self.raised = False

    def __call__(self) -> None:
        """Look at the present structure; the dynamics call this."""
        atoms = self.dynamics.atoms
        atoms.get_forces()
        variance = atoms.calc.results["forces_var"]
        deviation = float(np.sqrt(variance.sum(-1)).max())
        self.deviations.append(deviation)
        self.raised = not deviation <= self.threshold  # also where it is not a number
        if not self.raised:
            return
        if self.keep is not None:
            kept = atoms.copy()
            kept.info["force_deviation"] = deviation
            self.keep(kept)
        if self.stop:
            self.dynamics.max_steps = self.dynamics.nsteps

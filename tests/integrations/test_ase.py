"""A committee in ASE: results of members, derivatives by differences, dynamics, and the alarm."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from kinds_networks import schnet
from small_runs import assert_one_sentence
from torch import nn

import shoal
from shoal.core.errors import ConfigError

ase = pytest.importorskip("ase", reason="ase is not installed")
build = pytest.importorskip("ase.build")

from shoal.integrations.ase import AtomsBatch, Committee, ForceAlarm  # noqa: E402

# older versions of ASE leave a file open
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

CUTOFF = 4.5


class Pairs(nn.Module):
    """An energy of smooth functions of the distances between neighbours, also if strained."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, data):
        strain = 0.0 if data.strain is None else data.strain[0]
        pos, shifts = (
            t if data.strain is None else t + t @ strain for t in (data.pos, data.shifts)
        )
        i, j = data.edge_index
        distance = (pos[j] - pos[i] + shifts).norm(dim=-1, keepdim=True)
        switch = (1 - (distance / CUTOFF).square()).clamp(min=0).square()
        each = switch * self.net(distance / 2)
        points = int(data.batch.max()) + 1
        return each.new_zeros(points, 1).index_add(0, data.batch[i], each)


def ensemble(members=3):
    return shoal.Ensemble.init(Pairs, members).to(torch.float64)


def crystal():
    atoms = build.bulk("Cu", cubic=True)
    atoms.rattle(0.1, seed=0)
    return atoms


def test_results_are_those_of_the_members_with_the_population_variance():
    atoms, members = crystal(), ensemble()
    atoms.calc = Committee(members, cutoff=CUTOFF)
    forces, results = atoms.get_forces(), atoms.calc.results
    batch = AtomsBatch.of(atoms, CUTOFF, False, torch.float64)
    energies, each = [], []
    for module in members:
        batch.pos.requires_grad_()
        energy = module(batch).sum()
        energies.append(energy.item())
        each.append(-torch.autograd.grad(energy, batch.pos)[0].numpy())
        batch.pos = batch.pos.detach()
    np.testing.assert_allclose(results["forces_comm"], each, rtol=0, atol=1e-12)
    np.testing.assert_allclose(results["energy_comm"], energies, rtol=0, atol=1e-12)
    np.testing.assert_allclose(forces, np.mean(each, 0), rtol=0, atol=1e-12)
    assert atoms.get_potential_energy() == pytest.approx(np.mean(energies))
    assert results["energy_var"] == pytest.approx(np.var(energies))
    np.testing.assert_allclose(results["forces_var"], np.var(each, 0))
    np.testing.assert_allclose(results["forces_std"], np.std(each, 0))
    assert atoms.calc.get_property("energy_std", atoms) == pytest.approx(np.std(energies))


def test_forces_and_stress_are_differences_of_the_energy():
    fd = pytest.importorskip("ase.calculators.fd")
    atoms = crystal()
    atoms.calc = Committee(ensemble(), cutoff=CUTOFF, stress=True)
    forces = fd.calculate_numerical_forces(atoms, eps=1e-4)
    np.testing.assert_allclose(atoms.get_forces(), forces, rtol=0, atol=1e-6)
    stress = fd.calculate_numerical_stress(atoms, eps=1e-5)
    np.testing.assert_allclose(atoms.get_stress(), stress, rtol=0, atol=1e-7)
    assert atoms.calc.results["stress_comm"].shape == (3, 6)


def test_units_of_the_network():
    atoms = crystal()
    atoms.calc = Committee(ensemble(), cutoff=CUTOFF)
    energy, forces = atoms.get_potential_energy(), atoms.get_forces()

    def in_nanometres(atoms):
        batch = AtomsBatch.of(atoms, CUTOFF, False, torch.float64, unit=10.0)
        batch.pos, batch.shifts = 10 * batch.pos, 10 * batch.shifts
        return batch

    atoms.calc = Committee(
        ensemble(), inputs=in_nanometres, energy_units_to_eV=2.0, length_units_to_A=10.0
    )
    assert atoms.get_potential_energy() == pytest.approx(2 * energy)
    np.testing.assert_allclose(atoms.get_forces(), forces * 2 / 10, rtol=1e-10)


def cluster(scale=1.0):
    atoms = ase.Atoms("Cu4", [[0, 0, 0], [2.5, 0, 0], [0, 2.5, 0], [0, 0, 2.5]])
    atoms.positions *= scale
    return atoms


def dynamics(atoms, step=1.0, temperature=300):
    from ase.md.verlet import VelocityVerlet

    scale = np.sqrt(atoms.get_masses()[:, None] * ase.units.kB * temperature)
    atoms.set_momenta(scale * np.random.RandomState(0).randn(len(atoms), 3))
    return VelocityVerlet(atoms, step * ase.units.fs)


def test_a_trained_run_keeps_the_energy_of_its_dynamics_as_a_single_member_does():
    from ase.calculators.emt import EMT

    frames, random = [], np.random.RandomState(1)
    for _ in range(24):
        atoms = cluster()
        atoms.positions += 0.15 * random.randn(4, 3)
        atoms.calc = EMT()
        frames.append(atoms)
    pairs = [
        (
            AtomsBatch.of(atoms, CUTOFF, False, torch.float64),
            (
                torch.tensor([atoms.get_potential_energy()]).double(),
                torch.tensor(atoms.get_forces()),
            ),
        )
        for atoms in frames
    ]
    likelihood = shoal.likelihoods.WithDerivatives(of="pos", sign=-1)
    members = ensemble()
    options = {"likelihood": likelihood, "epochs": 6, "lr": 1e-2, "progress": False}
    run = shoal.fit(members, pairs, precision="float64", **options)
    drifts = {}
    for name, source in {"all": run, "one": run.ensemble[:1]}.items():
        atoms = cluster()
        atoms.calc = Committee(source, cutoff=CUTOFF)
        moving, energies = dynamics(atoms), []
        moving.attach(lambda a=atoms, e=energies: e.append(a.get_total_energy()))
        moving.run(40)
        drifts[name] = np.ptp(energies)
    assert drifts["all"] < 2 * drifts["one"] + 1e-3
    assert drifts["all"] < 0.1 * atoms.get_kinetic_energy() + 1e-2


def test_the_alarm_stops_the_dynamics_and_keeps_the_structure():
    atoms, kept = cluster(1.2), []
    atoms.calc = Committee(ensemble(), cutoff=CUTOFF)
    frames = [cluster(scale) for scale in np.linspace(1.1, 1.2, 20)]
    pred = atoms.calc.predict(frames)
    rule = shoal.decisions.ood_alarm(pred, rate=0.1, score="derivative_deviation")
    moving = dynamics(atoms, step=2.0)
    atoms.set_momenta(-5 * atoms.positions)  # the cluster collapses
    alarm = ForceAlarm(moving, rule, keep=kept.append)
    moving.attach(alarm)
    moving.run(200)
    assert alarm.raised and moving.nsteps < 200
    assert alarm.deviations[-1] > rule.threshold >= max(alarm.deviations[:-1])
    deviation = np.sqrt(atoms.calc.results["forces_var"].sum(-1)).max()
    assert alarm.deviations[-1] == pytest.approx(deviation)
    assert kept[0].info["force_deviation"] == alarm.deviations[-1] and kept[0].calc is None
    watched = ForceAlarm(moving, 1e-9, stop=False, keep=kept.append)
    moving.observers.clear()
    moving.attach(watched)
    moving.run(3)
    assert len(watched.deviations) == 3 + (moving.nsteps == 3) and len(kept) > 2


def test_the_alarm_is_raised_where_a_force_is_not_a_number():
    results = {"forces_var": np.full((2, 3), np.nan)}
    atoms = SimpleNamespace(get_forces=lambda: None, calc=SimpleNamespace(results=results))
    moving = SimpleNamespace(atoms=atoms, nsteps=5, max_steps=9)
    alarm = ForceAlarm(moving, 1.0)
    alarm()
    assert alarm.raised and moving.max_steps == 5


def test_networks_of_torch_geometric_that_were_trained_elsewhere():
    pytest.importorskip("torch_geometric")
    networks = [schnet().double() for _ in range(3)]
    atoms = cluster()
    atoms.calc = Committee(shoal.Ensemble.of(networks), cutoff=CUTOFF)
    batch = AtomsBatch.of(atoms, CUTOFF, False, torch.float64)
    for network, forces in zip(networks, _each(atoms), strict=True):
        batch.pos.requires_grad_()
        exact = -torch.autograd.grad(network(batch).sum(), batch.pos)[0]
        np.testing.assert_allclose(forces, exact, rtol=0, atol=1e-10)


@pytest.mark.filterwarnings("ignore")
def test_a_committee_of_mace_has_the_results_of_its_own_calculator(double):
    """Names, shapes and values of mace-torch, whose own calculator is a loop over models."""
    pytest.importorskip("mace", reason="mace-torch is not installed")
    from e3nn import o3
    from mace import data as mace_data
    from mace import modules
    from mace.calculators import MACECalculator
    from mace.tools import torch_geometric, utils

    block = modules.interaction_classes["RealAgnosticResidualInteractionBlock"]

    def mace(seed):
        torch.manual_seed(seed)
        return modules.ScaleShiftMACE(
            r_max=4.0, num_bessel=4, num_polynomial_cutoff=5, max_ell=1, interaction_cls=block,
            interaction_cls_first=block, num_interactions=2, num_elements=2,
            hidden_irreps=o3.Irreps("4x0e"), MLP_irreps=o3.Irreps("4x0e"),
            atomic_energies=np.array([1.0, 3.0]), avg_num_neighbors=4.0, atomic_numbers=[1, 8],
            correlation=1, gate=nn.functional.silu, atomic_inter_scale=1.0, atomic_inter_shift=0.0,
        )  # fmt: skip

    class Energy(nn.Module):
        def __init__(self, network):
            super().__init__()
            self.network = network

        def forward(self, batch):
            return self.network(batch.to_dict(), compute_force=False)["energy"]

    def inputs(atoms):
        config, table = mace_data.config_from_atoms(atoms), utils.AtomicNumberTable([1, 8])
        frame = mace_data.AtomicData.from_config(config, z_table=table, cutoff=4.0)
        return next(iter(torch_geometric.dataloader.DataLoader([frame], batch_size=1)))

    networks = [mace(seed) for seed in range(3)]
    atoms = ase.Atoms("OHHOHH", 4 * np.random.RandomState(0).rand(6, 3))
    theirs = MACECalculator(models=networks, device="cpu", default_dtype="float64")
    theirs.calculate(atoms, ["energy", "forces"])
    members = shoal.Ensemble.of([Energy(network) for network in networks])
    mine = Committee(members, inputs=inputs, of="positions")
    mine.calculate(atoms)
    names = ("energy", "energy_comm", "energy_var", "forces", "forces_comm", "forces_var")
    for name in names:
        np.testing.assert_allclose(mine.results[name], theirs.results[name], rtol=0, atol=1e-12)


def _each(atoms):
    atoms.get_forces()
    return atoms.calc.results["forces_comm"]


def test_what_does_not_fit_is_refused_in_a_sentence():
    atoms = cluster()
    atoms.calc = Committee(ensemble(), cutoff=CUTOFF)
    entropy = shoal.decisions.Alarm(1.0, 0.1, 0.0, 0.2, "variance", 10)
    with pytest.raises(ConfigError) as caught:
        ForceAlarm(dynamics(atoms), entropy)
    assert_one_sentence(caught.value, "derivative_deviation")
    with pytest.raises(ConfigError) as caught:
        Committee(ensemble(), inputs=lambda atoms: atoms, stress=True)
    assert_one_sentence(caught.value, "strain")

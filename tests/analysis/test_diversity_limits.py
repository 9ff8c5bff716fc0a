"""The curves on the plane of diversity and accuracy, against simulated functions."""

import math

import pytest
import torch

from shoal.analysis.diversity import (
    diversity,
    hard_bound,
    hard_floor,
    independent_errors,
    perturbed_reference,
)

CLASSES = (2, 3, 10, 100)
N = 200_000
RANDOM = torch.Generator().manual_seed(0)


def others(labels, classes):
    """A wrong label for each, all wrong ones alike."""
    step = torch.randint(1, classes, labels.shape, generator=RANDOM)
    return (labels + step) % classes


def function(truth, accuracy, classes):
    right = torch.rand(len(truth), generator=RANDOM) < accuracy
    return torch.where(right, truth, others(truth, classes))


@pytest.mark.parametrize("classes", CLASSES)
@pytest.mark.parametrize("reference", [0.6, 0.71, 0.98])
def test_both_curves_meet_at_chance(reference, classes):
    chance = torch.tensor(1 / classes, dtype=torch.float64)
    for curve in (perturbed_reference, independent_errors):
        assert float(curve(reference, chance, classes)) == pytest.approx(1 - 1 / classes)


def test_published_values():
    half = torch.tensor(0.5, dtype=torch.float64)
    assert float(perturbed_reference(0.71, half, 10)) == pytest.approx(0.3098, abs=1e-4)
    assert float(independent_errors(0.71, half, 10)) == pytest.approx(0.6289, abs=1e-4)


@pytest.mark.parametrize("classes", CLASSES)
@pytest.mark.parametrize("accuracy", [0.55, 0.7, 0.85])
def test_independent_errors_by_simulation(accuracy, classes):
    truth = torch.randint(classes, (N,), generator=RANDOM)
    one, two = function(truth, 0.85, classes), function(truth, accuracy, classes)
    expected = float(independent_errors(0.85, torch.tensor(accuracy), classes))
    assert float((one != two).double().mean()) == pytest.approx(expected, abs=4 / math.sqrt(4 * N))


@pytest.mark.parametrize("classes", CLASSES)
@pytest.mark.parametrize("replaced", [0.0, 0.1, 0.5])
def test_perturbed_reference_by_simulation(replaced, classes):
    truth = torch.randint(classes, (N,), generator=RANDOM)
    reference = function(truth, 0.85, classes)
    changed = torch.rand(N, generator=RANDOM) < replaced
    labels = torch.where(changed, others(reference, classes), reference)
    own, accuracy = ((f == truth).double().mean() for f in (reference, labels))
    expected = float(perturbed_reference(float(own), accuracy, classes))
    # The slope of d in the two measured accuracies is at most 1 / (a* - chance) each.
    noise = 4 * 2 / (0.85 - 0.5) / math.sqrt(4 * N)
    assert float((reference != labels).double().mean()) == pytest.approx(expected, abs=noise)


@pytest.mark.parametrize("classes", CLASSES)
def test_no_pair_of_functions_leaves_the_hard_bounds_and_both_are_reached(classes):
    truth = torch.randint(classes, (1000,), generator=RANDOM)
    for wrong_one, wrong_two in ((0.1, 0.3), (0.5, 0.5), (0.7, 0.6)):
        a, b = round(1000 * wrong_one), round(1000 * wrong_two)
        one, near, far = truth.clone(), truth.clone(), truth.clone()
        one[:a] = (truth[:a] + 1) % classes
        near[:b] = (truth[:b] + 1) % classes
        far[-b:] = (truth[-b:] + (1 if classes == 2 else 2)) % classes
        accuracy = torch.tensor(1 - wrong_two, dtype=torch.float64)
        most = float(hard_bound(1 - wrong_one, accuracy, classes))
        least = float(hard_floor(1 - wrong_one, accuracy))
        assert float((one != far).double().mean()) == pytest.approx(most)
        assert float((one != near).double().mean()) == pytest.approx(least)


@pytest.mark.parametrize("classes", CLASSES)
def test_the_curves_lie_between_the_hard_bounds(classes):
    a = torch.linspace(1 / classes, 0.9, 50, dtype=torch.float64)
    low, high = hard_floor(0.9, a) - 1e-12, hard_bound(0.9, a, classes) + 1e-12
    perturbed, independent = (f(0.9, a, classes) for f in (perturbed_reference, independent_errors))
    assert bool((low <= perturbed).all() and (perturbed <= independent + 1e-12).all())
    assert bool((independent <= high).all())


def test_a_function_that_never_errs_has_no_diversity():
    found = diversity(torch.tensor([0.0, 0.2]), torch.tensor([1.0, 0.9]))
    assert bool(found[0].isnan())
    assert float(found[1]) == pytest.approx(2.0)

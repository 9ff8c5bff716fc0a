r"""Diversity against accuracy: how much two functions of given accuracies can differ.

A reference has accuracy a*, another function has accuracy a, among C classes. The pairwise
disagreement d is the share of inputs on which their labels differ. Diversity is d / (1 - a), the
disagreement divided by the function's error rate. Two models of errors give reference curves:

- *perturbed reference*: the function is the reference with some labels replaced at random,
  $d = (a^* - a) / (a^* - (1 - a^*)/(C - 1))$. It differs no more than its accuracy requires.
- *independent errors*: the function's errors are independent of the reference, with uniform wrong
  labels, $d = a^*(1-a) + a(1-a^*) + (1-a^*)(1-a)(C-2)/(C-1)$.

Neither curve is a bound: functions that avoid each other's errors lie above the second curve. No
pair of functions exceeds the *hard bound* d <= (1 - a) + (1 - a*), and every pair differs at least
by |a* - a|. Both curves meet at a = 1/C, where d = 1 - 1/C. Fort et al. (2019), arXiv 1912.02757.
"""

import torch
from torch import Tensor

__all__ = ["diversity", "hard_bound", "hard_floor", "independent_errors", "perturbed_reference"]


def diversity(apart: Tensor, accuracy: Tensor) -> Tensor:
    """d / (1 - a); NaN for a function without errors.

    >>> diversity(torch.tensor([0.1]), torch.tensor([0.8]))
    tensor([0.5000])
    """
    errors = 1 - accuracy
    return torch.where(errors > 0, apart / errors, torch.nan)


def perturbed_reference(reference: float, accuracy: Tensor, classes: int) -> Tensor:
    """d of a reference with labels replaced at random down to this accuracy."""
    return (reference - accuracy) / (reference - (1 - reference) / (classes - 1))


def independent_errors(reference: float, accuracy: Tensor, classes: int) -> Tensor:
    """d of functions with independent errors.

    >>> independent_errors(0.71, torch.tensor([0.5]), classes=10)
    tensor([0.6289])
    """
    both_wrong = (1 - reference) * (1 - accuracy)
    one_wrong = reference * (1 - accuracy) + accuracy * (1 - reference)
    return one_wrong + both_wrong * (classes - 2) / (classes - 1)


def hard_bound(reference: float, accuracy: Tensor, classes: int) -> Tensor:
    """The largest possible d of two functions: they agree wherever both are correct.

    With two classes they also agree wherever both are wrong.
    """
    most = (2 - reference - accuracy).clamp_max(1)
    return torch.minimum(most, reference + accuracy) if classes == 2 else most


def hard_floor(reference: float, accuracy: Tensor) -> Tensor:
    """The smallest possible d of two functions: |a* - a|."""
    return (reference - accuracy).abs()

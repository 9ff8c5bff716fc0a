"""Mean uncertainty of a prediction: numbers that need no targets."""

from shoal.prediction.metric import ANY, CLASSES, average, register
from shoal.prediction.predictive import ArrayLike, Predictive

__all__ = ["confidence", "disagreement", "entropy", "mutual_information"]


@register("entropy", CLASSES, "neither")
def entropy(pred: Predictive, y: ArrayLike | None = None) -> float:
    """Mean entropy of the predicted probabilities, in nats: 0 to log C."""
    return average(pred.entropy())


@register("mutual_information", CLASSES, "neither")
def mutual_information(pred: Predictive, y: ArrayLike | None = None) -> float:
    """Mean mutual information of label and member, in nats: 0 to log M, 0 when members agree."""
    return average(pred.mutual_information())


@register("disagreement", ANY, "neither", cite=("dangelo2021repulsive",))
def disagreement(pred: Predictive, y: ArrayLike | None = None) -> float:
    """Mean standard deviation over members of what they predict."""
    return average(pred.disagreement())


@register("confidence", CLASSES, "neither")
def confidence(pred: Predictive, y: ArrayLike | None = None) -> float:
    """Mean of the largest class probability: 1/C to 1."""
    return average(pred.confidence())

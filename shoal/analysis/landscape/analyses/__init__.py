"""The parts of the landscape: along training, around a solution, between two, at the bottom."""

from shoal.analysis.landscape.analyses import along, around, between, curvature

__all__ = ["along", "around", "between", "curvature"]

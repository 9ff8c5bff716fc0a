"""The parts of the landscape, by where they look: along training, around a solution, between two."""

from shoal.analysis.landscape.parts import along, around, between, curvature

__all__ = ["along", "around", "between", "curvature"]

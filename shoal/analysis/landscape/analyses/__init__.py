"""The landscape analyses: along training, around a member, between members, curvature."""

from shoal.analysis.landscape.analyses import along, around, between, curvature

__all__ = ["along", "around", "between", "curvature"]

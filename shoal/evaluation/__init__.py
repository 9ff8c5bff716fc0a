"""Scores of a run on test, shifted and out-of-distribution data."""

"""The report: one HTML page about finished runs."""

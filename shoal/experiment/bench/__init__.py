"""Training speed on this machine, and agreement of all engines."""

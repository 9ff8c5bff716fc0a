"""What an ensemble means: how its members differ, and in what sense it is Bayesian."""

"""In what sense an ensemble is Bayesian: the empirical-Bayes view of trained members."""

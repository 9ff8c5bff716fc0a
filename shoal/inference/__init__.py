"""What is learned: the members, the likelihood, the prior and the posterior they make."""

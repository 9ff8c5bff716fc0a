"""How fast this machine trains ensembles, and whether every engine computes the same."""

"""How the networks of members are stacked and run."""

"""Products with the members' coordinates and small matrices, for a GPU and a CPU."""

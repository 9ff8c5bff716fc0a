"""How an ensemble is trained: one step, one loop around it, one folder that remembers it."""

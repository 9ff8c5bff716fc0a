"""What `shoal fidelity` writes: rows as they come, one table, and its figures."""

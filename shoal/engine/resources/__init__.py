"""What fits, and what is fast: memory, captured graphs, transfers."""

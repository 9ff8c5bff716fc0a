"""What fits and what is fast: memory, captured graphs, transfers, and the choice of a runner."""

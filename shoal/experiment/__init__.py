"""Config files, grids of runs, jobs and benchmarks."""

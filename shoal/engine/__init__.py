"""Execution of members: member runner, graphs, streams, fused layers, kernels; never results."""

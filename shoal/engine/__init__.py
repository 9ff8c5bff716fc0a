"""How members run, never what they compute: runner, graphs, streams, fused layers, kernels."""

def write_figures(rows, folder, budget): return []

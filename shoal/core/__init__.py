"""The vocabulary: symbols, errors, registries, files, and arithmetic on member-stacked trees."""

"""Symbols, errors, registries, files, and arithmetic on trees stacked over members."""

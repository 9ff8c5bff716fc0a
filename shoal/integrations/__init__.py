"""Shoal in other tools: each optional library is imported in the file that needs it."""

"""Data read from files."""

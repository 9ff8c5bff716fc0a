"""Adapters of one network: their layers, what they change, and their files."""

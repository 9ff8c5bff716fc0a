"""Chooses method and strength on held-out data."""

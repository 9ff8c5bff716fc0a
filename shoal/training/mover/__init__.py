"""Applies velocities, within the memory of the device."""

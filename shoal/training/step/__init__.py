"""The velocity of one batch."""

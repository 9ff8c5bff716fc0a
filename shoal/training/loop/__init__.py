"""From the first step to the last."""

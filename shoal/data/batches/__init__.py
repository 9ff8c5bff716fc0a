"""Data as the batches that train."""

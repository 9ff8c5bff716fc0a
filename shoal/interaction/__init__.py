"""Interaction of members: pure mathematics on tensors, without models and data loaders."""

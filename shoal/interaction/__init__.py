"""How members act on each other: pure mathematics on tensors, no model and no data loader."""

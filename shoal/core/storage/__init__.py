"""Files that survive a crash: atomic writes, strict reading, locks and checkpoints."""

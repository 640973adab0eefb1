"""Programs that made the stored checkpoints."""

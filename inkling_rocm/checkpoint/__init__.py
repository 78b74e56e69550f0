"""Reading and writing Inkling checkpoints."""

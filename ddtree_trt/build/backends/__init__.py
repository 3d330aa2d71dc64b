"""What each backend makes of two checkpoints."""

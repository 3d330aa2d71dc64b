"""Checkpoints to engine directories."""

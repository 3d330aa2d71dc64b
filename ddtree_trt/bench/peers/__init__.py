"""Other implementations on the same checkpoints, prompts and stop rules."""

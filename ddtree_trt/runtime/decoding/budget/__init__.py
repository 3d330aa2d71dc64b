"""How many draft nodes a round verifies: fixed, or by what rounds cost and gain, as docs/architecture.md states."""

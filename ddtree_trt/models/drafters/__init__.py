"""The kinds of drafters."""

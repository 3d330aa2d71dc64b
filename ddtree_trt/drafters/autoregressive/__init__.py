"""A small language model as a drafter: its graph, and the drafter on each engine."""

"""Engines made for measuring: random weights, forced acceptance."""

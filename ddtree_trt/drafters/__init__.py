"""Drafters: a package for each kind, and `registry.py`, the list of them."""

"""Drafters: their kinds, and one module for each architecture that is no language model."""

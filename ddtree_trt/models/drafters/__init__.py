"""Drafters that are no language models: one module for each architecture."""

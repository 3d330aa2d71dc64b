"""Dialects of config.json: one module for each family of publishers, and the choice among them.

All of them are read into the same records (`models/`); no other room knows a foreign field of a drafter.
"""

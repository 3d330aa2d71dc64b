"""The backends' parts of a build."""

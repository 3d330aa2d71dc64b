"""Measuring an engine and its peers: what runs, how it is timed, and how results are kept and shown.

Nothing in `build` or `runtime` knows of this package.
"""

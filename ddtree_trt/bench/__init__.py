"""Benchmarks of an engine and its peers: running and timing cases, storing results and showing them.

Nothing in `build` or `runtime` imports this package.
"""

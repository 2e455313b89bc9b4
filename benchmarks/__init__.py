"""Measurements, each a module: `python -m benchmarks.startup`, `python -m benchmarks.planning`."""

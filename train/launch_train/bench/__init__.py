"""Measure this machine and compare it with the expected figures for its GPUs: `python -m launch_train.bench --help`."""

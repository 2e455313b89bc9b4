"""What this machine can do, measured, and held against what its kind should give: `python -m launch_train.bench
--help`."""

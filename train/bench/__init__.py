"""What this machine can do, measured, and held against what its kind should give: `python -m train.bench --help`.

Standard library only as long as nothing is measured: the node imports `train.bench.preflight` before it knows that
torch works.
"""

"""Send a run's rows to W&B and MLflow, from a process beside the training (telemetry/logger_process.py)."""

"""A run's metrics and progress."""

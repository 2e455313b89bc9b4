"""A run's log lines, from Cloud Logging or the run folder."""

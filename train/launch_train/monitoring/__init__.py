"""Monitor a machine during training, and report GPU faults."""

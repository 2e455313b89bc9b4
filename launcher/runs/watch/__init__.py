"""Watch a job until it ends: pollers and events."""

"""Profile a few steps of a run, and explain what limits its speed."""

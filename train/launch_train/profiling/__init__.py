"""What bounds a run: a few steps recorded, and read in plain words."""

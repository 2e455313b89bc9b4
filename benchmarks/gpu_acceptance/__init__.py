"""One command for a GPU machine: does everything work there, how fast is it, and what would make it faster."""

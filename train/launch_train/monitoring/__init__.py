"""What a machine does beside training, and what is wrong with its GPUs."""

"""The commands of `launch vm`."""

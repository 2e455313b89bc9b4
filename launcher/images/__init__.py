"""Build, append to and push the training image."""

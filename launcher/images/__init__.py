"""The training image: built, appended to, and pushed."""

"""One command for a GPU machine: check every feature, measure the speed, and look for speed-ups."""

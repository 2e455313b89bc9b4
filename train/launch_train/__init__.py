"""The package in the container: the node agent (`launch_train.node`), the built-in trainer and the API for scripts."""

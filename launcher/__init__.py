"""launch: one YAML spec and one command for a multi-GPU training run on Google Cloud."""

__version__ = "0.1.0"

"""Other frameworks under the node: their packages are the extra [judges] of pyproject.toml."""

"""Used by all parts of the package: contract with the launcher, errors, config, storage."""

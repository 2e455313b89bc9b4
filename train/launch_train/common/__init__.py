"""What every part uses: the contract with launcher, errors, config, storage."""

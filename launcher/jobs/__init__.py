"""Jobs and VMs as data, whichever service runs them. Pure."""

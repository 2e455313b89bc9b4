"""Jobs and VMs as data, the same for both services. Pure."""

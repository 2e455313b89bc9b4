"""Compute Engine VMs as a backend, and VMs to work on."""

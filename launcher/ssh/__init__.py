"""SSH to VMs: keys, OS Login, the route, commands, sessions and file sync."""

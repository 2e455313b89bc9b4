"""Jobs on a real Slurm: Debian's slurmctld and two slurmd on this machine, with GPUs that are device files."""

"""Workers on other machines: those that join, and launchers for SLURM, HyperQueue, Ray and commands."""

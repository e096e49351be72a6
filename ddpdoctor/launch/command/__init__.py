"""What the command line, the environment and Slurm ask for."""

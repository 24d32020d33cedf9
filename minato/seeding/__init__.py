"""Random numbers that depend on a sample and on nothing else."""

"""Random numbers that depend on a sample and nothing else."""

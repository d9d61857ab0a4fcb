"""A provider from somewhere else."""

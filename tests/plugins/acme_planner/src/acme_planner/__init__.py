"""A planner from somewhere else."""

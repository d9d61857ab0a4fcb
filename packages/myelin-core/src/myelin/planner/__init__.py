"""Which node holds which layers: the run plan's types, the arithmetic, and the default planner."""

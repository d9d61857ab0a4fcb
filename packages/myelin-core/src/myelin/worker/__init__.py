"""A node's own program: it announces itself, loads one stage, and passes tokens through it until it is told to stop."""

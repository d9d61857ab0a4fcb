"""Myelin provider: nodes as local processes."""

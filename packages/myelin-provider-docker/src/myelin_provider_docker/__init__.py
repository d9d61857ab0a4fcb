"""Myelin provider: nodes as containers."""
